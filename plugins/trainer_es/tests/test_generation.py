"""Noise and fitness against plain loops."""

import numpy as np
import pytest
import torch

from atropos_trainer_es.generation import fitness_of, noise


def test_noise_is_the_same_for_the_same_seed_and_another_for_any_other():
    centre = {"a": torch.zeros(50, 40), "b": torch.zeros(300)}
    one = noise(centre, (7, 3, 1))
    assert all(torch.equal(one[name], again) for name, again in noise(centre, (7, 3, 1)).items())
    for other in ((8, 3, 1), (7, 2, 1), (7, 3, 0)):
        assert not torch.equal(one["a"], noise(centre, other)["a"])
    assert float(one["a"].mean()) == pytest.approx(0, abs=0.1)
    assert float(one["a"].std()) == pytest.approx(1, abs=0.1)


def test_z_scores_have_mean_zero_and_deviation_one():
    made = fitness_of([0.1, 0.4, 0.4, 0.9], "z")
    assert made == pytest.approx((np.array([0.1, 0.4, 0.4, 0.9]) - 0.45) / np.array([0.1, 0.4, 0.4, 0.9]).std())


def test_ranks_are_evenly_spread_whatever_the_rewards_and_shared_by_equal_ones():
    assert fitness_of([5.0, -1e9, 0.2, 0.1], "rank") == pytest.approx([0.5, -0.5, 1 / 6, -1 / 6])
    assert fitness_of([1.0, 0.0, 1.0, 0.0, 0.5], "rank") == pytest.approx([0.375, -0.375, 0.375, -0.375, 0.0])


@pytest.mark.parametrize("kind", ["z", "rank"])
def test_members_that_were_all_rewarded_alike_say_nothing(kind):
    assert not fitness_of([0.3] * 6, kind).any()
