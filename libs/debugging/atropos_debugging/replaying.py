"""Train one recorded step again, from the checkpoint before it: with nothing changed, which gives the same weights, and with one
thing changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.config.run_file import flatten
from atropos_core.console.waits import waiting
from atropos_core.errors import CheckpointError, DataError
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.guards.open_component import in_one_line
from atropos_core.interfaces import Stateful, Trainer
from atropos_core.launch.builder import scoring_parts, trainer_alone
from atropos_core.launch.plan import Plan
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.storage.run_records import metric_rows
from atropos_core.training.batch import to_batch
from atropos_core.types import Floats, Metrics, Rollout, ScoredGroup, Tokens
from atropos_debugging.bisection import WEIGHTS, policy_files
from atropos_debugging.component_calls import ComponentCalls, scoring_runner
from atropos_debugging.gradients import EXTENSION, Gradient, compare_gradients
from atropos_debugging.recorded_groups import RecordedGroup, recorded_groups, turns_of_environment, without_turns
from atropos_debugging.resampling import sampled_again
from atropos_debugging.rescoring import TURNS_LEFT_OUT
from atropos_debugging.tensor_files import shared_tensors
from atropos_records.rollout_records import RecordedStep, RolloutRecords
from atropos_records.saved_results import checksum

MOST_TOKENS = 20  # that moved most, and are kept


@dataclass(frozen=True)
class Changes:
    """The parts of a step that a replay computes anew, with something changed."""

    rewards: bool = False  # the recorded rollouts are scored again
    transforms: bool = False  # advantages are computed again
    trainer: bool = False  # its options, or its seed
    rollouts: bool = False  # the tasks are sampled again

    def __bool__(self) -> bool:
        return self.rewards or self.transforms or self.trainer or self.rollouts


@dataclass(frozen=True)
class Update:
    """One update of the step, and what it did to the policy."""

    groups: Sequence[ScoredGroup]  # that were trained
    metrics: Metrics
    after: Sequence[Floats]  # logprobs of the step's sequences
    saved: Path  # the policy's directory
    gradient: Gradient


@dataclass(frozen=True)
class MovedToken:
    """A token whose logprob the change moved."""

    environment: str
    task: str
    draw: int
    member: int
    sequence: int  # of the episode, from 0
    position: int
    token: int
    text: str
    before: float  # its logprob before the step
    recorded: float  # and after the update as it was
    changed: float  # and after the changed one; without a change, the same


@dataclass(frozen=True)
class RolloutMove:
    """One rollout of the step: its reward, its advantage, and by how much its sampled tokens moved, in nats on average."""

    environment: str
    task: str
    draw: int
    member: int
    reward: float
    reward_now: float
    advantage: float  # 0 if it was not trained
    advantage_now: float
    moved: float
    moved_now: float


@dataclass
class Replayed:
    """The result of a replay."""

    step: int
    version: int  # of the policy before the step
    same_weights: bool | None = (
        None  # the update as it was gives the recorded weights, bit for bit; None: no checkpoint has them
    )
    same_metrics: bool | None = None  # the trainer's own metrics of the step; None: not recorded
    recorded_metrics: Metrics = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)  # of the replayed update, unchanged
    changed_metrics: Metrics | None = None  # None: nothing was changed
    update_norm: float = math.nan  # of the change of the weights
    changed_update_norm: float = math.nan
    update_cosine: float = math.nan  # between both
    gradient_norm: float | None = None  # before the optimizer, of the first minibatch; None: not known
    changed_gradient_norm: float | None = None
    gradient_cosine: float | None = None
    rollouts: list[RolloutMove] = field(default_factory=list)
    tokens: list[MovedToken] = field(default_factory=list)  # those that moved most
    notes: list[str] = field(default_factory=list)
    logprobs: dict[str, Floats] = field(
        default_factory=dict
    )  # of the step's tokens [N] before and after; not in `document`
    ids: int = 0  # the checksum of these tokens


async def replay(
    records: RolloutRecords,
    step: int,
    plan: Plan,
    changed: Plan,
    scoring: Plan,
    changes: Changes,
    scratch: Path,
    sampling: Plan | None = None,
) -> Replayed:
    """Train step `step` again by `plan`, the run's own, and if there are `changes`, by `changed` as well, on groups that the
    rewards and transforms of `scoring` made, of rollouts that `sampling` made if it is given. Raises DataError or CheckpointError if
    the records are not enough."""
    recorded = records.step(step)
    before = checkpoint_before(records, step, plan.config.warmup_steps)
    found = Replayed(step, version_of(before))
    groups = _groups(recorded)
    trained = [_trained(one, found.notes) for one in groups if one.was_trained]
    if not trained:
        raise DataError(f"step {step} of {records.directory} trained nothing: there is nothing to train again.")
    sequences = [rollout for one in groups for episode in one.group.episodes for rollout in episode.rollouts]
    with waiting(f"step {step} to be trained again"):
        start, unchanged = await _train(plan, before, trained, sequences, found.version + 1, scratch / "unchanged")
    found.metrics = unchanged.metrics
    _compare_with_run(records, step, unchanged, found)
    other = unchanged
    if changes:
        keep_turns = turns_of_environment(plan.config.reward)
        now = await _regrouped(scoring, sampling, changes, groups, before, scratch, found.notes, keep_turns=keep_turns)
        if not now:
            raise DataError("with this change, the step would train nothing: no group has advantages that are not 0.")
        with waiting(f"step {step} to be trained with the change"):
            _, other = await _train(changed, before, now, sequences, found.version + 1, scratch / "changed")
        found.changed_metrics = other.metrics
    gradients = compare_gradients(unchanged.gradient, other.gradient)
    if gradients is None:
        found.notes.append("gradients are not compared: the parameters of this trainer hold none")
    else:
        found.gradient_norm = gradients.norm
        if changes:
            found.changed_gradient_norm, found.gradient_cosine = gradients.changed_norm, gradients.cosine
    _compare_updates(scratch / "unchanged" / "before", unchanged.saved, other.saved, found)
    _keep_logprobs(recorded, groups, start, unchanged, other if changes else None, found)
    found.rollouts = _moves(groups, start, unchanged, other)
    found.tokens = _most_moved(groups, start, unchanged, other, plan.tokenizer(), bool(changes))
    return found


def checkpoint_before(records: RolloutRecords, step: int, warmup_steps: int) -> Checkpoint | None:
    """Return the checkpoint that a step began from; None for the first, which began with the run's model. Raises CheckpointError
    if it is not there, and DataError for a supervised step."""
    if step <= warmup_steps:
        raise DataError(
            f"step {step} is one of the {warmup_steps} supervised steps of the warm start, which have no rollouts."
        )
    if step == 1:
        return None
    there = records.checkpoint_steps()
    if step - 1 not in there:
        recorded = set(records.steps_with_tokens())
        possible = sorted(recorded & ({one + 1 for one in there} | (set() if warmup_steps else {1})))
        raise CheckpointError(
            f"step {step} of {records.directory} cannot be replayed: the checkpoint of step {step - 1} is missing.",
            remedy=(f"Steps that can be: {', '.join(map(str, possible))}. " if possible else "")
            + "A run keeps every checkpoint with checkpoint.every = 1 and a large checkpoint.keep.",
        )
    return records.run.checkpoints.at(step - 1)


def version_of(before: Checkpoint | None) -> int:
    return 0 if before is None else int(before.state["progress"]["version"])


def _groups(step: RecordedStep) -> list[RecordedGroup]:
    """Return the groups that the step leased. Raises DataError if the records do not hold what an update needs."""
    if step.tokens is None:
        raise DataError(
            f"step {step.step} cannot be replayed: {step.why_no_tokens}.",
            remedy="A run records tokens with sink.jsonl.tokens = true, up to sink.jsonl.tokens_max_mb.",
        )
    if "teacher_logprobs" in step.tokens.names:
        raise DataError(
            f"step {step.step} cannot be replayed: a teacher annotated it, and records hold the teacher's logprob of the sampled "
            "token only, not its distribution."
        )
    return [one for one in recorded_groups(step) if one.was_leased]


def _trained(one: RecordedGroup, notes: list[str]) -> ScoredGroup:
    """Return a group as the trainer got it."""
    note = "advantages are those of each token, as the loss took them: no advantage of an episode is recorded"
    if one.group.advantages is None and note not in notes:
        notes.append(note)
    return replace(one.group, rewards=_final_rewards(one))


def _final_rewards(one: RecordedGroup) -> Floats:
    """Return the rewards [G] after transforms changed them."""
    values = [line.scored_reward if line.reward is None else line.reward for line in one.lines]
    return np.array(values, np.float32)


async def _regrouped(
    plan: Plan,
    sampling: Plan | None,
    changes: Changes,
    groups: Sequence[RecordedGroup],
    before: Checkpoint | None,
    scratch: Path,
    notes: list[str],
    *,
    keep_turns: bool,
) -> list[ScoredGroup]:
    """Return the groups that the changed step trains."""
    if not (changes.rewards or changes.transforms or sampling):
        return [_trained(one, notes) for one in groups if one.was_trained]
    made = [one.as_scored() for one in groups]
    states = {} if before is None else before.state.get("parts", {})
    async with scoring_parts(plan, scratch) as parts:
        labels: dict[str, object] = {f"transform.{name}": part for name, part in parts.transforms.items()}
        labels |= {f"reward.{of.name}": of.reward for of in parts.rewards}
        for label, part in labels.items():
            if isinstance(part, Stateful) and label in states:
                with in_one_line(f"{label} cannot take up its state from the checkpoint"):
                    part.load(states[label])
        calls = ComponentCalls()
        if sampling is not None:
            with waiting(f"{len(groups)} tasks to be sampled again"):
                made, lost_tasks = await sampled_again(
                    sampling, parts.rewards, groups, version_of(before), scratch / "sampled"
                )
            notes += lost_tasks
        elif changes.rewards:
            runner = scoring_runner(parts.rewards, calls)
            if not keep_turns:
                given, made = made, [without_turns(one) for one in made]
                if any(one is not other for one, other in zip(given, made, strict=True)):
                    notes.append(TURNS_LEFT_OUT)
            with blocked_loop_alarm():
                made = [await runner.score(one.draw, one.task, one.episodes) for one in made]
            lost = [one for one in made if not one.episodes]
            if made and len(lost) == len(made):
                raise DataError(f"no group of the step could be scored: {lost[0].failed[-1].cause}")
            notes += [f"task {one.task.id!r} could not be scored: {one.failed[-1].cause}" for one in lost]
        kept: Sequence[ScoredGroup] = [
            one for one in made if len(one.episodes) >= max(plan.config.training.min_group, 1)
        ]
        with blocked_loop_alarm():
            for name, transform in parts.transforms.items():
                with in_one_line(f"transform {name!r} failed"):
                    kept = await calls.made(f"transform {name!r}", transform(kept))
    return list(kept)


async def _train(
    plan: Plan,
    before: Checkpoint | None,
    groups: Sequence[ScoredGroup],
    sequences: Sequence[Rollout],
    version: int,
    scratch: Path,
) -> tuple[list[Floats], Update]:
    """Train one batch from the checkpoint `before`. Return the logprobs of `sequences` before it, and the update."""
    for name in ("before", "after", "gradient"):
        (scratch / name).mkdir(parents=True)
    gradient = Gradient(scratch / "gradient", [])
    async with trainer_alone(plan, scratch) as trainer:
        await trainer.open()
        await trainer.endpoint.load_extension(EXTENSION)
        if before is not None:
            await trainer.restore(before.policy)
        await trainer.save(scratch / "before")
        start = await _logprobs(trainer, sequences)
        metrics = await trainer.step(to_batch(groups, version), partial(gradient.written, trainer))
        after = await _logprobs(trainer, sequences)
        await trainer.save(scratch / "after")
    return start, Update(groups, metrics, after, scratch / "after", gradient)


async def _logprobs(trainer: Trainer, sequences: Sequence[Rollout]) -> list[Floats]:
    """Return the trainer's logprobs of each sequence, at the temperature at which it was sampled."""
    made: dict[int, Floats] = {}
    for temperature in {one.temperature for one in sequences}:
        numbers = [number for number, one in enumerate(sequences) if one.temperature == temperature]
        tokens: list[Tokens] = [sequences[number].tokens for number in numbers]
        for number, values in zip(numbers, await trainer.logprobs(tokens, temperature or 1.0), strict=True):
            made[number] = values
    return [made[number] for number in range(len(sequences))]


