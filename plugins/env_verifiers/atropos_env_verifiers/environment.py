"""An environment of verifiers as a run sees it. Its code runs in a separate process and samples over HTTP, as from any endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atropos_core import console
from atropos_core.console.waits import waiting
from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError, ConfigError, DataError, ProcessDied, RemoteError
from atropos_core.interfaces import Environment
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.services import PolicyServer, PolicySession
from atropos_core.processes.child import Child
from atropos_core.seeds import derive
from atropos_core.turn_rewards import placed, with_turns
from atropos_core.types import Episode, Failed, Message, Split, Task
from atropos_env_verifiers.config import VerifiersOptions
from atropos_env_verifiers.contract import Part, digest

RUN_DEADLINE_S = 24 * 3600.0  # the run's own deadline of a rollout is shorter


class VerifiersEnvironment(Environment):
    def __init__(self, options: VerifiersOptions, context: RunContext) -> None:
        self._options = options
        self._context = context
        self._server: PolicyServer | None = None
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._says: dict[str, Any] = {}
        self._tasks: dict[Split, list[Task]] = {}
        self._told_other_steps = False

    # -- what a run calls

    def tasks(self, split: Split) -> Sequence[Task]:
        if not self._tasks:
            raise DataError(
                "an environment of verifiers has no tasks before it is opened", remedy="Await open() first."
            )
        return self._tasks[split]

    def source(self) -> str:
        return f"{self._options.id} of verifiers, contract {self._says['contract']}"

    async def open(self) -> None:
        if self._tasks:
            return
        self._server = await load_plugins().policy_server()(self._context.model, self._context.today)
        child = await self._running()
        found: dict[str, list[Any]] = {part: [] for part in ("train", "eval")}
        with waiting(f"the tasks of {self._options.id}"):
            for part, size in self._says["sizes"].items():
                while len(found[part]) < size:
                    answer = await child.peer.call(
                        "prompts", part, len(found[part]), deadline_s=self._options.open_deadline_s
                    )
                    found[part] += json.loads(answer)
        if found["eval"] and self._options.changed("held_out"):
            raise ConfigError(
                f"held_out has no effect on {self._options.id}, which has a data set for evaluation: remove it."
            )
        self._tasks = split(found["train"], found["eval"], self._options.held_out)

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        [found] = await self.rollout_group(task, policy, 1, seeds=[seed])
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, Failed):
            raise DataError(found.cause)
        return found

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        """Run a group. Each agent of an episode has a separate session. Contract v0 scores the group together."""
        assert self._server is not None, "an environment is opened before it is used"
        child = await self._running_again()
        sessions: list[dict[str, PolicySession]] = [{} for _ in range(n)]
        try:
            for one, seed in zip(sessions, seeds, strict=False):
                for agent in self._says["agents"]:
                    one[agent] = await self._server.session(policy, seed=derive(seed, agent), name=task.id)
            accesses = [{agent: [made.url, made.key] for agent, made in one.items()} for one in sessions]
            answer = await self._run(child, task, accesses)
        finally:
            ended = [{agent: session.end() for agent, session in one.items()} for one in sessions]
        return [
            self._with_turns(
                member(outcome, [made.failure for made in one.values()], episodes, self._options.success),
                outcome,
                one,
            )
            for outcome, one, episodes in zip(answer, sessions, ended, strict=True)
        ]

    def _with_turns(
        self, made: Episode | Failed | AtroposError, outcome: Mapping[str, Any], sessions: Mapping[str, PolicySession]
    ) -> Episode | Failed | AtroposError:
        """Place the rewards of the steps, if each step is a trained call."""
        if not isinstance(made, Episode) or outcome["turns"] is None:
            return made
        places = sessions[outcome["agent"]].turns
        try:
            if (placed_there := with_step_rewards(made, outcome["turns"], places)) is not None:
                return placed_there
        except DataError as error:  # such as a reward that is not a number: only this rollout fails
            return error
        if not self._told_other_steps:
            self._told_other_steps = True
            console.warn(
                f"an episode of {self._options.id} has {len(outcome['turns'])} steps with rewards, and {len(places)} calls that are "
                "trained: it is unknown which step earned what, so its whole score counts as earned at the end. This is said once."
            )
        return made

    async def close(self) -> None:
        child, self._child = self._child, None
        server, self._server = self._server, None
        if child is not None:
            await child.close()
        if server is not None:
            await server.close()

    # -- its process

    async def _running(self) -> Child:
        async with self._starting:
            if self._child is not None and self._child.peer.lost.is_set():
                console.warn(f"{self._child.role} has ended and is started again: {self._options.id}")
                await self._child.close()
                self._child = None
            if self._child is None:
                self._child = await self._start()
            return self._child

    async def _running_again(self) -> Child:
        """As `_running`, but if the process ends while it starts, only this rollout fails."""
        try:
            return await self._running()
        except ProcessDied as error:
            raise RemoteError(Exception.__str__(error), remedy=error.remedy) from error

    async def _start(self) -> Child:
        options, context = self._options, self._context
        role = f"environment-{context.label.rpartition('.')[2] or 'verifiers'}"
        log = context.directory / "logs" / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        wanted = {
            "id": options.id,
            "folder": "" if options.folder is None else str(options.folder),
            "config": options.config,
            "datasets": options.datasets,
        }
        child = await Child.start(
            role,
            wanted,
            log,
            threads=1,
            program="atropos_env_verifiers.host",
            patience=context.patience,
            environment={"PYTHONHASHSEED": "0"},
        )
        try:
            self._says = await child.peer.call("open_environment", options.tasks, deadline_s=options.open_deadline_s)
        except BaseException:
            await child.close()
            raise
        return child

    async def _run(self, child: Child, task: Task, accesses: Sequence[Mapping[str, Sequence[str]]]) -> list[Any]:
        """Run the group in the process. If the process ends, only these rollouts fail: the next group starts it again."""
        where = (task.data["part"], task.data["index"], task.data["digest"])
        try:
            answer: list[Any] = json.loads(await child.peer.call("run", *where, accesses, deadline_s=RUN_DEADLINE_S))
        except ProcessDied as error:
            raise RemoteError(Exception.__str__(error), remedy=error.remedy) from error
        return answer


def split(
    train: Sequence[Sequence[Message]], own: Sequence[Sequence[Message]], held_out: float
) -> dict[Split, list[Task]]:
    """Opening messages as tasks. If the environment has no evaluation data set of its `own`, a hash of the prompt decides the
    split, so no task is in both."""
    made: dict[Split, list[Task]] = {"train": [], "test": [_task("eval", *one) for one in enumerate(own)]}
    for index, messages in enumerate(train):
        chance = int(digest(messages), 16) / 2**128
        made["test" if not own and chance < held_out else "train"].append(_task("train", index, messages))
    return made


def _task(part: Part, index: int, messages: Sequence[Message]) -> Task:
    data = {"part": part, "index": index, "digest": digest(messages)}
    return Task(f"{part}/{index}", tuple(messages), data=data)


def member(
    outcome: Mapping[str, Any],
    failures: Sequence[AtroposError | None],
    episodes: Mapping[str, Episode | None],
    success: float,
) -> Episode | Failed | AtroposError:
    """One member of a group, from verifiers' outcome and from what each agent sampled. `failures` of the policy explain a failed
    episode better than the environment, which only saw a refused request."""
    raised = [failure for failure in failures if failure is not None]
    dead = [failure for failure in raised if isinstance(failure, ProcessDied)]
    if dead or (raised and outcome["error"]):
        return (dead or raised)[0]
    if outcome["error"]:
        return Failed(outcome["error"], "rollout", outcome["error"])
    episode = episodes[outcome["agent"]]
    if episode is None:
        return Failed("the environment ended an episode without a call of the policy", "rollout")
    return replace(
        episode,
        score=outcome["score"],
        correct=outcome["score"] >= success,
        parts=outcome["parts"],
        metrics={**episode.metrics, **{f"verifiers/{name}": value for name, value in outcome["metrics"].items()}},
    )


def with_step_rewards(
    episode: Episode, rewards: Sequence[float], call_ends: Sequence[tuple[int, int]]
) -> Episode | None:
    """Return the episode with the rewards of its steps at the ends of its trained calls, each a rollout and a position there. None if there
    are not as many, so that it is unknown which step is which call."""
    if len(call_ends) != len(rewards):
        return None
    return replace(episode, rollouts=with_turns(episode.rollouts, placed(episode.rollouts, rewards, call_ends)))
