"""A base in 4 bits, by bitsandbytes: NF4 in blocks of 64, as `atropos quantize` has rounded its weights."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel

from atropos_core.errors import FitError

BLOCK = 64


class QuantizedLinear(Linear4bit):
    """With the numbers of the weight itself. bitsandbytes' fused kernels leave out the rounding to the dtype that weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight  # a Params4bit
        whole = functional.dequantize_4bit(weight.data, weight.quant_state)
        return nn.functional.linear(x, whole.to(x.dtype), self.bias)


def quantize(model: PreTrainedModel, device: str) -> None:
    """Hold every linear layer but the head and an adapter's own in 4 bits, on `device`, one by one. Raises FitError, with its
    name, for a layer whose weights are not on that grid: what is sampled from is the model in the directory, and nothing near it."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and ".lora_" not in name:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, _quantized(module, name, device))


def _quantized(linear: nn.Linear, name: str, device: str) -> QuantizedLinear:
    whole = linear.weight.detach().to(device)
    layer = QuantizedLinear(  # type: ignore[no-untyped-call]
        linear.in_features, linear.out_features, linear.bias is not None,
        compute_dtype=whole.dtype, compress_statistics=False, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.bias = linear.bias
    packed: Any = Params4bit(
        whole.float(), requires_grad=False, compress_statistics=False, blocksize=BLOCK, quant_type="nf4", module=layer
    )
    layer.weight = packed = packed.to(whole.device)
    state = packed.quant_state
    stored = dict.fromkeys((whole.dtype, torch.bfloat16, torch.float16))  # where what is on the grid was rounded to it
    for state.dtype in stored:
        if torch.equal(functional.dequantize_4bit(packed.data, state).to(whole.dtype), whole):
            return layer.requires_grad_(False)
    dtype = str(whole.dtype).removeprefix("torch.")
    raise FitError(
        f'engine.quantization = "nf4" is for a model whose weights are on that grid, and {name} is not.',
        remedy=f"`atropos quantize MODEL DIRECTORY --dtype {dtype}` writes such a one; then --model DIRECTORY.",
    )
