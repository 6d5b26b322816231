"""Moments against numpy, exact arithmetic and their own identities."""

from __future__ import annotations

import json
import tracemalloc
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_normalization.moments import Moments, keep_of

SAMPLES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)


def serial(samples: list[float], keep: float = 1.0) -> Moments:
    moments = Moments()
    for sample in samples:
        moments = moments.then([sample], keep)
    return moments


def exact(samples: list[float], keep: Fraction = Fraction(1)) -> tuple[Fraction, Fraction]:
    """Mean and unbiased variance in rational numbers."""
    weights = [keep ** (len(samples) - 1 - at) for at in range(len(samples))]
    total = sum(weights)
    mean = sum(w * Fraction(x) for w, x in zip(weights, samples, strict=True)) / total
    m2 = sum(w * (Fraction(x) - mean) ** 2 for w, x in zip(weights, samples, strict=True))
    freedom = total - sum(w * w for w in weights) / total
    return mean, m2 / freedom if freedom else Fraction(0)


def close(one: Moments, other: Moments, scale: float) -> None:
    assert one.count == other.count
    assert one.weight == pytest.approx(other.weight, rel=1e-12)
    assert one.squares == pytest.approx(other.squares, rel=1e-12)
    assert one.mean == pytest.approx(other.mean, rel=1e-12, abs=1e-12 * scale)
    assert one.m2 == pytest.approx(other.m2, rel=1e-9, abs=1e-12 * scale * scale)


@pytest.mark.parametrize("way", ["one by one", "at once", "merged", "backwards"])
def test_a_large_offset_costs_no_precision(way):
    samples = [1e9 + x for x in (4, 7, 13, 16)]
    left, right = Moments.of(samples[:1]), Moments.of(samples[1:])
    made = {
        "one by one": serial(samples),
        "at once": Moments.of(samples),
        "merged": left.merged(right),
        "backwards": right.merged(left),
    }[way]
    assert made.mean == 1e9 + 10
    assert made.variance == 30


@given(SAMPLES, st.data())
def test_merged_equals_serial_for_any_partition(samples, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=8)))
    parts = [samples[a:b] for a, b in pairwise([0, *cuts, len(samples)])]
    merged = Moments()
    for part in data.draw(st.permutations(parts)):
        merged = merged.merged(Moments.of(part))
    close(merged, serial(samples), max(map(abs, samples)))


@given(SAMPLES, st.floats(1, 1000), st.data())
def test_decayed_batches_equal_decayed_samples_for_any_cuts(samples, half_life, data):
    keep = keep_of(half_life)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=8)))
    batched = Moments()
    for a, b in pairwise([0, *cuts, len(samples)]):
        batched = batched.then(samples[a:b], keep)
    close(batched, serial(samples, keep), max(map(abs, samples)))


@settings(max_examples=50)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=12), st.sampled_from([1, 2, 8]))
def test_mean_and_variance_are_those_of_exact_arithmetic(samples, eighths):
    keep = Fraction(8 - eighths, 8) if eighths != 8 else Fraction(1)
    mean, variance = exact(samples, keep)
    made = serial(samples, float(keep))
    assert made.mean == pytest.approx(float(mean), abs=1e-10)
    assert made.variance == pytest.approx(float(variance), rel=1e-9, abs=1e-9)


@given(SAMPLES)
def test_without_decay_it_is_numpy_s_mean_and_sample_variance(samples):
    made, scale = serial(samples), max(map(abs, samples))
    assert made.mean == pytest.approx(np.mean(samples), rel=1e-12, abs=1e-12 * scale)
    expected = np.var(samples, ddof=1) if len(samples) > 1 else 0
    assert made.variance == pytest.approx(expected, rel=1e-9, abs=1e-12 * scale * scale)


def test_decay_ends_where_finch_s_recurrence_ends():
    """Finch 2009, section 9: mean += a d; variance = (1 - a)(variance + a d²), the variance of the weights, biased."""
    rng, keep = np.random.default_rng(3), keep_of(50)
    samples = rng.normal(3, 2, 5000)
    mean, variance, a = samples[0], 0.0, 1 - keep
    for sample in samples[1:]:
        away = sample - mean
        mean, variance = mean + a * away, (1 - a) * (variance + a * away * away)
    made = Moments.of(samples, keep)
    assert made.mean == pytest.approx(mean, rel=1e-12)
    assert made.m2 / made.weight == pytest.approx(variance, rel=1e-12)


def test_a_half_life_halves():
    made = Moments.of([1.0] + [0.0] * 8, keep_of(8))
    assert made.mean * made.weight == pytest.approx(0.5, rel=1e-12)


def test_ten_million_updates_take_constant_memory_and_keep_their_precision():
    rng, moments = np.random.default_rng(0), Moments()
    batches = [1e6 + rng.normal(size=1000) for _ in range(10)]
    tracemalloc.start()
    try:
        for number in range(10_000):
            moments = moments.then(batches[number % 10])
            if number == 100:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert moments.count == 10_000_000
    assert peak - before < 200_000, "a batch of 1,000 and its weights"
    assert after - before < 2_000
    whole = np.concatenate(batches)
    assert moments.mean == pytest.approx(whole.mean(), rel=1e-14)
    assert moments.variance == pytest.approx(whole.var() * 1e7 / (1e7 - 1), rel=1e-9)


@given(SAMPLES, st.floats(1, 1000))
def test_the_state_comes_back_to_the_last_bit(samples, half_life):
    made = serial(samples, keep_of(half_life))
    assert Moments.from_state(json.loads(json.dumps(made.state()))) == made


def test_few_and_equal_samples_have_no_variance():
    assert Moments().variance == 0
    assert Moments.of([]) == Moments()
    assert Moments.of([5.0]).variance == 0
    assert serial([0.1] * 1000).variance == 0
    assert (
        Moments().merged(Moments.of([2.0, 4.0])) == Moments.of([2.0, 4.0]) == Moments.of([2.0, 4.0]).merged(Moments())
    )
    assert Moments.of([1.0, 2.0], 1e-300).variance == 0, "nothing is left of the first"
