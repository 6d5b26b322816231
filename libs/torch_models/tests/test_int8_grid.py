"""Weights that were rounded to the grid are packed again to the same numbers. Layers with such weights have tests in their plugins."""

from __future__ import annotations

import torch

from atropos_torch_models import int8_grid


def test_a_scale_in_8_bits_is_found_again_whatever_the_largest_weight_of_its_row():
    largest = (torch.arange(2**23, dtype=torch.int32) + 0x3F800000).view(torch.float32)  # every float32 from 1 to 2
    scale = int8_grid.pack(largest[:, None])[1]
    again = int8_grid.unpack(torch.full_like(scale, 127).char(), scale)
    assert not torch.equal(again[:, 0], largest), "it is not always the weight itself"
    assert torch.equal(int8_grid.pack(again)[1], scale)
