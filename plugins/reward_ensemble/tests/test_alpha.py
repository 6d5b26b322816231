"""Krippendorff's alpha against the published example, the package `krippendorff`, and itself."""

from __future__ import annotations

import json
from typing import get_args

import krippendorff
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_reward_ensemble.alpha import alpha, alpha_and_agreement
from atropos_reward_ensemble.config import Metric
from atropos_reward_ensemble.streaming import Coincidences, Moments, Reliability

METRICS: tuple[Metric, ...] = get_args(Metric)
_ = np.nan
PUBLISHED = np.array(  # reliability data C of Krippendorff, Computing Krippendorff's Alpha-Reliability (2011)
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3],
        [_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _],
    ]
)


def matrix(seed: int) -> np.ndarray:
    """2 to 8 raters, 2 to 40 units, up to 60 % missing; categories or reals, that agree more or less."""
    chance = np.random.default_rng(seed)
    shape = (int(chance.integers(2, 9)), int(chance.integers(2, 41)))
    truth = chance.integers(0, chance.integers(2, 8), shape[1]).astype(float)
    ratings = truth + np.rint(chance.normal(0, chance.uniform(0, 2), shape))
    if seed % 3 == 0:
        ratings = truth + chance.normal(0, chance.uniform(0.1, 2), shape)
    if seed % 2:
        ratings = np.abs(ratings)
    return np.where(chance.random(shape) < chance.uniform(0, 0.6), np.nan, ratings)


def pairable(ratings: np.ndarray) -> np.ndarray:
    return ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]


@pytest.mark.parametrize(("metric", "value"), list(zip(METRICS, (0.743, 0.815, 0.849, 0.797), strict=True)))
def test_the_published_example(metric, value):
    assert alpha(PUBLISHED, metric) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_a_thousand_random_matrices_as_the_package_krippendorff(metric):
    compared = 0
    for seed in range(1000):
        ratings = matrix(seed)
        if len(np.unique(pairable(ratings)[~np.isnan(pairable(ratings))])) < 2:
            assert np.isnan(alpha(ratings, metric))
            continue
        if metric == "ratio":  # the package divides by sums of values, which are 0 if values cancel, as here
            ratings = np.abs(ratings)
        expected = krippendorff.alpha(reliability_data=ratings, level_of_measurement=metric)
        assert alpha(ratings, metric) == pytest.approx(expected, rel=1e-9, abs=1e-9), seed
        compared += 1
    assert compared > 950


def test_interval_by_sums_of_squares_is_interval_by_pairs():
    for seed in range(50):
        ratings = matrix(seed)
        there = ~np.isnan(ratings)
        pairs = [(u, i, j) for u in range(ratings.shape[1]) for i in range(len(ratings)) for j in range(len(ratings))]
        apart = [
            (ratings[i, u] - ratings[j, u]) ** 2 / (there[:, u].sum() - 1)
            for u, i, j in pairs
            if i != j and there[i, u] and there[j, u]
        ]
        values = pairable(ratings)[~np.isnan(pairable(ratings))]
        if len(np.unique(values)) < 2:
            continue
        count = len(values)
        expected = ((values[:, None] - values[None, :]) ** 2).sum() / (count * (count - 1))
        slow = 1 - sum(apart) / count / expected
        assert alpha(ratings) == pytest.approx(slow, abs=1e-9)
        assert alpha_and_agreement(ratings)[0] == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_streaming_is_batch_whatever_the_parts(metric):
    for seed in range(200):
        ratings = matrix(seed)
        cuts = np.sort(np.random.default_rng(seed).integers(0, ratings.shape[1] + 1, 4))
        stream = Moments() if metric == "interval" else Coincidences(metric, 1000)
        for part in np.split(ratings, cuts, axis=1):
            stream.add(part)
            resumed = type(stream)() if metric == "interval" else Coincidences(metric, 1000)
            resumed.load(json.loads(json.dumps(stream.state())))
            stream = resumed
        np.testing.assert_allclose(stream.alpha(), alpha(ratings, metric), rtol=1e-9, atol=1e-9)


def test_the_interval_stream_keeps_five_numbers_and_its_digits_far_from_zero():
    chance = np.random.default_rng(0)
    ratings = np.array([4.0, 7.0, 13.0, 16.0])[chance.integers(0, 4, 5000)] + 1e9 + chance.normal(0, 1, (3, 5000))
    stream = Moments()
    for part in np.split(ratings, 50, axis=1):
        stream.add(part)
    assert len(stream.state()) == 4
    assert stream.alpha() == pytest.approx(alpha(ratings - 1e9), abs=1e-6)


def test_more_categories_than_configured_end_the_overall_alpha_and_not_the_rolling_one():
    reliability = Reliability(3, "nominal", categories=5, window=10)
    reliability.add(np.arange(12.0).reshape(1, 12).repeat(3, axis=0) % 4)
    assert reliability.alpha() == 1.0
    reliability.add(np.arange(12.0).reshape(1, 12).repeat(3, axis=0))
    assert reliability.full
    assert np.isnan(reliability.alpha())
    assert reliability.rolling()[0] == 1.0
    assert reliability.state()["overall"] == {"full": True, "values": [], "matrix": []}


def test_the_window_forgets():
    reliability = Reliability(2, window=50)
    chance = np.random.default_rng(1)
    reliability.add(chance.normal(size=(2, 500)))
    before = reliability.rolling()[0]
    agreed = chance.normal(size=50)
    reliability.add(np.stack([agreed, agreed]))
    assert before < 0.4
    assert reliability.rolling()[0] == 1.0
    again = Reliability(2, window=50)
    again.load(json.loads(json.dumps(reliability.state(), allow_nan=False)))
    assert again.state() == reliability.state()


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_the_raters_agreements_average_to_alpha_where_none_is_missing(metric, seed):
    chance = np.random.default_rng(seed)
    ratings = chance.integers(1, 5, (4, 12)).astype(float)
    assert alpha_and_agreement(ratings, metric)[1].mean() == pytest.approx(alpha(ratings, metric), abs=1e-9)


def test_the_rater_that_guesses_agrees_least():
    chance = np.random.default_rng(2)
    truth = chance.random(400)
    ratings = truth + chance.normal(0, 0.1, (5, 400))
    ratings[3] = chance.random(400)
    found = alpha_and_agreement(ratings)[1]
    assert found.argmin() == 3
    assert found[3] == pytest.approx(0.0, abs=0.15)


@pytest.mark.parametrize(
    "ratings", [np.zeros((3, 0)), np.full((3, 4), np.nan), np.where(np.eye(4), 1.0, np.nan), np.ones((2, 3))]
)
@pytest.mark.parametrize("metric", METRICS)
def test_nothing_to_compare_is_nan(metric, ratings):
    assert np.isnan(alpha(ratings, metric))
    assert np.isnan(alpha_and_agreement(ratings, metric)[0])
    assert np.isnan(alpha_and_agreement(ratings, metric)[1]).all()
