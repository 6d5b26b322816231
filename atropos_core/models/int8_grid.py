"""Weights in 8 bits: whole numbers from -127 to 127, times a scale for each row (an output of the layer).

Trainer and engine hold a base so beside an adapter, and both must have the numbers of the model directory, bit for bit. So its weights lie
on this grid themselves, rounded to the dtype that they are stored in, and packing them again finds the same numbers and scales: a row's
largest weight gives its scale, and 127 times that scale, rounded, gives it again (for every float32: a test goes through them).

Written with the methods of tensors: no framework is imported here.
"""

from __future__ import annotations

from typing import Any

LARGEST = 127


def pack(weight: Any) -> tuple[Any, Any]:
    """Of a float32 tensor [out, in]: i8[out, in] and f32[out, 1]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    scale = scale + (scale == 0)  # a row of zeros
    return (weight / scale).round().clamp(-LARGEST, LARGEST).char(), scale


def unpack(codes: Any, scale: Any) -> Any:
    """In float32, and to be rounded to the dtype that the weights are stored in."""
    return codes.float() * scale
