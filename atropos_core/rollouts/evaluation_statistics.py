"""Statistics of graded replies: unbiased pass@k, and confidence intervals of shares."""

from __future__ import annotations

import math

import numpy as np

Z_95 = 1.959963984540054  # of the normal distribution: 95 % lie within so many standard deviations


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the chance that k replies drawn from n without replacement contain a correct one: 1 - C(n - c, k) / C(n, k). It is
    unbiased for k fresh replies (Chen et al. 2021, arXiv 2107.03374, eq. 1). Computed as a product, since the binomials
    overflow. Needs 1 <= k <= n and 0 <= correct <= n."""
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {correct} correct among {n}: needs 1 <= k <= n and 0 <= correct <= n")
    if n - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's interval (1927) for a mean of n independent values in [0, 1]. Exact to its usual order if they are 0 or 1. If
    they are shares themselves it is too wide, because their variance is at most share * (1 - share)."""
    if n < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"no interval for a share of {share} among {n}")
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
