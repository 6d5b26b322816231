"""`atropos audit RUN`: check a run's records against each other, and recorded logprobs against the run's own weights.

The weights of a policy version are in the checkpoint that was saved at it; version 0 is the run's first model. The run's
trainer loads them and scores what was sampled with them. Tokens of a version that was not saved are counted as not checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from atropos_core.config.resolve import resolve_component
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import CheckpointError, DataError
from atropos_core.health.alignment import bound_of, largest_rounding
from atropos_core.interfaces import Trainer, Transport
from atropos_core.launch.builder import trainer_alone
from atropos_core.launch.plan import Plan
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import ResolvedModel
from atropos_core.storage.checkpoint import Checkpoint, Checkpoints
from atropos_core.storage.run_records import metric_rows
from atropos_core.types import UNKNOWN_VERSION, Bools, Floats
from atropos_records.record_checks import Expected, Fault, check_step, version_before
from atropos_records.rollout_records import RolloutRecords
from atropos_records.step_tokens import SequenceTokens, TokenFile

TOKENS_AT_ONCE = 1 << 16  # that the trainer is given in one call
MOST_DIFFERENCES = 1000  # of one version that are kept: another model's weights differ everywhere


@dataclass
class Audit:
    """The findings of an audit."""

    steps: list[int]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be checked, and why
    compared: int = 0  # logprobs
    versions: list[int] = field(default_factory=list)  # whose weights they were compared with
    largest: float = 0.0  # nats
    tolerance: float = 0.0  # nats
    why_tolerance: str = ""
    unlisted: int = 0  # differences beyond those in `faults`
    left_out: Counter[str] = field(default_factory=Counter)  # what could not be compared, and how many of it


@dataclass(frozen=True)
class _Claim:
    """Logprobs of one sequence that are claimed to be of one version. The tokens are read when they are compared."""

    step: int
    number: int  # of the sequence
    version: int
    of: Literal["the engine", "the trainer"]
    count: int

    def values(self, tokens: SequenceTokens) -> tuple[Floats, Bools]:
        """Return the logprobs [T], and a mask of those that are claimed."""
        if self.of == "the engine":
            return tokens.logprobs, _known(tokens) & (tokens.versions == self.version)
        assert tokens.trainer_logprobs is not None, "there were some"
        return tokens.trainer_logprobs, np.isfinite(tokens.trainer_logprobs)


def plan_of(config: RunConfig, model: ResolvedModel, plugins: Plugins) -> Plan:
    """Plan only the run's trainer, with its own weights. Raises as make_plan."""
    on_this = config.trainer.model_copy(update={"machines": 1})
    trainer = resolve_component(plugins.registry, "trainer", "trainer", on_this)
    bridge = resolve_component(plugins.registry, "bridge", "bridge", config.bridge)
    adapter: tuple[Transport, ...] = ("adapter",) if bridge.transports == {"adapter"} else ()
    return Plan(config, model, [], {"trainer": trainer}, {}, adapter)


async def audit(
    records: RolloutRecords, plan: Plan, steps: Sequence[int], scratch: Path, tolerance: float | None,
    say: Callable[[str], None],
) -> Audit:  # fmt: skip
    """Audit the recorded steps in `steps`, or all of them if it is empty. `tolerance` is in nats; None: what the run itself
    allows. `say` prints progress. Raises DataError if there is nothing to audit."""
    chosen = _steps_to_audit(records, steps)
    found = Audit(chosen)
    metrics = {int(row["step"]): row for row in metric_rows(records.directory)[0]}
    by_workers = plan.config.api is not None  # workers' rewards have their own weights
    weights = {} if by_workers else plan.config.reward_weights()
    expected = Expected(weights, plan.config.training.max_staleness, plan.tokenizer())
    claims: dict[int, list[_Claim]] = defaultdict(list)
    for number in chosen:
        await asyncio.sleep(0)  # so that a Ctrl-C is heard between steps
        step = records.step(number)
        if number not in metrics:
            found.faults.append(Fault(number, "metrics.jsonl has no such step"))
        try:
            found.faults += check_step(step, metrics.get(number, {}), expected)
            if step.tokens is None:
                found.notes.append(f"step {number}: {step.why_no_tokens}")
            else:
                for claim in _claims(number, step.tokens, version_before(metrics.get(number, {})), found):
                    claims[claim.version].append(claim)
        except DataError as error:
            found.faults.append(Fault(number, Exception.__str__(error)))
    found.notes += [f"not compared: {count} {what}" for what, count in found.left_out.items()]
    if claims:
        await _compare(plan, records, claims, scratch, tolerance, found, say)
    return found


