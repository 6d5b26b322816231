"""How far a layer is moved. What that does to logprobs is measured by trainer `grpo`, and its tests compare it with float64."""

from __future__ import annotations

import torch

from atropos_torch_models.rounding import noise_of_rounding


def test_a_layer_is_moved_by_half_an_epsilon_and_only_inside():
    layer = torch.nn.Linear(3, 4)
    given = torch.randn(5, 3)
    before = layer(given)
    with noise_of_rounding(layer):
        moved = layer(given)
    assert torch.equal(layer(given), before)
    apart = ((moved - before) / before).abs()
    assert (moved != before).any() and apart.max() <= torch.finfo(torch.float32).eps
