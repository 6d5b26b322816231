"""pass@k and Wilson's interval against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from atropos_core.rollouts.evaluation_statistics import Z_95, pass_at_k, wilson


@pytest.mark.parametrize("n", [1, 2, 7, 40, 1000])
def test_pass_at_k_equals_the_exact_binomials(n):
    for correct in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        for k in sorted({1, 2, n // 2, n - 1, n} - {0}):
            if k <= n:
                exact = 1 - Fraction(comb(n - correct, k), comb(n, k))
                assert pass_at_k(n, correct, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_reply():
    replies = [True, True, False, False, False, False]
    for k in range(1, 7):
        draws = [any(chosen) for chosen in combinations(replies, k)]
        assert pass_at_k(6, 2, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_has_no_bias_where_the_plain_estimate_has():
    rate, n, k = 0.1, 10, 4
    weights = [comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - rate) ** k
    ours = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
    plain = sum(weight * (1 - (1 - c / n) ** k) for c, weight in enumerate(weights))
    assert ours == pytest.approx(truth, abs=1e-12)
    assert abs(plain - truth) > 0.01


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n, correct, k):
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(("share", "n"), [(0.0, 10), (0.1, 10), (0.5, 512), (1.0, 3)])
def test_the_ends_of_the_interval_are_where_the_score_test_rejects(share, n):
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(Z_95**2 * end * (1 - end) / n, rel=1e-9)


def test_published_intervals():
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0 / 20, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    found = np.random.default_rng(0).binomial(512, 0.4, 2000)
    covered = [low <= 0.4 <= high for low, high in (wilson(count / 512, 512) for count in found)]
    assert 0.93 <= np.mean(covered) <= 0.97
