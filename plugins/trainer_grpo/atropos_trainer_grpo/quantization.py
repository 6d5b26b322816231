"""A frozen base in 4 bits beside an adapter (QLoRA, arXiv 2305.14314): NF4 in blocks of 64, by bitsandbytes.

What engines sample from must be what the adapter is trained beside. So the weights of the model directory lie on the grid of NF4
themselves: `atropos quantize` rounds them, each in its own dtype, and any engine loads them as it loads other models. The trainer
holds the same numbers in 4 bits, bit for bit, and refuses a base that is not on the grid: rounding it here alone would train beside
another model than the one that sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

from atropos_core.errors import FitError

BLOCK = 64  # weights that share a scale


def pack(weight: Tensor) -> tuple[Tensor, QuantState]:
    """NF4 (half a byte a weight) with a scale in float32 for each block, on the weight's device."""
    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed, state


def unpack(packed: Tensor, state: QuantState, dtype: torch.dtype) -> Tensor:
    """In the dtype that the weights are stored in: levels times scales, rounded once."""
    found: Tensor = functional.dequantize_4bit(packed, state)
    return found.to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """The nearest weights on the grid, in the same dtype. What is on it stays as it is, bit for bit."""
    packed, state = pack(weight.float())
    return unpack(packed, state, weight.dtype)


class QuantizedLinear(nn.Module):
    """`F.linear` with a frozen weight that is held in 4 bits. Value and gradient are those of the weight itself, bit for bit; it is
    there in full only while it is used. Raises FitError, with `name`, for a weight that is not on the grid."""

    packed: Tensor
    scales: Tensor
    levels: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, name: str, device: torch.device | str) -> None:
        super().__init__()
        weight = linear.weight.detach().to(device)
        packed, state = pack(weight.float())
        stored = [
            dtype
            for dtype in dict.fromkeys((weight.dtype, torch.bfloat16, torch.float16))
            if torch.equal(unpack(packed, state, dtype).to(weight.dtype), weight)
        ]
        if not stored:
            dtype = str(weight.dtype).removeprefix("torch.")
            raise FitError(
                f'trainer.lora.quantization = "nf4" is for a base whose weights are on that grid, and {name} is not: engines would sample '
                "from another model than the one that is trained.",
                remedy=f"`atropos quantize MODEL DIRECTORY --dtype {dtype}` writes such a base; then --model DIRECTORY.",
            )
        self._stored, self._shape = stored[0], weight.shape
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", state.absmax, persistent=False)
        self.register_buffer("levels", state.code, persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().to(device), persistent=False)

    @property
    def weight(self) -> Tensor:
        """[out, in], made anew."""
        state = QuantState(  # type: ignore[no-untyped-call]
            self.scales, shape=self._shape, code=self.levels, blocksize=BLOCK, quant_type="nf4", dtype=torch.float32
        )
        return unpack(self.packed, state, self._stored)

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = _Linear.apply(inputs, self)  # type: ignore[no-untyped-call]
        return made


class _Linear(torch.autograd.Function):
    """Autograd would keep the whole weight of each layer until the backward pass; this makes it again there."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        context.layer = layer
        return nn.functional.linear(inputs, layer.weight.to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ context.layer.weight.to(gradient.dtype), None


def quantize(model: nn.Module, head: nn.Module, device: torch.device | str) -> None:
    """Hold every linear layer but the head and the adapters' own in 4 bits, on `device`, where each goes by itself: of the whole weights,
    one is there at a time."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in name:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, QuantizedLinear(module, name, device))