def _steps_to_audit(records: RolloutRecords, steps: Sequence[int]) -> list[int]:
    if steps:
        return [records.step(step).step for step in steps]
    if not records.steps_with_tokens():
        there = records.steps()
        why = records.step(there[-1]).why_no_tokens if there else "it has no rollouts"
        raise DataError(
            f"{records.directory} cannot be audited: {why}.",
            remedy="A run records its tokens if it has a [sink.jsonl] with tokens, which is the default.",
        )
    return records.steps()


def _known(tokens: SequenceTokens) -> Bools:
    """Return a mask [T] of the sampled tokens that have a logprob and a token before them."""
    known: Bools = tokens.sampled & np.isfinite(tokens.logprobs)
    known[:1] = False
    return known


def _claims(step: int, file: TokenFile, before: int | None, found: Audit) -> Iterator[_Claim]:
    """Yield the claims of a step. `before`: the version that its update started from."""
    for number in range(file.sequences):
        tokens = file.sequence(number)
        known = _known(tokens)
        if tokens.truncated:
            found.left_out[
                "sequences were sampled with top_p, top_k or min_p: their logprobs are of what these kept"
            ] += 1
            continue
        if tokens.sampled.any() and not known.any():
            found.left_out["sequences came without logprobs"] += 1
        for version, count in zip(*np.unique(tokens.versions[known], return_counts=True), strict=True):
            if version == UNKNOWN_VERSION:
                found.left_out["tokens are of an unknown version"] += int(count)
            else:
                yield _Claim(step, number, int(version), "the engine", int(count))
        if tokens.trainer_logprobs is not None and before is not None:
            count = np.isfinite(tokens.trainer_logprobs).sum()
            if count:
                yield _Claim(step, number, before, "the trainer", int(count))


