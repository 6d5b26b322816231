"""Find the first difference between two runs that should be alike: the step, the stage of that step, and the rollout.

A step is a chain: tasks are drawn, prompts are rendered, the policy samples, rewards score, transforms compute advantages, the
trainer updates the weights. STAGES has its links in this order, so the first one that differs is where to look.
"""

from __future__ import annotations

import filecmp
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.config.run_file import flatten
from atropos_core.errors import DataError
from atropos_core.storage.reading import parse_json, read_file
from atropos_core.storage.run_records import metric_rows
from atropos_core.types import TurnRewards
from atropos_debugging.recorded_groups import opening
from atropos_debugging.tensor_files import shared_tensors, tensor_names
from atropos_records.rollout_records import EpisodeRecord, RecordedStep, RolloutRecords
from atropos_records.step_tokens import SequenceTokens

STAGES = {  # in the order in which a step goes through them -> what may have changed, if it is the first that differs
    "draws": "the curriculum, its seed, or how many tasks there are",
    "tasks": "the data, or the code that makes tasks of them",
    "rollouts": "the environment: another number of rollouts ended, failed, or have several token histories",
    "prompts": "the chat template, the tokenizer, or what the environment says",
    "policy": "the weights, or how the engine computes: the same tokens have other logprobs",
    "samples": "the seed, or the sampling options: the policy was the same up to the first token that differs",
    "masks": "which tokens are trained",
    "scores": "a reward, its weight, or the environment's score",
    "outcomes": "which groups were trained: a transform, or training.max_staleness",
    "advantages": "a transform, or what the trainer makes of advantages",
    "trainer": "the trainer's forward pass: the same tokens have other logprobs there",
    "gradient": "the loss, or another option of the trainer: the batch was the same",
    "weights": "the optimizer: the gradient was the same",
}
RATE = "learning_rate"  # the metric: it takes effect when weights are written, not on the gradient
SHIFT = "policy/probe_shift_nats"
SCORED = ("reward/", "rollouts/", "groups/")  # prefixes of metrics that tell of rollouts which are not recorded
WEIGHTS = (".safetensors", ".npy")  # files of a checkpoint's policy that hold parameters


@dataclass(frozen=True)
class Difference:
    """One difference between run A and run B. Without a rollout, it is of the whole step."""

    step: int
    stage: str
    says: str
    a: Any = None
    b: Any = None
    environment: str = ""
    task: str = ""
    draw: int | None = None
    member: int | None = None  # the rollout's number in its group
    line: int | None = None  # of the rollout in A's records, from 0
    position: int | None = None  # of a token, in its sequence
    sequence: int | None = None  # of the episode, from 0


@dataclass
class Bisected:
    """The comparison of two runs."""

    configuration: dict[str, tuple[Any, Any]] = field(
        default_factory=dict
    )  # path -> value in A and in B; None: not set
    files: dict[int, list[str]] = field(
        default_factory=dict
    )  # the first checkpoint whose other files differ, and those
    steps: list[int] = field(
        default_factory=list
    )  # that both runs have metrics or rollouts of, up to the first difference
    first: Difference | None = None
    stages: dict[str, Difference | None] = field(default_factory=dict)  # of that step; missing: not compared
    notes: list[str] = field(default_factory=list)


