"""Mean and variance of a stream, kept in five numbers, which can be merged without loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Moments:
    """Moments of weighted samples; with all weights 1, of a plain stream.

    For one sample at a time this is Welford 1962 with weights (West 1979, "Updating mean and variance estimates: an improved
    method", CACM 22(9)). Two streams are joined by Chan, Golub and LeVeque 1979 (STAN-CS-79-773, eq. 2.1). Large sums are
    never subtracted, so an offset costs no precision.
    """

    count: int = 0  # samples that were seen, whatever their present weight
    weight: float = 0.0  # sum of the weights
    squares: float = 0.0  # sum of the squared weights
    mean: float = 0.0
    m2: float = 0.0  # sum of weight x (sample - mean)²

    @classmethod
    def of(cls, samples: ArrayLike, keep: float = 1.0) -> Moments:
        """Moments of finite samples [n] in order. Each sample multiplies the weight of those before it by `keep`."""
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
        """The moments of both streams, in either order."""
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
        """The moments with these samples [n] appended. With `keep` below 1 this is the exponentially weighted mean and variance of
        Finch 2009 ("Incremental calculation of weighted mean and variance", section 9), except for the start: there the first
        sample counts as if it had always been present, here every sample has only its own weight."""
        new = Moments.of(samples, keep)
        return self.faded(keep**new.count).merged(new)

    @property
    def variance(self) -> float:
        """The unbiased sample variance: by n - 1 if all weights are 1, else by weight - squares / weight. 0 for fewer than two
        samples."""
        if self.count < 2:
            return 0.0
        freedom = self.weight - self.squares / self.weight
        return self.m2 / freedom if freedom > 0 else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def state(self) -> list[Any]:
        """The moments as JSON; Python writes floats so that they are read back exactly."""
        return [self.count, self.weight, self.squares, self.mean, self.m2]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Moments:
        count, *rest = state
        return cls(int(count), *map(float, rest))


def keep_of(half_life: float | None) -> float:
    """The factor by which a sample multiplies earlier weights, so that they halve after `half_life` samples."""
    return 1.0 if half_life is None else 0.5 ** (1.0 / half_life)
