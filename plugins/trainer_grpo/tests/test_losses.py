"""The losses against independent float64 numpy code, exact values, finite differences and invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.losses import clipped_surrogate, token_weights

LOSSES = ["grpo", "dr_grpo", "dapo"]
LENGTH = 16
CLIP = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}


def oracle(loss, new, old, advantages, mask, lengths):
    """Loop by loop, as the papers write it."""
    low, high = CLIP[loss]
    sums, counts, begin = [], [], 0
    for length in lengths:
        total, count = 0.0, 0
        for t in range(begin, begin + length):
            if mask[t]:
                ratio = np.exp(np.float64(new[t]) - np.float64(old[t]))
                bounded = min(max(ratio, 1 - low), 1 + high)
                total -= min(ratio * advantages[t], bounded * advantages[t])
                count += 1
        begin += length
        if count:
            sums.append(total)
            counts.append(count)
    if loss == "grpo":
        return sum(total / count for total, count in zip(sums, counts, strict=True)) / max(len(sums), 1)
    if loss == "dr_grpo":
        return sum(sums) / (max(len(sums), 1) * LENGTH)
    return sum(sums) / max(sum(counts), 1)


def example(seed, sequences=5):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, sequences)
    total = int(lengths.sum())
    new, old = random.normal(-2, 0.4, total), random.normal(-2, 0.4, total)
    return new, old, random.normal(size=total), random.random(total) < 0.7, lengths


def value(loss, new, old, advantages, mask, lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    weights = torch.from_numpy(token_weights(loss, mask, offsets, LENGTH).astype(np.float64))
    ratio = torch.as_tensor(new) - torch.as_tensor(old)
    return clipped_surrogate(ratio, torch.as_tensor(advantages), weights, *CLIP[loss])[0]


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_each_loss_equals_an_independent_float64_computation(loss, seed):
    case = example(seed)
    assert float(value(loss, *case)) == pytest.approx(oracle(loss, *case), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_agree_with_finite_differences(loss):
    new, *rest = example(3)
    variable = torch.tensor(new, requires_grad=True)
    value(loss, variable, *rest).backward()
    for t in range(len(new)):
        step = np.zeros_like(new)
        step[t] = 1e-6
        slope = float(value(loss, new + step, *rest) - value(loss, new - step, *rest)) / 2e-6
        assert float(variable.grad[t]) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (2.0, -1.0, 2.0, True),  # a bad token became likelier: pushed down with full strength
        (0.5, -1.0, 0.8, False),  # it became rarer already: enough
        (2.0, 1.0, -1.2, False),
        (0.5, 1.0, -0.5, True),
        (1.1, 1.0, -1.1, True),
        (1.0, -1.0, 1.0, True),
    ],
)
def test_the_clip_holds_for_both_signs_of_the_advantage(ratio, advantage, expected, moves):
    log_ratio = torch.tensor([np.log(ratio)], requires_grad=True)
    loss, seen, clipped = clipped_surrogate(log_ratio, torch.tensor([advantage]), torch.ones(1), 0.2, 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected)
    assert float(seen) == pytest.approx(ratio)
    assert (float(log_ratio.grad) != 0) is moves
    assert bool(clipped) is not moves


def test_dapo_lets_ratios_rise_further_than_they_fall():
    options = GrpoOptions(loss="dapo")
    assert (options.clip_low, options.clip_above) == (0.2, 0.28)
    assert GrpoOptions().clip_above == 0.2
    log_ratio = torch.tensor([np.log(1.25), np.log(1.29)], requires_grad=True)
    clipped_surrogate(log_ratio, torch.ones(2), torch.ones(2), 0.2, options.clip_above)[0].backward()
    assert log_ratio.grad[0] != 0
    assert log_ratio.grad[1] == 0


def test_weights_say_how_the_losses_differ():
    mask = np.array([False, True, True, False, True, True, True, True])  # |o| = 2, 4
    offsets = np.array([0, 3, 8])
    grpo = token_weights("grpo", mask, offsets)
    assert np.allclose(grpo[mask], [1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])
    assert np.allclose(token_weights("dapo", mask, offsets)[mask], 1 / 6)
    assert np.allclose(token_weights("dr_grpo", mask, offsets, 10)[mask], 1 / 20)  # TRL's B * L_max, not verl's L
    assert not grpo[~mask].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_empty_masks_change_nothing(loss):
    new, old, advantages, mask, lengths = example(5)
    longer = [np.concatenate([column, np.full(4, 0.5)]) for column in (new, old, advantages)]
    padded = value(loss, *longer, np.concatenate([mask, np.zeros(4, np.bool_)]), np.concatenate([lengths, [1, 3]]))
    assert float(padded) == pytest.approx(float(value(loss, new, old, advantages, mask, lengths)), abs=1e-7)
    assert float(value(loss, new, old, advantages, np.zeros_like(mask), lengths)) == 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_advantages_have_no_gradient(loss):
    new, old, advantages, mask, lengths = example(6)
    variable = torch.tensor(new, requires_grad=True)
    value(loss, variable, old, np.zeros_like(advantages), mask, lengths).backward()
    assert not variable.grad.any()


def test_dr_grpo_asks_for_its_length_and_the_others_refuse_it():
    with pytest.raises(ValidationError, match="set loss_length"):
        GrpoOptions(loss="dr_grpo")
    with pytest.raises(ValidationError, match="remove it"):
        GrpoOptions(loss="grpo", loss_length=10)
