"""A frozen base in 4 or 8 bits under an adapter (QLoRA, arXiv 2305.14314): NF4 in blocks of 64, by bitsandbytes, or int8 by row.

The engines must sample from the same base as the adapter is trained on. So the model directory's weights must already lie on the grid
of the format: `atropos quantize` rounds them, each in its own dtype, and any engine loads them like another model. The trainer holds the
same numbers in 4 or 8 bits, bit for bit. It refuses a base that is not on the grid, because rounding it only in the trainer would train
another model than the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atropos_core.errors import FitError
from atropos_torch_models import int8_grid

BLOCK = 64  # weights of NF4 that share a scale
Packed = dict[str, Tensor]


def _pack_nf4(weight: Tensor) -> Packed:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return {"packed": packed, "scales": state.absmax, "levels": state.code}


def _unpack_nf4(parts: Packed, shape: torch.Size) -> Tensor:
    from bitsandbytes import functional

    state = functional.QuantState(  # type: ignore[no-untyped-call]
        parts["scales"], shape=shape, code=parts["levels"], blocksize=BLOCK, quant_type="nf4", dtype=torch.float32
    )
    found: Tensor = functional.dequantize_4bit(parts["packed"], state)
    return found


def _pack_int8(weight: Tensor) -> Packed:
    packed, scales = int8_grid.pack(weight)
    return {"packed": packed, "scales": scales}


def _unpack_int8(parts: Packed, shape: torch.Size) -> Tensor:
    return int8_grid.unpack(parts["packed"], parts["scales"])


class Format(NamedTuple):
    """A way to hold weights in fewer bits."""

    pack: Callable[[Tensor], Packed]  # of float32 [out, in], on its device
    unpack: Callable[[Packed, torch.Size], Tensor]  # in float32, to be rounded to the dtype that they are stored in


FORMATS = {"nf4": Format(_pack_nf4, _unpack_nf4), "int8": Format(_pack_int8, _unpack_int8)}


def rounded(weight: Tensor, kind: str = "nf4") -> Tensor:
    """The nearest weights on the grid, in the same dtype. Weights on the grid stay the same, bit for bit."""
    form = FORMATS[kind]
    return form.unpack(form.pack(weight.float()), weight.shape).to(weight.dtype)


class QuantizedLinear(nn.Module):
    """`F.linear` with a frozen weight that is held in 4 or 8 bits. Value and gradient are those of the weight itself, bit for bit. The
    whole weight exists only while it is used. Raises FitError, with `name`, for a weight that is not on the grid."""

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, name: str, device: torch.device | str, kind: str = "nf4") -> None:
        super().__init__()
        weight = linear.weight.detach().to(device)
        self._form, self._shape = FORMATS[kind], weight.shape
        held = self._form.pack(weight.float())
        whole = self._form.unpack(held, weight.shape)
        stored = [
            dtype
            for dtype in dict.fromkeys((weight.dtype, torch.bfloat16, torch.float16))
            if torch.equal(whole.to(dtype).to(weight.dtype), weight)
        ]
        if not stored:
            dtype = str(weight.dtype).removeprefix("torch.")
            raise FitError(
                f'trainer.lora.quantization = "{kind}" needs a base whose weights are on that grid, and {name} is not: the engines would '
                "sample from another model than the one that is trained.",
                remedy=f"`atropos quantize MODEL DIRECTORY --format {kind} --dtype {dtype}` writes such a base: then --model DIRECTORY.",
            )
        self._stored = stored[0]
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._names = list(held)
        for part, tensor in held.items():
            self.register_buffer(part, tensor, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        self.register_buffer("bias", bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew, in the dtype that it is stored in."""
        held = {name: getattr(self, name) for name in self._names}
        return self._form.unpack(held, self._shape).to(self._stored)

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = _Linear.apply(inputs, self)  # type: ignore[no-untyped-call]
        return made


class _Linear(torch.autograd.Function):
    """Unpack the weight again in the backward pass; autograd would keep the whole weight of each layer until then."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        context.layer = layer
        return nn.functional.linear(inputs, layer.weight.to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ context.layer.weight.to(gradient.dtype), None


def quantize(model: nn.Module, head: nn.Module, device: torch.device | str, kind: str) -> None:
    """Hold every linear layer except the head and the adapters in 4 or 8 bits on `device`. Layers move there one at a time, so only one
    whole weight is there at once."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in name:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, QuantizedLinear(module, name, device, kind))
