"""Agreement statistics against other implementations of them."""

from __future__ import annotations

import math

import krippendorff
import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_debugging.agreement import Scores, interval_alpha, spearman

NUMBERS = st.floats(-8, 8, width=32)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=40)
TIED = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=40)


@given(TIED | PAIRS)
def test_the_rank_correlation_is_that_of_pandas_also_with_ties(pairs):
    before, now = np.array(pairs, np.float64).T
    expected = pandas.Series(before).rank().corr(pandas.Series(now).rank())
    assert spearman(before, now) == pytest.approx(expected, abs=1e-9, nan_ok=True)


@given(TIED | PAIRS)
def test_alpha_is_that_of_the_package_krippendorff(pairs):
    before, now = np.array(pairs, np.float64).T
    found = interval_alpha(before, now)
    if np.concatenate([before, now]).std() < 1e-6:
        return  # the package refuses equal ratings
    expected = krippendorff.alpha(reliability_data=[before, now], level_of_measurement="interval")
    assert found == pytest.approx(expected, abs=1e-9)


def test_scores_are_collected_in_parts_and_a_missing_one_is_left_out():
    scores = Scores()
    scores.add([0.0, 1.0], [0.0, 3.0])
    scores.add([0.5, 2.0], [math.nan, 2.0])
    found = scores.agreement()
    assert (found.count, found.changed, found.largest) == (3, 1, 2.0)
    assert found.rank_correlation == pytest.approx(spearman(np.array([0.0, 1, 2]), np.array([0.0, 3, 2])))


def test_equal_scores_have_no_agreement_to_speak_of():
    scores = Scores()
    scores.add([1.0, 1.0], [1.0, 1.0])
    found = scores.agreement()
    assert math.isnan(found.alpha) and math.isnan(found.rank_correlation)
    assert found.record()["alpha"] is None
    assert Scores().agreement().count == 0


def test_rounding_is_no_change():
    scores = Scores()
    scores.add([1000.0, 0.1], [1000.0001, 0.1 + 1e-8])
    assert scores.agreement().changed == 0