def bisect(a: RolloutRecords, b: RolloutRecords, tolerance: float = 0.0) -> Bisected:
    """Compare two runs step by step, up to the first that differs. Numbers may differ by `tolerance`. Raises DataError if the runs
    have no step in common, or a file is damaged."""
    found = Bisected(_configuration(a, b))
    of_a, of_b = ({int(row["step"]): row for row in metric_rows(run.directory)[0]} for run in (a, b))
    recorded = set(a.steps()) & set(b.steps())
    common = sorted((of_a.keys() & of_b.keys()) | recorded)
    if not common:
        raise DataError(
            f"{a.directory} and {b.directory} have no step in common.",
            remedy="Both need metrics.jsonl or recorded rollouts of the same steps.",
        )
    for run, name, other in ((a, "A", b), (b, "B", a)):
        if missing := set(run.steps()) - set(other.steps()):
            found.notes.append(
                f"only {name} has rollouts of {len(missing)} steps, from {min(missing)} to {max(missing)}"
            )
    saved = set(_common_checkpoints(a, b))
    found.files = _other_files(a, b)
    for step in common:
        found.steps.append(step)
        stages: dict[str, Difference | None] = {}
        if step in recorded:
            stages |= _compare_step(a.step(step), b.step(step), tolerance, found.notes)
        stages |= _compare_metrics(step, of_a.get(step, {}), of_b.get(step, {}), tolerance, stages)
        if step in saved and stages.get("weights") is None:
            stages["weights"] = _saved_weights(a, b, step, tolerance)
        found.stages = {stage: stages[stage] for stage in STAGES if stage in stages}
        found.first = next((one for one in found.stages.values() if one is not None), None)
        if found.first is not None:
            if step not in recorded and recorded:
                found.notes.append(f"rollouts of step {step} are not recorded in both runs: its metrics are compared")
            return found
    return found


def _configuration(a: RolloutRecords, b: RolloutRecords) -> dict[str, tuple[Any, Any]]:
    first, second = (dict(flatten(run.config)) for run in (a, b))
    paths = [*first, *(path for path in second if path not in first)]
    return {path: (first.get(path), second.get(path)) for path in paths if first.get(path) != second.get(path)}


# -- checkpoints


def policy_files(run: RolloutRecords, step: int) -> Mapping[str, str]:
    """Return the digest of each file of a checkpoint's policy, by name."""
    try:
        manifest = parse_json(read_file(run.directory / "checkpoints" / f"step-{step:06d}" / "manifest.json"))
        return {name.removeprefix("policy/"): one["sha256"] for name, one in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the checkpoint of step {step} in {run.directory} cannot be read: {type(error).__name__}: {error}.",
            remedy="`atropos doctor RUN` says which checkpoints are whole.",
        ) from error


def _common_checkpoints(a: RolloutRecords, b: RolloutRecords) -> list[int]:
    return sorted(set(a.checkpoint_steps()) & set(b.checkpoint_steps()))


def _other_files(a: RolloutRecords, b: RolloutRecords) -> dict[int, list[str]]:
    """Return files of the first common checkpoint, other than weights and the trainer's state, that differ: the tokenizer's, the
    model's configuration."""
    for step in _common_checkpoints(a, b):
        first, second = policy_files(a, step), policy_files(b, step)
        names = sorted(
            name for name in first.keys() | second.keys() if Path(name).suffix in (".json", ".jinja", ".txt")
        )
        if apart := [name for name in names if first.get(name) != second.get(name)]:
            return {step: apart}
    return {}


def _saved_weights(a: RolloutRecords, b: RolloutRecords, step: int, tolerance: float) -> Difference | None:
    """Return the first difference between the weights of two checkpoints."""
    first, second = policy_files(a, step), policy_files(b, step)
    ours, theirs = (sorted(name for name in files if name.endswith(WEIGHTS)) for files in (first, second))
    if ours != theirs:
        return Difference(step, "weights", "the files of the checkpoint's policy", ", ".join(ours), ", ".join(theirs))
    for name in ours:
        if first[name] == second[name]:
            continue
        paths = [run.directory / "checkpoints" / f"step-{step:06d}" / "policy" / name for run in (a, b)]
        if (apart := _first_tensor(paths[0], paths[1], tolerance)) is not None:
            return Difference(step, "weights", f"{name} of the checkpoint: {apart[0]}", apart[1], apart[2])
    return None


