"""The sketch of durations: quantiles within its promise of what numpy computes, windows that forget, state that comes back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.observe.latency import ACCURACY, LARGEST_S, SMALLEST_S, WINDOW_S, Latency


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_two_percent_of_the_value_at_its_rank(values, share):
    latency = Latency()
    for value in values:
        latency.add(value)
    exact = float(np.quantile(values, share, method="lower"))
    assert latency.quantile(share) == pytest.approx(exact, rel=ACCURACY * 1.01)
    assert latency.count == len(values)
    assert latency.sum_s == pytest.approx(sum(values))


def test_memory_does_not_grow_with_what_is_added():
    latency = Latency()
    for value in np.random.default_rng(0).lognormal(-3, 4, 20_000):
        latency.add(float(value))
    assert latency._now.length() < 800
    assert len(json.dumps(latency.state())) < 12_000


def test_quantiles_forget_what_is_two_windows_old_and_sums_do_not():
    clock = Clock()
    latency = Latency(clock)
    latency.add(9.0)
    clock.now += WINDOW_S
    latency.add(0.001)
    assert latency.quantile(0.99) == pytest.approx(0.001, rel=0.03)
    assert latency.quantile(1.0) == pytest.approx(9.0, rel=0.03)
    clock.now += WINDOW_S
    assert latency.quantile(1.0) == pytest.approx(0.001, rel=0.03)
    clock.now += 10 * WINDOW_S
    assert latency.quantile(0.99) is None
    assert (latency.count, latency.sum_s) == (2, pytest.approx(9.001))


def test_what_is_longer_or_shorter_than_can_be_is_counted_at_the_ends():
    latency = Latency()
    latency.add(1e9)
    latency.add(0.0)
    assert latency.quantile(0.0) == pytest.approx(SMALLEST_S, rel=0.03)
    assert latency.quantile(1.0) == pytest.approx(LARGEST_S, rel=0.03)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e4), max_size=50), st.lists(st.floats(0, 1e4), max_size=50))
def test_state_comes_back_through_json_and_counting_goes_on_as_if_it_had_never_stopped(first, second):
    whole, before = Latency(), Latency()
    for value in first:
        whole.add(value)
        before.add(value)
    resumed = Latency()
    resumed.load(json.loads(json.dumps(before.state())))
    for value in second:
        whole.add(value)
        resumed.add(value)
    assert resumed.state() == whole.state()
