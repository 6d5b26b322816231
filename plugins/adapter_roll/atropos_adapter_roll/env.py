"""Any Atropos environment as a `gem.Env`. Importing this module registers it with gem as `atropos`.

env = gem.make("atropos", environment="gsm8k")
observation, info = env.reset(seed=7)
observation, reward, terminated, truncated, info = env.step("#### 12")
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gem

from atropos_adapter_roll.config import KNOWN_ENDS, read_env_options
from atropos_adapter_roll.observation import Observation, show
from atropos_adapter_roll.reward import parts_of, turns_of, warn_of_wrong_replies_ahead
from atropos_adapter_roll.shared import shared_loop
from atropos_adapter_roll.threaded_rollout import Event, PendingReply, ThreadedRollout
from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError, ConfigError, DataError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import failed_by, runs_groups
from atropos_core.seeds import derive
from atropos_core.types import ABSTAINED, Episode, Failed, Split, Task, Tokens

ENV_ID = "atropos"
log = logging.getLogger(__name__)
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


@dataclass
class Record:
    """The outcome of an episode, for env managers and for the group filter. All of it is JSON."""

    environment: str
    seed: int
    task: str = ""
    steps: int = 0
    ended: bool = False
    failed: str = ""  # the reason; a failed episode has no reward
    first: Observation = ""  # the first observation
    replies: list[str] = field(default_factory=list)
    score: float | None = None
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)  # of the reward
    turns: list[float] = field(
        default_factory=list
    )  # parts of the reward that each reply earned; empty: they are not asked for
    pending: bool = False  # its group is scored as a whole, by the filter


class AtroposEnv(gem.Env):  # type: ignore[misc] # gem has no types
    """One episode at a time. All episodes of a process run on one loop thread; `reset`, `step` and `close` block.

    A failure never looks like a score of 0: it ends the episode with `metrics["failed"]` 1, and `record().failed` says why.
    """

    def __init__(self, **env_config: Any) -> None:
        """`env_config`: see EnvOptions. Builds and opens the environment, and raises its errors."""
        self.options = read_env_options(env_config)
        warn_of_wrong_replies_ahead(self.options.reward)
        self.env_reset_failed = False
        self.env_timeout = False
        self.env_info: dict[str, Any] = {"environment": self.options.environment}
        self._given = env_config
        self._loop = shared_loop()
        self._environment: Environment | None = None
        self._rollout: ThreadedRollout | None = None
        self._history: Tokens | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._record: Record | None = None
        self._resets = 0
        self._read = ("", "")
        self._group_size = 1  # above 1: the group filter scores the replies of a group's members together
        self._hold()

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        """Start an episode. The same seed gives the same task, in any process. A running episode is cancelled first, and awaited."""
        self._stop()
        seed = self._own_seed() if seed is None else int(seed)
        self._record = record = Record(self.options.environment, seed)
        self._history = None
        self.env_reset_failed = self.env_timeout = False
        shown, failed = None, Failed("the environment ended before it called the model")
        try:
            event = self._begin(self._hold(), seed, record)
            if isinstance(event, PendingReply):
                shown, self._history = show(self.options, event.prompt, None), event.prompt
            elif not isinstance(event, Episode):
                failed = event or self._late()
        except Exception as error:  # noqa: BLE001 - the plugin boundary: tasks() is an environment's code
            failed = failed_by(error, "reset")
        self.env_info = {"environment": self.options.environment, "task": record.task, "seed": seed}
        info: dict[str, Any] = {"atropos": {"task": record.task, "seed": seed}}
        if shown is None:
            self._fail(failed)
            self.env_reset_failed = True
            return self._shown(f"The environment failed: {record.failed}"), {**info, "failure_mode": record.failed}
        record.first = shown.observation
        self._tools = shown.tools
        if self.options.observation == "messages":
            info["tools"] = [dict(tool) for tool in shown.tools]
        return shown.observation, info

    def step(self, action: Any) -> Step:
        """Answer with `action`, the reply's text. Anything else, such as ROLL's stop reasons, ends the episode as failed."""
        record = self._record
        if record is None or (record.ended and not self.env_reset_failed):
            raise DataError("step() was called, but no episode is running: call reset() first.")
        record.steps += 1
        if self.env_reset_failed:
            return self._ended()
        if not isinstance(action, str):
            return self._fail(Failed(_reply_error(action)))
        text = self._without_end(action)
        record.replies.append(text)
        if self._group_size > 1:
            self._stop()
            record.ended = record.pending = True
            return self._ended()
        assert self._rollout is not None, "an episode under way has a rollout"
        self._history = self._rollout.answer(text)
        event = self._rollout.next(self.options.step_deadline_s)
        if isinstance(event, PendingReply):
            return self._go_on(event, record)
        if isinstance(event, Episode):
            return self._finish(event, record)
        return self._fail(event or self._late())

    def close(self) -> None:
        """Cancel the running episode, wait for it, and release the environment. `reset` opens it again."""
        self._stop()
        if self._environment is not None:
            self._environment = None
            limit_s = self.options.cleanup_deadline_s + 1
            self._loop.call(self._loop.environments.release(self.options), limit_s, "closing the environment")

    def spawn(self, same_state: bool = False, **env_config: Any) -> AtroposEnv:
        """Create another one with the same options, or with these changes."""
        if same_state:
            raise DataError("a running episode cannot be copied: its environment would act twice.")
        return type(self)(**{**self._given, **env_config})

    def score_in_group(self, size: int) -> None:
        """From the next reset on, leave scores to the group filter, if the environment scores its groups itself."""
        if size > 1 and runs_groups(self._hold()):
            if self.options.turn_rewards:
                raise ConfigError(
                    f"turn_rewards is true, but {self.options.environment!r} scores its groups as a whole, after ROLL has its rows.",
                    remedy="Set turn_rewards: false in env_config.",
                )
            self._group_size = size

    def read_as(self, action: str, text: str) -> None:
        """Read `action` in the next `step` as this text, from a caller who has the tokens."""
        self._read = (action, text)

    def record(self) -> dict[str, Any]:
        """The episode so far, as JSON."""
        if self._record is None:
            raise DataError("there is no episode yet: call reset() first.")
        return {
            **asdict(self._record),
            "env_config": self.options.model_dump(mode="json"),
            "group_size": self._group_size,
        }

    def _hold(self) -> Environment:
        if self._environment is None:
            limit_s = self.options.open_deadline_s + 1
            holding = self._loop.environments.hold(self.options)
            self._environment = self._loop.call(holding, limit_s, f"opening {self.options.environment!r}")
        return self._environment

    def _begin(self, environment: Environment, seed: int, record: Record) -> Event | None:
        options, size = self.options, self._group_size
        task = self._loop.call(task_of(environment, options.split, seed), options.step_deadline_s, "tasks()")
        record.task = task.id
        seeds = [derive(seed, member) for member in range(size)]

        async def run_episode(policy: Policy) -> Episode | Failed:
            return await run_one_rollout(environment, task, policy, seeds)

        self._rollout = ThreadedRollout(
            self._loop,
            run_episode,
            action_deadline_s=options.action_deadline_s,
            episode_deadline_s=options.episode_deadline_s,
            cleanup_deadline_s=options.cleanup_deadline_s,
            members=size,
        )
        return self._rollout.next(options.step_deadline_s)

    def _go_on(self, reply: PendingReply, record: Record) -> Step:
        if self.options.max_steps is not None and record.steps >= self.options.max_steps:
            return self._fail(Failed(f"cut off after max_steps = {record.steps} replies"), truncated=True)
        try:
            shown = show(self.options, reply.prompt, self._history)
        except DataError as error:
            return self._fail(failed_by(error, "step"))
        if self.options.observation == "messages" and shown.tools != self._tools:
            return self._fail(Failed("the environment changed its tools, but ROLL reads them only at reset"))
        info: dict[str, Any] = {"metrics": {}, "metrics_agg_mode": {}}
        return shown.observation, 0.0, False, False, {**info, "use_tool": True} if shown.tool else info

    def _finish(self, episode: Episode, record: Record) -> Step:
        if ABSTAINED in episode.metrics:
            return self._fail(Failed("the environment abstained: it gave the episode no score"))
        record.ended, record.score, record.correct = True, episode.score, episode.correct
        record.parts = parts_of(self.options.reward, episode, record.replies)
        if self.options.turn_rewards:
            record.turns = turns_of(self.options.reward, episode)
            if len(record.turns) not in (0, len(record.replies)):
                return self._fail(
                    Failed(
                        f"the environment has rewards of {len(record.turns)} turns, and ROLL gave {len(record.replies)} replies"
                    )
                )
        return self._ended(environment={**episode.parts, **episode.metrics})

    def _late(self) -> Failed:
        self.env_timeout = True
        return Failed(f"the environment did nothing for {self.options.step_deadline_s:g} s")

    def _fail(self, event: Failed, *, truncated: bool = False) -> Step:
        assert self._record is not None, "only an episode fails"
        self._stop()
        self._record.ended, self._record.failed = True, event.cause
        self.env_info["failed"] = event.cause
        message = f"{event.cause}\n{event.trace}".rstrip()
        log.warning("%s, task %r: %s", self.options.environment, self._record.task, message)
        return self._ended(truncated=truncated or self.env_timeout)

    def _ended(self, *, truncated: bool = False, environment: Any = None) -> Step:
        """The last step. ROLL ends an episode only by `terminated`, so it is always set."""
        record = self._record
        assert record is not None, "only an episode ends"
        return self._shown(""), sum(record.parts.values()), True, truncated, {
            "metrics": metrics_of(record, timed_out=self.env_timeout, environment=environment or {}),
            "metrics_agg_mode": {},
            **({"failure_mode": record.failed} if record.failed else {}),
        }  # fmt: skip

    def _shown(self, text: str) -> Observation:
        return [{"role": "user", "content": text}] if self.options.observation == "messages" else text

    def _without_end(self, action: str) -> str:
        """The reply without its end: as read from its tokens if a caller has them, else by the known ends."""
        read = self._read[1] if self._read[0] == action else None
        ends = self.options.end_of_turn
        ends = (KNOWN_ENDS if read is None else ()) if ends is None else ends
        text = action if read is None else read
        while ending := next((end for end in ends if end and text.rstrip().endswith(end)), None):
            text = text.rstrip().removesuffix(ending)
        return text

    def _stop(self) -> None:
        threaded, self._rollout = self._rollout, None
        if threaded is not None:
            threaded.stop()

    def _own_seed(self) -> int:
        self._resets += 1
        if self.options.seed is None:
            return random.SystemRandom().getrandbits(31)
        return derive(self.options.seed, "reset", self._resets)


async def task_of(environment: Environment, split: Split, seed: int) -> Task:
    """The task of this seed. Runs on the loop, like all of an environment's code."""
    tasks = environment.tasks(split)
    if not len(tasks):
        raise DataError(f"environment {type(environment).__name__} has no {split} tasks.")
    return tasks[derive(seed, "task") % len(tasks)]