def _first_tensor(first: Path, second: Path, tolerance: float) -> tuple[str, Any, Any] | None:
    """Return the first tensor of two files that differs by more than `tolerance`, and both values there."""
    ours, theirs = tensor_names(first), tensor_names(second)
    if unshared := sorted(ours ^ theirs):
        return (
            f"{unshared[0]} is only in one of them",
            unshared[0] if unshared[0] in ours else None,
            unshared[0] if unshared[0] in theirs else None,
        )
    for name, one, other in shared_tensors(first, second):
        if one.shape != other.shape:
            return f"{name} has other shapes", list(one.shape), list(other.shape)
        if len(at := np.argwhere(_apart(one, other, tolerance))):
            place = tuple(at[0])
            return f"{name}{list(map(int, place))}, and {len(at) - 1:,} more", float(one[place]), float(other[place])
    return None


# -- metrics


def _compare_metrics(
    step: int,
    a: Mapping[str, float],
    b: Mapping[str, float],
    tolerance: float,
    known: Mapping[str, Difference | None],
) -> dict[str, Difference | None]:
    """Compare the metrics of a step: the trainer's own, whose names have no prefix, and the probe's. If rollouts are not recorded,
    those that tell of rollouts too."""
    made: dict[str, Difference | None] = {}
    for name in sorted(a.keys() & b.keys() - {"step"}):
        stage = _stage_of(name)
        if stage is None or (stage == "scores" and known):
            continue
        made.setdefault(stage, None)
        if made[stage] is None and not _close(a[name], b[name], tolerance):
            made[stage] = Difference(step, stage, f"the metric {name}", a[name], b[name])
    return made


def _stage_of(metric: str) -> str | None:
    if metric in (RATE, SHIFT):
        return "weights"
    if metric.startswith(SCORED):
        return "scores"
    return "gradient" if "/" not in metric else None


# -- rollouts


@dataclass(frozen=True)
class _Side:
    """One run's rollouts of a step, by draw and member."""

    step: RecordedStep
    draws: Mapping[int, Sequence[EpisodeRecord]]

    @classmethod
    def of(cls, step: RecordedStep) -> _Side:
        draws: dict[int, list[EpisodeRecord]] = {}
        for one in step.episodes:
            draws.setdefault(one.draw, []).append(one)
        return cls(step, draws)


def _compare_step(a: RecordedStep, b: RecordedStep, tolerance: float, notes: list[str]) -> dict[str, Difference | None]:
    """Return the first difference of each stage that the records of a step tell of; None for a stage without one."""
    has_tokens = a.tokens is not None and b.tokens is not None
    of_texts = ("draws", "tasks", "rollouts", "samples", "scores", "outcomes", "advantages")
    stages: dict[str, Difference | None] = dict.fromkeys(of_texts)
    if a.tokens is not None and b.tokens is not None:
        both_scored = "trainer_logprobs" in a.tokens.names & b.tokens.names
        stages |= dict.fromkeys(("prompts", "policy", "masks", *(("trainer",) if both_scored else ())))
    if _same_file(a.path, b.path) and (not has_tokens or _same_file(a.tokens_path, b.tokens_path)):
        return stages
    if not has_tokens:
        notes.append(f"step {a.step}: {a.why_no_tokens or b.why_no_tokens}; only texts are compared")
    first, second = _Side.of(a), _Side.of(b)
    reached = {"draws"}
    for one in _differences(first, second, has_tokens, tolerance, reached):
        if stages.get(one.stage) is None:
            stages[one.stage] = one
    return {stage: one for stage, one in stages.items() if one is not None or stage in reached}


def _same_file(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)