# -- comparisons


def _compare_with_run(records: RolloutRecords, step: int, update: Update, found: Replayed) -> None:
    """Compare the unchanged update with what the run recorded of it."""
    rows = {int(row["step"]): row for row in metric_rows(records.directory)[0]}
    row = rows.get(step, {})
    shared = [name for name in update.metrics if name in row and "/" not in name]
    found.recorded_metrics = {name: row[name] for name in shared}
    if shared:
        found.same_metrics = all(
            row[name] == update.metrics[name] or (math.isnan(row[name]) and math.isnan(update.metrics[name]))
            for name in shared
        )
    if step in records.checkpoint_steps():
        settings = records.run.checkpoints.at(step).state.get("settings", {})
        now = {path: value for path, value in flatten(records.config) if path.startswith(("trainer.", "transform."))}
        for path in sorted(now.keys() & settings.keys()):
            if settings[path] != now[path]:
                found.notes.append(
                    f"{path} was {settings[path]} when step {step} was trained, and config.toml says {now[path]}: the run was resumed "
                    f"with another value. --set {path}={settings[path]} gives the old one"
                )
    else:
        found.notes.append(f"no checkpoint of step {step} is kept: the weights are not compared with the run's")
        return
    recorded = policy_files(records, step)
    names = sorted(name for name in recorded if name.endswith(WEIGHTS))
    found.same_weights = bool(names) and all(
        (update.saved / name).is_file() and _sha256(update.saved / name) == recorded[name] for name in names
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare_updates(start: Path, recorded: Path, changed: Path, found: Replayed) -> None:
    """Compare the change of the weights of two updates."""
    sums = np.zeros(3)  # of the squares of both, and of their product
    for path in sorted(path for path in start.rglob("*") if path.name.endswith(WEIGHTS)):
        name = path.relative_to(start)
        first = _differences(path, recorded / name)
        second = _differences(path, changed / name)
        for tensor, one in first.items():
            other = second[tensor]
            sums += float((one * one).sum()), float((other * other).sum()), float((one * other).sum())
    found.update_norm = math.sqrt(sums[0])
    if found.changed_metrics is not None:
        found.changed_update_norm = math.sqrt(sums[1])
        scale = math.sqrt(sums[0] * sums[1])
        found.update_cosine = sums[2] / scale if scale else math.nan


def _differences(before: Path, after: Path) -> Mapping[str, NDArray[np.float64]]:
    return {
        name: other.astype(np.float64) - one.astype(np.float64) for name, one, other in shared_tensors(before, after)
    }


def _keep_logprobs(
    step: RecordedStep,
    groups: Sequence[RecordedGroup],
    start: Sequence[Floats],
    unchanged: Update,
    changed: Update | None,
    found: Replayed,
) -> None:
    """Lay the logprobs of sequences side by side, in the order of the step's file of tokens. NaN: a sequence that was not scored, or
    the first token of one."""
    file = step.tokens
    assert file is not None, "checked by _groups"
    sides = {"before": start, "after": unchanged.after} | ({"changed": changed.after} if changed is not None else {})
    numbers = [number for one in groups for line in one.lines for number in line.sequences]
    for name, values in sides.items():
        found.logprobs[name] = np.full(file.tokens, np.nan, np.float32)
        for number, each in zip(numbers, values, strict=True):
            begin = int(file.offsets[number])
            found.logprobs[name][begin + 1 : begin + len(each)] = each[1:]
    ids = file.column("ids")
    assert ids is not None, "checked when the file was opened"
    found.ids = checksum(ids)


def _moves(
    groups: Sequence[RecordedGroup], start: Sequence[Floats], unchanged: Update, changed: Update
) -> list[RolloutMove]:
    was, now = _by_rollout(unchanged.groups), _by_rollout(changed.groups)
    made = []
    number = 0
    for one in groups:
        for line, episode in zip(one.lines, one.group.episodes, strict=True):
            moved = np.zeros(2)
            sampled = 0
            for rollout in episode.rollouts:
                at = rollout.sampled
                for side, update in enumerate((unchanged, changed)):
                    moved[side] += (update.after[number] - start[number])[at].astype(np.float64).sum()
                sampled += int(at.sum())
                number += 1
            key = (line.draw, id(line.messages))
            reward, advantage = was.get(key, (line.reward or 0.0, 0.0))
            reward_now, advantage_now = now.get(key, (math.nan, 0.0))
            mean = moved / max(sampled, 1)
            made.append(
                RolloutMove(line.environment, line.task, line.draw, line.member or 0, reward, reward_now, advantage,
                            advantage_now, float(mean[0]), float(mean[1]))
            )  # fmt: skip
    return made


def _by_rollout(groups: Sequence[ScoredGroup]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return reward and advantage of each episode that was trained, by its draw and its messages."""
    return {
        (group.draw.id, id(episode.messages)): (
            float(group.rewards[member]),
            math.nan if group.advantages is None else float(group.advantages[member]),
        )
        for group in groups
        for member, episode in enumerate(group.episodes)
    }


def _most_moved(
    groups: Sequence[RecordedGroup],
    start: Sequence[Floats],
    unchanged: Update,
    changed: Update,
    tokenizer: ChatTokenizer,
    is_changed: bool,
) -> list[MovedToken]:
    """Return the sampled tokens that the change moved most; without a change, those that the update moved most."""
    places = [
        (line, sequence, rollout)
        for one in groups
        for line, episode in zip(one.lines, one.group.episodes, strict=True)
        for sequence, rollout in enumerate(episode.rollouts)
    ]
    found: list[tuple[float, int, int]] = []
    for number, (_, _, rollout) in enumerate(places):
        base = unchanged.after[number] if is_changed else start[number]
        moved = np.where(rollout.sampled, np.abs(changed.after[number] - base), 0.0)
        found += [(float(moved[at]), number, int(at)) for at in np.argsort(-moved, kind="stable")[:MOST_TOKENS]]
    most = sorted(found, key=lambda one: (-one[0], one[1], one[2]))[:MOST_TOKENS]
    made = []
    for moved_by, number, at in most:
        line, sequence, rollout = places[number]
        token = int(rollout.tokens[at])
        values = [float(side[number][at]) for side in (start, unchanged.after, changed.after)]
        if moved_by:
            text = tokenizer.decode(rollout.tokens[at : at + 1], keep_special=True)
            made.append(
                MovedToken(line.environment, line.task, line.draw, line.member or 0, sequence, at, token, text, *values)
            )
    return made


def document(found: Replayed) -> dict[str, Any]:
    """Return the result as JSON."""
    kept = {name: value for name, value in vars(found).items() if name not in ("logprobs", "ids")}
    return {
        **kept,
        "rollouts": [vars(one) for one in found.rollouts],
        "tokens": [vars(one) for one in found.tokens],
    }
