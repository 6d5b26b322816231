"""The input and output of a loss: rows of trained tokens, and a value for each.

A log-ratio never goes into `exp` unbounded: a sender may claim any logprob, and one infinite ratio would make the gradient of the whole
batch NaN, even if the clip leaves it out (0 x inf). `bounded_exp` replaces `exp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atropos_core.advantages import Average

FURTHEST = 60.0  # nats: e^60 = 1.1e26 leaves float32 twelve decades for advantages and for the network's own factors


def bounded_exp(logs: Tensor) -> Tensor:
    """exp(logs), or e^60 above 60, with itself as its gradient everywhere: larger values still push in the right
    direction, as hard as at the bound."""
    fixed = logs.detach()
    return (fixed.clamp(max=FURTHEST) + (logs - fixed)).exp()


@dataclass(frozen=True)
class Rows:
    """The trained tokens of some sequences, [R] each, one sequence after another.

    An episode in several rollouts (branches, a history that was rewritten) is one sequence here: the tokens of its rollouts, one
    rollout after another. A loss that adds up over sequences has them whole in every micro-batch: `Loss.needs_whole`."""

    logprobs: Tensor  # of the policy that is trained, with gradient
    old: Tensor  # of the policy in the ratio's denominator
    advantages: Tensor
    sequence: Tensor  # i64[R] the sequence of each row, counted from 0 without gaps

    def ratio(self) -> Tensor:
        """[R]: exp(logprobs - old), with gradient, and finite: see `bounded_exp`."""
        return bounded_exp(self.logprobs - self.old)

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """[R]: the mean of `values` [R] over the trained tokens of each token's sequence."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(torch.ones_like(values))

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[R]: the sum of `values` [R] over the trained tokens of each token's sequence."""
        if not len(self.sequence):
            return values
        sums = values.new_zeros(int(self.sequence[-1]) + 1).index_add(0, self.sequence, values)
        return sums[self.sequence]


class Clip(NamedTuple):
    """The bounds of a ratio: from 1 - low to 1 + high, and at most `dual` for a negative advantage."""

    low: float
    high: float
    dual: float | None = None


class Surrogate(NamedTuple):
    """The result of a loss for each row [R]."""

    values: Tensor  # l_t, with gradient
    ratio: Tensor  # after clipping, without gradient: for the metrics
    clipped: Tensor | None = None  # bool: the clip removed the gradient
    weight: Tensor | None = None  # the factor of A times the gradient of log p, for the metrics of a soft bound


@dataclass(frozen=True)
class Loss:
    """One loss: its function, and its defaults unless the run file overrides them."""

    name: str
    surrogate: Callable[..., Surrogate]  # of rows, a clip, and the named values of `having`
    average: Average
    clip: Clip
    holds_fixed: bool = False  # its gradient is not that of its value: a factor is constant (a stop-gradient)
    needs_whole: bool = False  # the rollouts of an episode must be in one micro-batch: it adds up over `Rows.sequence`

    contract = "atropos_trainer_grpo.check_loss:check_loss"  # which `atropos check NAME` calls

    def __call__(self, rows: Rows, clip: Clip) -> Surrogate:
        return self.surrogate(rows, clip)

    def having(self, **values: float | str | None) -> Loss:
        """The same loss with other values of its options."""
        return replace(self, surrogate=partial(self.surrogate, **values)) if values else self


def register(
    *,
    average: Average = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    holds_fixed: bool = False,
    needs_whole: bool = True,
) -> Callable[[Callable[[Rows, Clip], Surrogate]], Loss]:
    """Register a function as a loss. `needs_whole=False` saves memory if episodes have several rollouts, and is right if
    every row's value depends only on that row."""
    return lambda function: Loss(function.__name__, function, average, Clip(*clip), holds_fixed, needs_whole)
