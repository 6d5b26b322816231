"""Compare the metrics of two runs statistically, for runs that differ from the first step on because they are not deterministic.

For each metric, d is the difference between both runs at each common step. The step from which on it differs is the least-squares
change point of d: the one after which n times the squared mean of d is largest (Bai 1994, with a mean of 0 before). The mean after it
is tested against 0 by Student's t with an effective number of steps n (1 - r) / (1 + r), where r is the lag-1 autocorrelation of d
(Zwiers and von Storch 1995, equation 5), with the small-sample correction of r by Marriott and Pope (1954). p is multiplied by the
number of metrics and of possible steps (Bonferroni). This is evidence, not proof: two runs say nothing of other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError

EVIDENCE = (
    "p is corrected for all metrics and steps. This is evidence and not proof: it compares these two runs, and other seeds of one "
    "configuration may differ as much."
)
LEAST_STEPS = 10  # after the change
SIGNIFICANT = 0.01
COMPARED = (  # beginnings of names: rewards, lengths, entropy, gradients, KL; not the probe, which adds up over steps
    "reward/", "advantage/", "accuracy", "tokens/", "rollouts/", "replies/", "groups/", "entropy", "grad_norm", "learning_rate",
    "kl", "ratio", "clip",
)  # fmt: skip
SPEED = "tokens/s"


@dataclass(frozen=True)
class Drift:
    """A metric that differs from one step on."""

    metric: str
    step: int
    a: float  # mean from this step on
    b: float
    steps: int  # from this step on
    effective: float  # independent steps
    p: float  # corrected for all metrics and steps; 0 if both are constant


def drifts(a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]) -> tuple[list[Drift], int]:
    """Return the metrics that differ, by step, and the number of metrics that were compared. `a`, `b`: metrics by step. Raises
    DataError if there are too few common steps."""
    steps = sorted(a.keys() & b.keys())
    if len(steps) < 2 * LEAST_STEPS:
        raise DataError(
            f"the runs have {len(steps)} steps in common, and a statistical comparison needs {2 * LEAST_STEPS}.",
            remedy="Leave out --statistics, or compare longer runs.",
        )
    names = sorted(set.intersection(*(set(rows[step]) for rows in (a, b) for step in steps)))
    compared = [name for name in names if name.startswith(COMPARED) and name != SPEED]
    tests = len(compared) * (len(steps) - LEAST_STEPS + 1)
    found = []
    for name in compared:
        first, second = (np.array([rows[step][name] for step in steps], np.float64) for rows in (a, b))
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            continue
        if (one := _drift(name, steps, first, second, tests)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: (one.step, one.p, one.metric)), len(compared)


def _drift(name: str, steps: Sequence[int], a: NDArray[np.float64], b: NDArray[np.float64], tests: int) -> Drift | None:
    difference = a - b
    at = change_point(difference)
    after = difference[at:]
    effective = effective_steps(after)
    spread = float(after.std(ddof=1))
    mean = float(after.mean())
    if spread <= 1e-12 * abs(mean):
        p = 0.0 if mean else 1.0
    else:
        p = min(1.0, tests * student_p(abs(mean) / (spread / math.sqrt(effective)), effective - 1))
    if p >= SIGNIFICANT:
        return None
    return Drift(name, steps[at], float(a[at:].mean()), float(b[at:].mean()), len(after), effective, p)


def change_point(difference: NDArray[np.float64]) -> int:
    """Return the place after which n times the squared mean is largest, with at least LEAST_STEPS after it."""
    sums = np.cumsum(difference[::-1])[::-1]
    counts = np.arange(len(difference), 0, -1)
    gains = (sums**2 / counts)[: len(difference) - LEAST_STEPS + 1]
    return int(gains.argmax())


def effective_steps(values: NDArray[np.float64]) -> float:
    """Return the number of independent steps that tell as much of the mean as these do; from 2 to their number."""
    count = len(values)
    centred = values - values.mean()
    scatter = float(centred @ centred)
    if not scatter:
        return float(count)
    r = float(centred[1:] @ centred[:-1]) / scatter
    r = min(max(r + (1 + 3 * r) / count, 0.0), 0.99)
    return min(max(count * (1 - r) / (1 + r), 2.0), float(count))


def student_p(t: float, freedom: float) -> float:
    """Return the two-sided p of Student's t: the regularised incomplete beta function I_x(freedom / 2, 1 / 2) at
    x = freedom / (freedom + t^2) (Abramowitz and Stegun 26.7.1), by its continued fraction (26.5.8)."""
    x = freedom / (freedom + t * t)
    a, b = freedom / 2, 0.5
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    return _incomplete_beta(a, b, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0:
        return 0.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tail = 0.0
    for m in range(200, 0, -1):  # from its end: 1 + d_1 / (1 + d_2 / (1 + ...))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        tail = odd / (1.0 + even / (1.0 + tail))
    return math.exp(log_front) / (a * (1.0 + tail))
