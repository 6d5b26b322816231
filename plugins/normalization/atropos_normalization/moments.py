"""Mean and variance of a stream, in five numbers, merged without loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Moments:
    """Of weighted samples; with all weights 1, of a plain stream.

    A sample at a time this is Welford 1962 with weights (West 1979, "Updating mean and variance estimates: an improved
    method", CACM 22(9)), two streams are joined by Chan, Golub and LeVeque 1979 (STAN-CS-79-773, eq. 2.1). Nothing is
    ever a difference of large sums, so an offset costs no precision.
    """

    count: int = 0  # samples that were seen, whatever their weight now
    weight: float = 0.0  # sum of the weights
    squares: float = 0.0  # sum of the squared weights
    mean: float = 0.0
    m2: float = 0.0  # sum of weight x (sample - mean)²

    @classmethod
    def of(cls, samples: ArrayLike, keep: float = 1.0) -> Moments:
        """Of samples [n] in their order, finite. Each one multiplies the weight of those before it by `keep`."""
        values = np.asarray(samples, np.float64).reshape(-1)
        if not len(values):
            return cls()
        weights = keep ** np.arange(len(values) - 1, -1, -1, dtype=np.float64)
        weight = float(weights.sum())
        first = float((weights * values).sum()) / weight
        around = values - first
        rest = float((weights * around).sum())  # what rounding left of it
        m2 = float((weights * around * around).sum()) - rest * rest / weight
        return cls(len(values), weight, float((weights * weights).sum()), first + rest / weight, max(m2, 0.0))

    def merged(self, other: Moments) -> Moments:
        """Of both streams, in either order."""
        if not (self.weight and other.weight):
            return self if self.weight else other
        weight = self.weight + other.weight
        between = other.mean - self.mean
        return Moments(
            self.count + other.count,
            weight,
            self.squares + other.squares,
            self.mean + between * (other.weight / weight),
            self.m2 + other.m2 + between * between * (self.weight * (other.weight / weight)),
        )

    def faded(self, factor: float) -> Moments:
        """The same samples, each with `factor` of its weight."""
        return Moments(self.count, self.weight * factor, self.squares * factor * factor, self.mean, self.m2 * factor)

    def then(self, samples: Sequence[float] | ArrayLike, keep: float = 1.0) -> Moments:
        """With these samples [n] after those so far. With `keep` below 1 that is the exponentially weighted mean and
        variance of Finch 2009 ("Incremental calculation of weighted mean and variance", section 9), but for the start:
        there the first sample counts as if it had always been, here every sample has its own weight alone."""
        new = Moments.of(samples, keep)
        return self.faded(keep**new.count).merged(new)

    @property
    def variance(self) -> float:
        """The sample variance, without bias: by n - 1 where all weights are 1, else by weight - squares / weight. 0 of
        fewer than two samples."""
        if self.count < 2:
            return 0.0
        freedom = self.weight - self.squares / self.weight
        return self.m2 / freedom if freedom > 0 else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def state(self) -> list[Any]:
        """As JSON; Python writes a float so that it is read back to the last bit."""
        return [self.count, self.weight, self.squares, self.mean, self.m2]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Moments:
        count, *rest = state
        return cls(int(count), *map(float, rest))


def keep_of(half_life: float | None) -> float:
    """What a sample leaves of the weight of those before it, so that after `half_life` more it is a half."""
    return 1.0 if half_life is None else 0.5 ** (1.0 / half_life)