async def _compare(
    plan: Plan,
    records: RolloutRecords,
    claims: Mapping[int, list[_Claim]],
    scratch: Path,
    tolerance: float | None,
    found: Audit,
    say: Callable[[str], None],
) -> None:
    saved = _by_version(Checkpoints(records.directory / "checkpoints"), found)
    at_hand = [version for version in sorted(claims) if version in saved or version == 0]
    async with trainer_alone(plan, scratch) as trainer:
        info = await trainer.open()
        given = plan.config.training.max_logprob_diff
        chosen = given if tolerance is None else tolerance
        found.tolerance = largest_rounding(info.dtype) if chosen is None else chosen
        found.why_tolerance = (
            "as --tolerance says" if tolerance
            else "as training.max_logprob_diff says" if given
            else f"two ways of computing with the same {info.dtype} weights differ by no more; the run itself allows as much"
        )  # fmt: skip
        for version in at_hand:  # 0 first: the trainer has opened the model that the run began with
            if version:
                await trainer.restore(saved[version].policy)
            say(
                f"scoring {len({(one.step, one.number) for one in claims[version]})} sequences with the weights of version {version}"
            )
            dtype = info.dtype if chosen is None else None
            await _compare_one(trainer, version, claims[version], records, dtype, found)
            found.versions.append(version)
    if gone := sorted(claims.keys() - set(at_hand)):
        tokens = sum(one.count for version in gone for one in claims[version])
        versions = f"version{'s' if len(gone) > 1 else ''} {ranges(gone)}"
        found.notes.append(f"not compared: {tokens:,} logprobs of {versions}, whose weights no checkpoint holds")


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers, consecutive ones as a range: `1-49, 51, 53-79`."""
    first = [one for at, one in enumerate(numbers) if at == 0 or numbers[at - 1] != one - 1]
    last = [one for at, one in enumerate(numbers) if at + 1 == len(numbers) or numbers[at + 1] != one + 1]
    return ", ".join(str(one) if one == other else f"{one}-{other}" for one, other in zip(first, last, strict=True))


def _by_version(checkpoints: Checkpoints, found: Audit) -> Mapping[int, Checkpoint]:
    saved: dict[int, Checkpoint] = {}
    for step in checkpoints.steps():
        try:
            checkpoint = checkpoints.at(step)
            saved[int(checkpoint.state["progress"]["version"])] = checkpoint
        except CheckpointError as error:
            if step in checkpoints.steps():  # a running run removes the oldest
                found.faults.append(Fault(step, Exception.__str__(error)))
        except (KeyError, TypeError, ValueError) as error:
            found.faults.append(Fault(step, f"checkpoint {checkpoints.directory} says no version: {error}"))
    return saved


async def _compare_one(
    trainer: Trainer, version: int, claims: Sequence[_Claim], records: RolloutRecords, dtype: str | None, found: Audit
) -> None:
    """Compare the claims with the trainer's logprobs. `dtype`: of the weights, or None if the run file sets the tolerance."""
    differences: list[Fault] = []
    for number, of_step in groupby(claims, lambda claim: claim.step):
        await asyncio.sleep(0)
        step = records.step(number)
        if step.tokens is None:  # a running run removes old tokens
            found.notes.append(f"step {number}: {step.why_no_tokens}")
            continue
        for part in _parts(step.tokens, of_step):
            scores = await trainer.logprobs([tokens.ids for _, tokens in part], part[0][1].temperature or 1.0)
            for (claim, tokens), score in zip(part, scores, strict=True):
                values, there = claim.values(tokens)
                apart = np.where(there, np.abs(score.astype(np.float64) - values), 0.0)
                if dtype is not None and found.tolerance < apart.max(initial=0.0) < np.inf:
                    await _allow_for_rounding(trainer, tokens, dtype, found)
                found.compared += claim.count
                found.largest = max(found.largest, float(apart.max(initial=0.0)))
                for position in np.flatnonzero(~(apart <= found.tolerance)):
                    recorded, again = float(values[position]), float(score[position])
                    says = (
                        f"{claim.of}'s logprob is {recorded:.6g}, and the weights of version {version} make {again:.6g}"
                    )
                    task = step.episodes[tokens.episode].task
                    differences.append(Fault(number, says, task, claim.number, int(position), recorded, again, version))
    found.faults += differences[:MOST_DIFFERENCES]
    found.unlisted += max(0, len(differences) - MOST_DIFFERENCES)


async def _allow_for_rounding(trainer: Trainer, tokens: SequenceTokens, dtype: str, found: Audit) -> None:
    """Raise the tolerance, as the run does, if this model rounds by more."""
    rounding = await trainer.rounding([tokens.ids], tokens.temperature or 1.0)
    if rounding is not None and (bound := bound_of(rounding, dtype)) > found.tolerance:
        found.tolerance = bound
        found.why_tolerance = f"by measurement, rounding moves logprobs of this model by {rounding:.2g}"


def _parts(file: TokenFile, claims: Iterable[_Claim]) -> Iterator[list[tuple[_Claim, SequenceTokens]]]:
    """Split the claims into parts for one call of the trainer each, of one temperature each."""
    by_temperature: dict[float, list[tuple[_Claim, SequenceTokens]]] = defaultdict(list)
    for claim in claims:
        tokens = file.sequence(claim.number)
        by_temperature[tokens.temperature].append((claim, tokens))
    for several in by_temperature.values():
        part: list[tuple[_Claim, SequenceTokens]] = []
        size = 0
        for claim, tokens in several:
            if part and size + len(tokens.ids) > TOKENS_AT_ONCE:
                yield part
                part, size = [], 0
            part.append((claim, tokens))
            size += len(tokens.ids)
        yield part
