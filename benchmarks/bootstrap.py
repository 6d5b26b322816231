"""How sure a mean over a few seeds is: the percentile bootstrap (Efron and Tibshirani 1993, chapter 13)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of the means of 10,000 resamples of `values` `[seeds]`."""
    of = np.asarray(values, np.float64)
    means = of[np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return low, high
