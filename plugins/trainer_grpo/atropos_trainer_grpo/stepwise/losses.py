"""The losses of a stepwise trainer, as the Tinker documentation defines them (tinker-docs.thinkingmachines.ai, Loss Functions).

Each is a sum over tokens, never a mean. With p the policy that is trained and q the one that sampled, lp and lq their logprobs of a target,
A its advantage, and r = exp(lp - lq):

    cross_entropy        -w lp
    importance_sampling  -r A
    ppo                  -min(r A, clip(r) A)
    cispo                -sg(clip(r)) lp A
    dro                  -(lp A - beta/2 (lp - lq)^2)
    gspo                 -min(s A, clip(s) A): s has the value of the geometric mean of r over the tokens of the sequence that its
                         mask marks, and the gradient of the token's own lp (arXiv 2507.18071, equation 14)

The bounds of a clip are ratios. They are settings of the call, or given for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from atropos_trainer_grpo.losses.rows import bounded_exp

CLIP = ("clip_low_threshold", "clip_high_threshold")
NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class TargetRows:
    """R positions of some whole sequences, one sequence after another."""

    logprobs: Tensor  # [R], or [R, K] for several targets at a position; with gradient
    sequence: Tensor  # i64[R] the sequence of each, counted from 0 without gaps
    values: Mapping[str, Tensor]  # what the loss needs, in the shape of `logprobs`
    settings: Mapping[str, float]

    def number(self, name: str) -> Tensor | float:
        """Return a setting: of each token if given so, else of the call."""
        return self.values[name] if name in self.values else self.settings[name]

    def ratio(self) -> Tensor:
        return bounded_exp(self.logprobs - self.values["logprobs"])

    def clipped(self, ratio: Tensor) -> Tensor:
        low, high = (self.number(name) for name in CLIP)
        return torch.maximum(torch.minimum(ratio, _tensor(high, ratio)), _tensor(low, ratio))

    def mean_by_sequence(self, values: Tensor, counted: Tensor) -> Tensor:
        """Return the mean of `values` [R] over the `counted` tokens of each token's sequence."""
        shape = int(self.sequence[-1]) + 1
        sums = values.new_zeros(shape).index_add(0, self.sequence, torch.where(counted, values, 0.0))
        return (sums / values.new_zeros(shape).index_add(0, self.sequence, counted.to(values.dtype)))[self.sequence]


def cross_entropy(rows: TargetRows) -> Tensor:
    return -rows.values["weights"] * rows.logprobs


def importance_sampling(rows: TargetRows) -> Tensor:
    return -rows.ratio() * rows.values["advantages"]


def ppo(rows: TargetRows) -> Tensor:
    return _worse(rows, rows.ratio())


def cispo(rows: TargetRows) -> Tensor:
    return -rows.clipped(rows.ratio()).detach() * rows.logprobs * rows.values["advantages"]


def dro(rows: TargetRows) -> Tensor:
    apart = rows.logprobs - rows.values["logprobs"]
    return rows.settings["beta"] / 2 * apart.square() - rows.logprobs * rows.values["advantages"]


def gspo(rows: TargetRows) -> Tensor:
    fixed = rows.logprobs.detach()
    mean = rows.mean_by_sequence(fixed - rows.values["logprobs"], rows.values["sequence_ratio_mask"] != 0)
    return _worse(rows, bounded_exp(mean + (rows.logprobs - fixed)))


def _worse(rows: TargetRows, ratio: Tensor) -> Tensor:
    advantages = rows.values["advantages"]
    return -torch.minimum(ratio * advantages, rows.clipped(ratio) * advantages)


def _tensor(number: Tensor | float, like: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else like.new_tensor(number)


@dataclass(frozen=True)
class SumLoss:
    """One loss, and what a call of it has to bring."""

    of: Callable[[TargetRows], Tensor]  # in the shape of the logprobs
    needs: tuple[str, ...]  # values of each token
    settings: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # with their defaults
    several: bool = False  # there may be several targets at a position


_RL = ("logprobs", "advantages")
_TOKEN_CLIP = dict(zip(CLIP, (0.8, 1.2), strict=True))
_SEQUENCE_CLIP = dict(zip(CLIP, (1 - 3e-4, 1 + 4e-4), strict=True))  # of the paper on GSPO, section 5.1
LOSSES: Mapping[str, SumLoss] = {
    "cross_entropy": SumLoss(cross_entropy, ("weights",), several=True),
    "importance_sampling": SumLoss(importance_sampling, _RL),
    "ppo": SumLoss(ppo, _RL, _TOKEN_CLIP),
    "cispo": SumLoss(cispo, _RL, _TOKEN_CLIP),
    "dro": SumLoss(dro, _RL, {"beta": 0.05}),
    "gspo": SumLoss(gspo, (*_RL, "sequence_ratio_mask"), _SEQUENCE_CLIP),
}
