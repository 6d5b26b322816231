"""Each way to combine, on values worked out by hand and against another library's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atropos_reward_ensemble.combine import combined

_ = np.nan
RATINGS = np.array([[1.0, 0.0, _, 0.9], [0.0, 0.0, 0.2, 0.8], [1.0, 1.0, 0.4, _]])
ONES = np.ones(3)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [2 / 3, 1 / 3, 0.3, 0.85]),
        ("weighted", [2 / 3, 1 / 3, 0.3, 0.85]),
        ("median", [1.0, 0.0, 0.3, 0.85]),
        ("minimum", [0.0, 0.0, 0.2, 0.8]),
        ("majority", [1.0, 0.0, 0.0, 1.0]),
        ("all_of", [0.0, 0.0, 0.0, 1.0]),
        ("first_of", [1.0, 0.0, _, 0.9]),
    ],
)
def test_missing_ratings_are_left_out_and_are_no_zeros(how, expected):
    if how == "first_of":  # of those that are there
        expected = [1.0, 0.0, 0.2, 0.9]
    np.testing.assert_allclose(combined(RATINGS, how, ONES), expected)


def test_weights_count():
    weights = np.array([3.0, 1.0, 1.0])
    np.testing.assert_allclose(combined(RATINGS, "weighted", weights), [0.8, 0.2, 0.3, 0.875])
    np.testing.assert_allclose(combined(RATINGS, "median", weights)[:2], [1.0, 0.0])
    assert combined(np.array([[0.0], [1.0], [1.0]]), "majority", weights) == [0.0]
    assert combined(np.array([[0.0], [1.0], [1.0]]), "median", np.array([2.0, 1.0, 1.0])) == [0.5]


def test_a_tie_of_a_majority_is_a_no():
    assert combined(np.array([[1.0], [0.0]]), "majority", np.ones(2)) == [0.0]


def test_a_veto_outdoes_the_others_and_is_not_in_their_mean():
    vetoes = np.array([True, False, False])
    ratings = np.array([[0.0, 1.0, _], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    np.testing.assert_allclose(combined(ratings, "veto", ONES, vetoes=vetoes), [0.0, 0.5, _])


def test_where_one_of_several_vetoes_is_missing_there_is_no_value():
    vetoes = np.array([True, True, False])
    ratings = np.array([[1.0, _, 0.0, _], [1.0, 1.0, _, _], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(combined(ratings, "veto", ONES, vetoes=vetoes), [0.5, _, _, _])


@pytest.mark.parametrize("how", ["mean", "weighted", "median", "trimmed", "minimum", "majority", "all_of", "first_of"])
def test_no_rating_at_all_is_no_value(how):
    assert np.isnan(combined(np.full((3, 2), np.nan), how, ONES)).all()


FINITE = arrays(np.float64, st.tuples(st.integers(2, 7), st.integers(1, 5)), elements=st.floats(-1e6, 1e6))


@given(FINITE)
def test_with_equal_weights_mean_and_median_are_numpys(ratings):
    ones = np.ones(len(ratings))
    np.testing.assert_allclose(combined(ratings, "median", ones), np.median(ratings, axis=0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(combined(ratings, "mean", ones), ratings.mean(axis=0), rtol=1e-9, atol=1e-6)


@given(FINITE, st.data())
def test_a_whole_weight_is_so_many_raters(ratings, data):
    many = data.draw(arrays(np.int64, len(ratings), elements=st.integers(0, 4)))
    if many.sum() == 0:
        many[0] = 1
    repeated = np.repeat(ratings, many, axis=0)
    np.testing.assert_allclose(
        combined(ratings, "median", many.astype(float)), np.median(repeated, axis=0), rtol=1e-12, atol=1e-9
    )


def test_trimmed_leaves_out_the_ends_of_what_is_there():
    ratings = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, _], [100.0, 9.0]])
    np.testing.assert_allclose(combined(ratings, "trimmed", np.ones(5), trim=0.2), [2.0, 3.0])  # 0.2 of four is none
    np.testing.assert_allclose(combined(ratings, "trimmed", np.ones(5), trim=0.4), [2.0, 1.5])