def _differences(a: _Side, b: _Side, has_tokens: bool, tolerance: float, reached: set[str]) -> Iterator[Difference]:
    """Yield the differences of a step; of several at one stage, the first comes first. `reached` collects the stages that were
    compared at all."""
    step = a.step.step
    if (drawn_a := list(a.draws)) != (drawn_b := list(b.draws)):
        at = next(
            (n for n, (x, y) in enumerate(zip(drawn_a, drawn_b, strict=False)) if x != y),
            min(len(drawn_a), len(drawn_b)),
        )
        says = f"the draw of group {at + 1} of the step"
        yield Difference(step, "draws", says, _drawn(a, drawn_a, at), _drawn(b, drawn_b, at))
    for draw in (one for one in a.draws if one in b.draws):
        yield from _of_group(draw, a, b, has_tokens, tolerance, reached)


def _drawn(side: _Side, draws: Sequence[int], at: int) -> str | None:
    return None if at >= len(draws) else f"draw {draws[at]}, task {side.draws[draws[at]][0].task}"


def _of_group(
    draw: int, a: _Side, b: _Side, has_tokens: bool, tolerance: float, reached: set[str]
) -> Iterator[Difference]:
    ours, theirs = a.draws[draw], b.draws[draw]
    first, other = ours[0], theirs[0]
    for name in ("environment", "split", "task_index", "task"):
        if getattr(first, name) != getattr(other, name):
            yield _at(first, "draws", f"the {name} of draw {draw}", getattr(first, name), getattr(other, name))
            return
    reached |= {"tasks", "rollouts"}
    for name, x, y in (
        ("answer", first.answer, other.answer),
        ("opening messages", opening(first.messages), opening(other.messages)),
    ):
        if x != y and not (first.failed or other.failed):
            yield _at(first, "tasks", f"the {name} of the task", x, y)
    for one, two in zip(ours, theirs, strict=False):
        if one.failed != two.failed:
            says = "the cause of its failure" if one.failed and two.failed else "it failed in one of the runs"
            yield _at(one, "rollouts", says, one.failed or None, two.failed or None)
            return
    if len(ours) != len(theirs):
        yield _at(first, "rollouts", "the number of rollouts of the group", len(ours), len(theirs))
        return
    for one, two in zip(ours, theirs, strict=True):
        if not one.failed:
            yield from _of_rollout(one, two, a.step, b.step, has_tokens, tolerance, reached)


def _of_rollout(
    x: EpisodeRecord,
    y: EpisodeRecord,
    a: RecordedStep,
    b: RecordedStep,
    has_tokens: bool,
    tolerance: float,
    reached: set[str],
) -> Iterator[Difference]:
    reached |= {"scores", "outcomes", "advantages", "samples"}
    for name in ("score", "correct"):
        if not _close(getattr(x, name), getattr(y, name), tolerance):
            yield _at(x, "scores", f"its {name}", getattr(x, name), getattr(y, name))
    for name in [*x.parts, *(name for name in y.parts if name not in x.parts)]:
        if not _close(x.parts.get(name), y.parts.get(name), tolerance):
            yield _at(x, "scores", f"its part {name}", x.parts.get(name), y.parts.get(name))
    if not _close(x.scored_reward, y.scored_reward, tolerance):
        yield _at(x, "scores", "its reward", x.scored_reward, y.scored_reward)
    placed = [
        [(one.ends.tolist(), one.values.tolist()) if one else None for one in side.turn_rewards] for side in (x, y)
    ]
    if placed[0] != placed[1] and not _close_turns(x.turn_rewards, y.turn_rewards, tolerance):
        yield _at(x, "scores", "its turn rewards", placed[0], placed[1])
    if (x.outcome, x.dropped_by) != (y.outcome, y.dropped_by):
        yield _at(x, "outcomes", "what became of its group", _outcome(x), _outcome(y))
    for name in ("reward", "advantage"):
        if not _close(getattr(x, name), getattr(y, name), tolerance):
            yield _at(x, "advantages", f"its {name} after the transforms", getattr(x, name), getattr(y, name))
    if has_tokens:
        ours, theirs = a.sequences(x), b.sequences(y)
        if len(ours) != len(theirs):
            yield _at(x, "rollouts", "the number of its token histories", len(ours), len(theirs))
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            reached |= {"prompts", "policy", "masks", "trainer"}
            yield from _of_tokens(x, number, one, other, tolerance)
    elif x.messages != y.messages:
        at = next((n for n, (m, n_) in enumerate(zip(x.messages, y.messages, strict=False)) if m != n_), None)
        both = (None, None) if at is None else (x.messages[at], y.messages[at])
        yield _at(x, "samples", "the messages", *both)


