"""A linear layer in NF4, by bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn

BLOCK = 64


class QuantizedLinear(Linear4bit):
    """A 4-bit layer that computes with exactly the unpacked weight.

    It does not use bitsandbytes' fused kernels: they skip the rounding to the dtype in which the weights are stored."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight  # a Params4bit
        whole = functional.dequantize_4bit(weight.data, weight.quant_state)
        return nn.functional.linear(x, whole.to(x.dtype), self.bias)


def packed(linear: nn.Linear, whole: Tensor, stored: Sequence[torch.dtype]) -> QuantizedLinear | None:
    """Return the packed layer, or None if `whole`, its weight, is not on the grid rounded to one of the dtypes `stored`."""
    layer = QuantizedLinear(  # type: ignore[no-untyped-call]
        linear.in_features, linear.out_features, linear.bias is not None,
        compute_dtype=whole.dtype, compress_statistics=False, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.bias = linear.bias
    weight: Any = Params4bit(
        whole.float(), requires_grad=False, compress_statistics=False, blocksize=BLOCK, quant_type="nf4", module=layer
    )
    layer.weight = weight = weight.to(whole.device)
    state = weight.quant_state
    for state.dtype in stored:
        if torch.equal(functional.dequantize_4bit(weight.data, state).to(whole.dtype), whole):
            return layer
    return None
