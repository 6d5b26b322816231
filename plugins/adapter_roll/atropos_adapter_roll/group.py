"""ROLL's `group_filter_cls`: drops groups in which a rollout failed (validation keeps them, marked), and scores the groups of
environments that score a whole group. ROLL calls it once for each group, in the process that holds the queue, before it releases
anything.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_adapter_roll import texts
from atropos_adapter_roll.config import EnvOptions, read_env_options
from atropos_adapter_roll.env import Record, metrics_of, task_of
from atropos_adapter_roll.observation import show
from atropos_adapter_roll.reward import parts_of
from atropos_adapter_roll.shared import shared_loop
from atropos_adapter_roll.threaded_rollout import AskingPolicy, completion
from atropos_core.errors import DataError, FitError, NoProgress
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import checked_episode, failed_by
from atropos_core.seeds import derive
from atropos_core.types import Completion, Episode, Failed, Sampling, Tokens

PATIENCE = 64  # groups in a row that may be dropped
log = logging.getLogger(__name__)


class GroupFilter:
    """ROLL's contract: `filter` returns True if the whole group is dropped; another one is then run."""

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self._mode = mode
        self._dropped_in_a_row = 0
        self._environments: dict[str, Environment] = {}  # kept as long as the process lives

    def filter(self, group_id: int, episode_id: int, group: Sequence[Any]) -> bool:
        """`group`: DataProtos. If the group is scored here, its scores are put into them. Raises NoProgress if one group after another
        fails, and errors in how a group's environment is used."""
        members = [rollout for rollout in group if rollout is not None]  # None: a manager that has left
        records = [rollout.meta_info.pop("atropos", None) for rollout in members]
        causes = [cause for one, record in zip(members, records, strict=True) if (cause := why_failed(one, record))]
        pending = [record for record in records if record and record["pending"]]
        if pending and not causes:
            causes = self._score(members, pending)
        if not causes:
            self._dropped_in_a_row = 0
            return False
        kept = (
            self._mode != "train"
        )  # nothing learns from it, and a validation without its failures would look too good
        counts = f"{len(causes)} of {len(members)} rollouts failed"
        outcome = "kept, each rollout without a score as failed" if kept else "dropped"
        log.warning("group %s, episode %s is %s: %s; %s", group_id, episode_id, outcome, counts, causes[0])
        if kept:
            for rollout, record in zip(members, records, strict=True):
                if record and record["pending"]:  # its score is lost with its group
                    rollout.meta_info.setdefault("metrics", {})[f"env/{record['tag']}/failed"] = 1.0
            return False
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= PATIENCE:
            raise NoProgress(f"the last {PATIENCE} groups were all dropped; of the last: {causes[0]}")
        return True

    def _score(self, members: Sequence[Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Score the group. Returns the reason why it has no scores, or nothing."""
        options = read_env_options(records[0]["env_config"])
        if len(records) != len(members) or len({(record["task"], record["seed"]) for record in records}) > 1:
            raise DataError("a group's members do not show one task: ROLL's group has changed since it was run.")
        environment = self._hold(options)
        scoring = score_group(environment, options, records)
        try:
            ended = shared_loop().call(scoring, options.episode_deadline_s, "scoring a group")
        except FitError:
            raise  # every group would fail so
        except Exception as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            ended = [failed_by(error, "rollout_group")]
        if failed := [one.cause for one in ended if isinstance(one, Failed)]:
            return failed
        for rollout, record, episode in zip(members, records, ended, strict=True):
            assert isinstance(episode, Episode), "failed ones were removed"
            parts = parts_of(options.reward, episode, record["replies"])
            known = {each.name for each in dataclasses.fields(Record)}
            scored = Record(**{key: value for key, value in record.items() if key in known})
            scored.score, scored.correct, scored.parts = episode.score, episode.correct, parts
            found = metrics_of(scored, timed_out=False, environment={**episode.parts, **episode.metrics})
            rollout.meta_info.setdefault("metrics", {}).update(
                {f"env/{record['tag']}/{k}": v for k, v in found.items()}
            )
            put_score(rollout, sum(parts.values()))
        return []

    def _hold(self, options: EnvOptions) -> Environment:
        key = options.model_dump_json()
        if key not in self._environments:
            loop = shared_loop()
            opening = loop.environments.hold(options)
            self._environments[key] = loop.call(opening, options.open_deadline_s, f"opening {options.environment!r}")
        return self._environments[key]


def why_failed(rollout: Any, record: Mapping[str, Any] | None) -> str:
    """Why a rollout failed, or "". Also for rollouts of ROLL's own managers, which carry only metrics."""
    if record is not None and record["failed"]:
        return str(record["failed"])
    metrics = rollout.meta_info.get("metrics") or {}
    if any(value > 0 for name, value in metrics.items() if name.startswith("env/") and name.endswith("/failed")):
        return "a rollout failed: the worker's log says why"
    return "ROLL flagged it to be dropped" if rollout.meta_info.get("drop_flag") else ""


def put_score(rollout: Any, score: float) -> None:
    """Make `score` the reward of the last step, in every place where ROLL keeps it: `batch["scores"]` [S, T] at the last token of the
    last row, `episode_scores` [S], `step_scores` (of S rows, or of one row all its steps). Columns are copied, changed and put back,
    because ROLL may keep them elsewhere, and a column that is read may already be a copy."""
    scores, mask = copy.deepcopy(rollout.batch["scores"]), rollout.batch["attention_mask"]
    scores[-1][int(mask[-1].sum()) - 1] = score
    rollout.batch["scores"] = scores
    columns = rollout.non_tensor_batch
    episode, steps = copy.deepcopy(columns["episode_scores"]), copy.deepcopy(columns["step_scores"])
    episode[:] = score
    if isinstance(steps[-1], (list, np.ndarray)):
        steps[-1][-1] = score
    else:
        steps[-1] = score
    columns["episode_scores"], columns["step_scores"] = episode, steps


async def score_group(
    environment: Environment, options: EnvOptions, records: Sequence[Mapping[str, Any]]
) -> list[Episode | Failed]:
    """Run the environment's own `rollout_group` to its end, the only time, over its members' replies. Results in the order of
    `records`. Raises DataError if it asks for something that no member was shown."""
    seed, n = records[0]["seed"], len(records)
    task = await task_of(environment, options.split, seed)
    policy = RecordedPolicy(options, records)
    seeds = [derive(seed, member) for member in range(n)]
    ended = await environment.rollout_group(task, policy, n, seeds=seeds)
    if len(ended) != n:
        raise DataError(f"rollout_group() was called for {n} rollouts and gave {len(ended)}")
    found: dict[int, Episode | Failed] = {}
    for one in ended:
        if isinstance(one, BaseException):
            return [failed_by(one, "rollout_group")]
        episode = checked_episode(one)
        if isinstance(episode, Failed):
            return [episode]
        member = texts.member_of(episode.rollouts[0].tokens)
        if member is None or member in found:
            raise DataError("rollout_group() gave an episode without a reply of its own.")
        found[member] = episode
    return [found[member] for member in range(n)]


class RecordedPolicy(AskingPolicy):
    """Gives the members' replies, one each, in the order in which they are requested."""

    def __init__(self, options: EnvOptions, records: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(lambda request: None, options.action_deadline_s, members=len(records))
        self._options = options
        self._records = records
        self._given = 0

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        first, self._given = self._given, self._given + n
        members = range(first, self._given)
        again = any(message["role"] == "assistant" for message in texts.read(prompt).messages)
        if again or self._given > len(self._records) or any(self._differs(prompt, member) for member in members):
            raise FitError(
                "rollout_group() asks for more than one reply of a member, or shows its members different prompts: in ROLL a "
                "group that its environment scores as a whole has one prompt, and one reply a member.",
                remedy="Override rollout() instead of rollout_group(), or train this environment with `atropos run`.",
            )
        replies = [self._records[member]["replies"][-1] for member in members]
        return [completion(text, sampling or self.sampling, m) for m, text in zip(members, replies, strict=True)]

    def _differs(self, prompt: Tokens, member: int) -> bool:
        """True if this member was shown something else."""
        return bool(show(self._options, prompt, None).observation != self._records[member]["first"])