def _outcome(one: EpisodeRecord) -> str:
    return f"{one.outcome} by {one.dropped_by}" if one.dropped_by else str(one.outcome)


def _of_tokens(
    line: EpisodeRecord, number: int, one: SequenceTokens, other: SequenceTokens, tolerance: float
) -> Iterator[Difference]:
    """Compare two token histories of one rollout. `number`: of the history in its episode."""
    shorter = min(len(one.ids), len(other.ids))
    apart = (one.ids[:shorter] != other.ids[:shorter]) | (one.sampled[:shorter] != other.sampled[:shorter])
    same = int(np.flatnonzero(apart)[0]) if apart.any() else shorter  # tokens that are alike, from the start

    def at(stage: str, says: str, position: int, a: Any, b: Any) -> Difference:
        return _at(line, stage, says, a, b, position, number)

    for name, stage in (("logprobs", "policy"), ("trainer_logprobs", "trainer")):
        x, y = getattr(one, name), getattr(other, name)
        if x is not None and y is not None and len(far := np.flatnonzero(_apart(x[:same], y[:same], tolerance))):
            place = int(far[0])
            yield at(stage, f"the logprob of token {place}", place, float(x[place]), float(y[place]))
    if one.temperature != other.temperature or one.truncated != other.truncated:
        kind = ("temperature", "truncated")
        yield at("samples", "its sampling options", 0, *({n: getattr(s, n) for n in kind} for s in (one, other)))
    if same < max(len(one.ids), len(other.ids)):
        sampled = [bool(side.sampled[same]) for side in (one, other) if same < len(side.ids)]
        stage = "samples" if all(sampled) else "prompts"
        ids = [int(side.ids[same]) if same < len(side.ids) else None for side in (one, other)]
        yield at(stage, f"token {same}", same, *ids)
        return
    for name, stage in (("trained", "masks"), ("advantages", "advantages")):
        x, y = getattr(one, name), getattr(other, name)
        far = np.flatnonzero(x != y if name == "trained" else _apart(x, y, tolerance) & one.trained & other.trained)
        if len(far):
            place = int(far[0])
            what = "whether the loss counts token" if name == "trained" else "the advantage of token"
            yield at(stage, f"{what} {place}", place, x[place].item(), y[place].item())


def _at(
    line: EpisodeRecord, stage: str, says: str, a: Any, b: Any, position: int | None = None, sequence: int | None = None
) -> Difference:
    return Difference(
        line.step, stage, says, a, b, line.environment, line.task, line.draw, line.member, line.line, position, sequence
    )


def _apart(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Return a mask of values that differ by more than `tolerance`; two NaN are equal."""
    first, second = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        far = np.abs(first - second) > tolerance
    unequal = np.isnan(first) != np.isnan(second)
    return np.asarray((far & (first != second)) | unequal)


def _close_turns(a: Sequence[TurnRewards | None], b: Sequence[TurnRewards | None], tolerance: float) -> bool:
    """True if rewards are at the same places, and differ by no more than `tolerance`."""
    return len(a) == len(b) and all(
        (x is None) == (y is None)
        and (
            x is None
            or y is None
            or (np.array_equal(x.ends, y.ends) and not _apart(x.values, y.values, tolerance).any())
        )
        for x, y in zip(a, b, strict=True)
    )


def _close(a: Any, b: Any, tolerance: float) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (a, b))
    if not numbers:
        return bool(a == b)
    return a == b or abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b))