async def run_one_rollout(
    environment: Environment, task: Task, policy: Policy, seeds: Sequence[int]
) -> Episode | Failed:
    """Run one rollout, or a group with one rollout for each seed if the environment runs its groups itself."""
    if not runs_groups(environment):
        return await environment.rollout(task, policy, seed=seeds[0])
    episodes = await environment.rollout_group(task, policy, len(seeds), seeds=seeds)
    one = episodes[0] if episodes else DataError("rollout_group() gave no rollout")
    if isinstance(one, BaseException):
        raise one
    return one


def metrics_of(record: Record, *, timed_out: bool, environment: Any) -> dict[str, float]:
    """Numbers for ROLL, which shows them as `env/TAG/...`. They are only on the last step, so that any aggregation over steps
    gives the same."""
    found = {"failed": float(bool(record.failed)), "timed_out": float(timed_out)}
    if record.score is not None:
        found["score"] = record.score
    if record.correct is not None:
        found["correct"] = float(record.correct)
    found |= {f"reward/{name}": value for name, value in record.parts.items()}
    return found | {f"environment/{name}": float(value) for name, value in environment.items()}


def _reply_error(action: Any) -> str:
    name = getattr(action, "name", None)  # ROLL's EpisodeStopReason
    if isinstance(name, str):
        return f"the trainer stopped the episode: {name}"
    return f"the action must be the text of a reply, not {type(action).__name__}"


def register() -> None:
    """Make `gem.make("atropos", ...)` work; may be called again. Raises AtroposError if another package has the name."""
    from gem.envs.registration import ENV_REGISTRY

    found = ENV_REGISTRY.get(ENV_ID)
    if found is None:
        gem.register(ENV_ID, f"{__name__}:{AtroposEnv.__name__}")
    elif found.entry_point != f"{__name__}:{AtroposEnv.__name__}":
        raise AtroposError(f"gem has an environment {ENV_ID!r} that is not ours: {found.entry_point!r}")


register()
