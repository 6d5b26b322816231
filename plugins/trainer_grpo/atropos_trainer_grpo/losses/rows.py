"""What a loss is given, and what it gives: rows of trained tokens, and a value for each.

No log-ratio goes into `exp` as it is: a sender may claim any logprob, and one infinite ratio would make the gradient of the
whole batch NaN, also where the clip leaves it out (0 x inf). `bounded_exp` is what goes in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from atropos_trainer_grpo.losses.averages import Average

if TYPE_CHECKING:
    from atropos_core.interfaces import Finding

FURTHEST = 60.0  # nats: e^60 = 1.1e26 leaves float32 twelve decades for advantages and for the network's own factors


def bounded_exp(logs: Tensor) -> Tensor:
    """exp(logs), and e^60 for all beyond 60, with itself as its gradient everywhere: what is beyond still pushes the way
    that it should, as hard as at the bound."""
    fixed = logs.detach()
    return (fixed.clamp(max=FURTHEST) + (logs - fixed)).exp()


@dataclass(frozen=True)
class Rows:
    """The trained tokens of some sequences, [R] each, one sequence after another.

    An episode in several rollouts (branches, a history that was rewritten) is one sequence here: its rollouts' tokens, one
    rollout after another. A loss that adds up over sequences has them whole in every micro-batch: `Loss.needs_whole`."""

    logprobs: Tensor  # of the policy that is trained, with gradient
    old: Tensor  # of the policy that the ratio is taken against
    advantages: Tensor
    sequence: Tensor  # i64[R] which of them, counted from 0 with no gap

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
    """How far a ratio may go: from 1 - low to 1 + high, and for a negative advantage to `dual` at most."""

    low: float
    high: float
    dual: float | None = None


class Surrogate(NamedTuple):
    """What a loss gives for each row [R]."""

    values: Tensor  # l_t, with gradient
    ratio: Tensor  # as it was clipped, without gradient: for the metrics
    clipped: Tensor | None = None  # bool: the clip took the gradient away
    weight: Tensor | None = None  # what A times the gradient of log p is multiplied by, for the metrics of a soft bound


@dataclass(frozen=True)
class Loss:
    """One loss: the function, and what goes with it unless the run file says otherwise."""

    name: str
    surrogate: Callable[..., Surrogate]  # of rows, a clip, and by name what `having` gives
    average: Average
    clip: Clip
    holds_fixed: bool = False  # its gradient is not that of its value: a factor is constant (a stop-gradient)
    needs_whole: bool = False  # the rollouts of an episode must be in one micro-batch: it adds up over `Rows.sequence`

    def __call__(self, rows: Rows, clip: Clip) -> Surrogate:
        return self.surrogate(rows, clip)

    def having(self, **values: float) -> Loss:
        """The same loss, with options of its own in place of their defaults."""
        return replace(self, surrogate=partial(self.surrogate, **values)) if values else self

    def findings(self, *, skip: Sequence[str] = ()) -> list[Finding]:
        from atropos_trainer_grpo.contract import findings

        return findings(self, skip=skip)


def register(
    *,
    average: Average = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    holds_fixed: bool = False,
    needs_whole: bool = True,
) -> Callable[[Callable[[Rows, Clip], Surrogate]], Loss]:
    """Make a function a loss. `needs_whole=False` saves memory where episodes have several rollouts, and is right where
    every row's value is of that row alone."""
    return lambda function: Loss(function.__name__, function, average, Clip(*clip), holds_fixed, needs_whole)
