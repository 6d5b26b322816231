"""Weights in 8 bits: whole numbers from -127 to 127, times a scale for each row (an output of the layer).

Trainer and engine store the base model like this below an adapter, and both must have exactly the numbers of the model directory. So
its weights lie on this grid, rounded to the dtype in which they are stored, and packing them again gives the same numbers and
scales: a row's largest weight gives its scale, and 127 times that scale, rounded, gives the weight again (for every float32: a test
tries them all).
"""

from __future__ import annotations

from torch import Tensor

LARGEST = 127


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a float32 tensor [out, in] into i8[out, in] and f32[out, 1]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    scale = scale + (scale == 0)  # a row of zeros
    return (weight / scale).round().clamp(-LARGEST, LARGEST).char(), scale


def unpack(codes: Tensor, scale: Tensor) -> Tensor:
    """Unpack to float32, which must be rounded to the dtype in which the weights are stored."""
    return codes.float() * scale
