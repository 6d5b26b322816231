"""Check at every step that the engine samples from the weights that were published: the logprobs of engine and trainer agree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from atropos_core import console
from atropos_core.errors import Misaligned
from atropos_core.health.alignment import EVIDENCE_NATS, bound_of, largest_rounding
from atropos_core.interfaces import Engine, Trainer
from atropos_core.types import UNKNOWN_VERSION, Floats, Metrics, Rollout, ScoredGroup

RESCORED_GROUPS = 32
PROVEN_GROUPS = 2


class AlignmentCheck:
    """`max_diff` is the largest difference in nats that the run file allows; None: what rounding explains for weights of `dtype`."""

    def __init__(self, max_diff: float | None, dtype: str, trainer: Trainer) -> None:
        self._is_given = max_diff is not None
        self._max_diff = max_diff or largest_rounding(dtype)
        self._dtype = dtype
        self._trainer = trainer

    async def check(
        self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup], worst: Mapping[str, str] | None = None
    ) -> None:
        """Raises Misaligned. `worst` names the owner of the sequence of `groups` that differs most."""
        worst = worst or {}
        impossible = metrics.get("alignment/impossible_nats", 0.0)
        if not impossible <= EVIDENCE_NATS:
            raise Misaligned(
                f"step {step}: {worst.get('alignment/worst_stale', 'a rollout')} has logprobs that its tokens were "
                f"not sampled with: the trainer's own of the same tokens are {impossible:.4g} nats beyond what any earlier weights "
                f"of this policy explain; the bound is {EVIDENCE_NATS:.3g}.",
                remedy="Look at who sent it: another model or template behind its engine, another temperature than it says, "
                "top_p that it does not say, or made-up numbers. Logprobs that are not known are better left out.",
            )
        difference = metrics.get("alignment/max_abs_logprob_diff")
        excess = metrics.get("alignment/truncated_excess_nats", 0.0)
        await self._allow_for_rounding(step, max(difference or 0.0, excess), groups)
        if difference is not None and not difference <= self._max_diff:
            raise Misaligned(
                f"step {step}: the engine does not sample from the weights that the trainer published, or its logprobs were changed. Their "
                f"logprobs of the same tokens differ by up to {difference:.3g} nats; the bound is {self._max_diff:g}."
                + (f" The most is in {where}." if (where := worst.get("alignment/worst_fresh")) else ""),
                remedy="Look at the bridge first, then at the environment: one that changes the logprobs of what was sampled causes the "
                "same difference. With workers elsewhere, look at who sent it. If the difference is rounding, raise "
                "training.max_logprob_diff.",
            )
        if not excess <= self._max_diff:
            where = worst.get("alignment/worst_truncated", "a rollout")
            raise Misaligned(
                f"step {step}: {where} was not sampled from the weights that the trainer published. It was sampled with "
                f"top_p, top_k or min_p, which only raise the logprobs of what they keep, and one of its tokens has {excess:.3g} nats less "
                f"than the trainer's own logprob; the bound is {self._max_diff:g}.",
                remedy="Check the bridge first; with workers elsewhere, check the worker that sent it.",
            )

    async def _allow_for_rounding(self, step: int, difference: float, groups: Sequence[ScoredGroup]) -> None:
        """Raise the limit if it is the default and this model rounds by more. Measured only after a difference exceeded the limit."""
        if self._is_given or difference <= self._max_diff or not math.isfinite(difference):
            return
        rounding = await rounding_of(groups, self._trainer)
        bound = bound_of(rounding, self._dtype)
        if rounding is not None and bound > self._max_diff:
            self._max_diff = bound
            console.say(
                f"step {step}: from here on, engine and trainer may differ by {bound:.2g} nats. By measurement, "
                f"rounding moves this model's logprobs by {rounding:.2g} (training.max_logprob_diff is not set)"
            )


def check_one_version(step: int, groups: Sequence[ScoredGroup], version: int) -> None:
    """Raises Misaligned if tokens of an evaluation have another version than `version`, since nothing is published meanwhile."""
    known = (
        np.unique(one.policy_version[one.sampled]) for group in groups for e in group.episodes for one in e.rollouts
    )
    if found := {int(one) for versions in known for one in versions} - {UNKNOWN_VERSION, version}:
        raise Misaligned(
            f"step {step}: an evaluation of version {version} was sampled from version "
            f"{', '.join(map(str, sorted(found)))} as well.",
            remedy="The engine must mark every token with the version that was published last: look at the engine first.",
        )


async def rescoring_difference(groups: Sequence[ScoredGroup], trainer: Trainer) -> float | None:
    """Return the largest |trainer - engine| logprob over sampled tokens of the first groups, in nats; nothing may have been trained
    since they were sampled. Truncated rollouts are skipped: their logprobs are of another distribution. None if there are no
    others."""
    differences: list[Floats] = []
    compared = [one for one in _rollouts(groups) if one.logprobs is not None and not one.truncated]
    for temperature, rollouts in _by_temperature(compared).items():
        scores = await trainer.logprobs([rollout.tokens for rollout in rollouts], temperature)
        for score, rollout in zip(scores, rollouts, strict=True):
            if rollout.logprobs is not None:
                differences.append(np.abs(score - rollout.logprobs)[rollout.sampled])
    return float(np.concatenate(differences).max(initial=0.0)) if differences else None


async def rounding_of(groups: Sequence[ScoredGroup], trainer: Trainer) -> float | None:
    """Return by how many nats rounding can move a logprob of these groups, with the trainer's present weights. None if the trainer
    cannot measure it."""
    measured = [
        await trainer.rounding([one.tokens for one in rollouts], temperature)
        for temperature, rollouts in _by_temperature(_rollouts(groups)).items()
    ]
    return max((one for one in measured if one is not None), default=None)


async def rescoring_gap(groups: Sequence[ScoredGroup], engine: Engine, trainer: Trainer) -> float | None:
    """Return the largest difference between engine and trainer when both score the same tokens now, in nats. This proves that they
    hold the same weights if a batch has no token that was sampled with them. None if the engine cannot score."""
    sequences = [rollout.tokens for rollout in _rollouts(groups[:PROVEN_GROUPS])]
    if not sequences:
        return None
    try:
        theirs = await engine.logprobs(sequences)
    except NotImplementedError:
        return None
    ours = await trainer.logprobs(sequences)
    differences = [np.abs(a - b).max(initial=0.0) for a, b in zip(ours, theirs, strict=True)]
    return float(np.max(differences))


def _rollouts(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for group in groups[:RESCORED_GROUPS] for one in group.episodes for rollout in one.rollouts]


def _by_temperature(rollouts: Sequence[Rollout]) -> dict[float, list[Rollout]]:
    found: dict[float, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        found[rollout.temperature or 1.0].append(rollout)
    return found
