"""A rater that departs is found, and others are not flagged: ten thousand simulated streams of 200 episodes."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest

from atropos_reward_ensemble.outlier_raters import BETS, Departures, bound, grown, odd_ones, scores, total

STREAMS, HIJACKED, SAMPLES, RATERS = 10_000, 2_000, 200, 5  # streams without, and with, a hijacked rater
TOLERANCE, FALSE_ALARM, HORIZON = 1.5, 0.01, 10_000


def binary(chance: np.random.Generator, errors: np.ndarray, units: int) -> np.ndarray:
    """Verdicts [R, units] on replies of which half are right; each rater errs independently, as often as `errors` says."""
    truth = chance.random(units) < 0.5
    return (truth ^ (chance.random((len(errors), units)) < errors[:, None])).astype(np.float64)


def graded(chance: np.random.Generator, noise: np.ndarray, units: int) -> np.ndarray:
    return chance.random(units) + chance.normal(0, 1, (len(noise), units)) * noise[:, None]


def first_flags(ratings: np.ndarray, group: int = 1) -> np.ndarray:
    """The streams are joined in [R, streams * SAMPLES]. After how many groups each rater is flagged, [R, streams]; -1 if it is
    not. The plugin's own arithmetic, for all streams at once."""
    shares, many = odd_ones(ratings)
    groups = SAMPLES // group
    score = np.where(np.isnan(shares), np.nan, shares * many / TOLERANCE).reshape(len(ratings), -1, groups, group)
    counted = (~np.isnan(score)).sum(axis=-1)
    y = np.where(counted > 0, np.nansum(score, axis=-1) / np.maximum(counted, 1), np.nan)
    evidence = np.zeros((*score.shape[:2], len(BETS)))
    first = np.full(score.shape[:2], -1)
    for at in range(groups):
        evidence = grown(evidence, y[:, :, at])
        over = total(evidence) >= bound(len(ratings), HORIZON, FALSE_ALARM)
        first = np.where((first < 0) & over, at + 1, first)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["binary", "graded", "one worse"])
def test_under_one_in_a_hundred_honest_streams_raises_an_alarm(kind):
    chance = np.random.default_rng(7)
    parts = 10  # a tenth of the streams at a time: 100 MB instead of a gigabyte
    units = STREAMS * SAMPLES // parts
    spread = np.full(RATERS, 0.1)
    if kind == "one worse":
        spread[2] *= 1.4  # tolerated: the odd one in 1.4 / 5.4 of the disputes, and 1.5 / 5 are allowed
    made = graded if kind == "graded" else binary
    alarms = [(first_flags(made(chance, spread, units)) >= 0).any(axis=0).mean() for _ in range(parts)]
    assert statistics.mean(alarms) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constant", "inverted", "random", "graded"])
@pytest.mark.parametrize("group", [1, 8])
def test_a_hijacked_rater_is_flagged_within_200_samples(kind, group):
    chance = np.random.default_rng(8)
    units = HIJACKED * SAMPLES
    ratings = binary(chance, np.full(RATERS, 0.05), units)
    if kind == "constant":
        ratings[3] = 1.0
    elif kind == "inverted":
        ratings[3] = 1.0 - ratings[3]
    elif kind == "random":
        ratings[3] = chance.random(units) < 0.5
    else:
        ratings = graded(chance, np.full(RATERS, 0.1), units)
        ratings[3] = 0.9 + chance.normal(0, 0.1, units)
    first = first_flags(ratings, group)
    found = first[3] >= 0
    assert found.mean() > 0.99
    assert (np.delete(first, 3, axis=0) >= 0).any(axis=0).mean() < 0.01
    assert statistics.median(first[3][found] * group) <= (180 if group > 1 else 100)


