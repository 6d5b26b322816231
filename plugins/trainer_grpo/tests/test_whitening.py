"""The KL penalty of a reward and whitening against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_trainer_grpo.whitening import whitened, with_divergence


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_each_token_pays_for_the_divergence_from_it_on(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, 4)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(lengths.sum())
    advantages, divergence = random.normal(size=(2, total)).astype(np.float32)
    trained = random.random(total) < 0.7
    made = with_divergence(advantages, divergence, trained, offsets, 0.3)
    assert made.dtype == np.float64
    for first, last in pairwise(offsets):
        for t in range(first, last):
            ahead = sum(float(divergence[s]) for s in range(t, last) if trained[s])
            expected = advantages[t] - 0.3 * ahead if trained[t] else 0.0
            assert made[t] == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 40))
def test_whitened_advantages_have_mean_0_and_bessels_deviation_1(seed, size):
    random = np.random.default_rng(seed)
    advantages, trained = random.normal(3, 2, size).astype(np.float32), random.random(size) < 0.7
    trained[:2] = True
    made = whitened(advantages, trained)
    values = advantages[trained].astype(np.float64)
    expected = (values - np.mean(values)) / np.sqrt(sum((v - np.mean(values)) ** 2 for v in values) / (len(values) - 1))
    np.testing.assert_allclose(made[trained], expected, atol=1e-5)
    assert not made[~trained].any()
    assert made.dtype == np.float32


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5, 0.5], [1000.0, 1000.001], [1e-7, 2e-7]])
def test_what_is_equal_up_to_noise_becomes_0_and_not_noise(values):
    assert not whitened(np.array(values, np.float32), np.ones(len(values), np.bool_)).any()


def test_what_is_apart_by_more_than_rounding_counts_however_large_all_are():
    made = whitened(np.array([1000.0, 1000.05], np.float32), np.ones(2, np.bool_))
    assert made.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a_mean_that_is_far_larger_than_the_deviation_costs_no_precision():
    random = np.random.default_rng(0)
    advantages = np.full(64, 450.0, np.float32)
    divergence = random.normal(size=64).astype(np.float32)
    trained, offsets = np.ones(64, np.bool_), np.arange(65)
    made = whitened(with_divergence(advantages, divergence, trained, offsets, 1.0), trained)
    values = 450.0 - divergence.astype(np.float64)
    np.testing.assert_allclose(made, (values - values.mean()) / values.std(ddof=1), atol=2e-7)