def test_a_rater_hijacked_in_the_middle_of_a_long_run_is_found_as_fast():
    chance = np.random.default_rng(9)
    departures = Departures(RATERS, tolerance=TOLERANCE, false_alarm=FALSE_ALARM, horizon=HORIZON)
    for _ in range(2000):
        assert departures.add(binary(chance, np.full(RATERS, 0.05), 8)) == []
    assert departures.suspicion().max() < 0.7
    for _ in range(200 // 8):
        ratings = binary(chance, np.full(RATERS, 0.05), 8)
        ratings[1] = 1.0
        if flagged := departures.add(ratings):
            break
    assert flagged == [1]
    assert departures.suspicion()[1] == 1.0


def test_a_second_one_is_found_among_the_others():
    chance = np.random.default_rng(10)
    departures = Departures(RATERS, tolerance=TOLERANCE, false_alarm=FALSE_ALARM, horizon=HORIZON)
    order: list[int] = []
    for group in range(120):
        ratings = binary(chance, np.full(RATERS, 0.05), 8)
        ratings[0] = 1.0
        if group >= 40:
            ratings[4] = 1.0 - ratings[4]
        order += departures.add(ratings)
    assert order == [0, 4]


def test_the_odd_one_is_farthest_from_the_median_of_the_others():
    _ = np.nan
    ratings = np.array([[0, 1, 1, 0, 0, 1.0], [0, 1, 0, 0, 1, _], [0, 0, 0, 5, _, 0], [0, 1, 1, 1, _, 0]], float)
    shares, many = odd_ones(ratings)
    assert many.tolist() == [4, 4, 4, 4, 2, 3]
    np.testing.assert_allclose(shares[:, 1], [0, 0, 1, 0])
    np.testing.assert_allclose(shares[:, 3], [0, 0, 1, 0])
    np.testing.assert_allclose(shares[:, 5], [1, _, 0, 0])
    assert np.isnan(shares[:, [0, 2, 4]]).all()  # no dispute; all equally far; two cannot dispute


def test_shares_are_what_a_slow_reading_of_the_rule_gives():
    chance = np.random.default_rng(11)
    ratings = np.where(chance.random((6, 300)) < 0.2, np.nan, chance.integers(0, 4, (6, 300)).astype(float))
    shares, _ = odd_ones(ratings)
    for unit in range(300):
        there = [rater for rater in range(6) if not np.isnan(ratings[rater, unit])]
        if len(there) < 3:
            assert np.isnan(shares[:, unit]).all()
            continue
        far = {
            rater: abs(
                ratings[rater, unit] - statistics.median(ratings[other, unit] for other in there if other != rater)
            )
            for rater in there
        }
        most = max(far.values())
        if most == min(far.values()):
            assert np.isnan(shares[:, unit]).all()
            continue
        odd = [rater for rater in there if far[rater] == most]
        assert [rater for rater in range(6) if shares[rater, unit] > 0] == odd
        assert np.nansum(shares[:, unit]) == pytest.approx(1.0)


def test_at_the_very_edge_of_what_is_tolerated_the_stated_chance_of_a_false_alarm_holds():
    """Raters that are the odd one in just tolerance/m of the disputes, each group a dispute, to the end of the horizon."""
    chance = np.random.default_rng(14)
    horizon, false_alarm, edge = 400, 0.2, TOLERANCE / RATERS
    evidence = np.zeros((STREAMS, len(BETS)))
    flagged = np.zeros(STREAMS, bool)
    for _ in range(horizon):
        evidence = grown(evidence, (chance.random(STREAMS) < edge) / edge)
        flagged |= total(evidence) >= bound(1, horizon, false_alarm)
    assert 0.01 < flagged.mean() <= false_alarm  # not so far below that it would promise too little


def test_a_bet_wins_nothing_on_average_where_raters_are_alike():
    """The promise that the bound on false alarms rests on: E[y] <= 1 with a tolerance, = 1 with none."""
    chance = np.random.default_rng(12)
    y = np.stack([scores(graded(chance, np.full(4, 0.3), 8), 1.0) for _ in range(4000)])
    assert np.nanmean(y) == pytest.approx(1.0, abs=1e-9)  # shares add up to 1, by construction
    np.testing.assert_allclose(np.nanmean(y, axis=0), 1.0, atol=0.05)
    assert grown(np.zeros((1, 2)), np.array([np.nan])).tolist() == [[0.0] * 2]
    np.testing.assert_allclose(np.expm1(grown(np.zeros((1, 2)), np.array([1.0]))), 1.0)  # (0 + 1) * 1


def test_the_state_goes_through_json():
    chance = np.random.default_rng(13)
    one = Departures(3, tolerance=1.5, false_alarm=0.01, horizon=100)
    for _ in range(20):
        one.add(binary(chance, np.array([0.05, 0.05, 0.5]), 8))
    other = Departures(3, tolerance=1.5, false_alarm=0.01, horizon=100)
    other.load(json.loads(json.dumps(one.state(), allow_nan=False)))
    more = binary(chance, np.array([0.05, 0.05, 0.5]), 8)
    assert one.add(more) == other.add(more)
    assert one.state() == other.state()
