"""Store a base model in 4 bits (bitsandbytes' NF4, blocks of 64) or 8 bits (int8 by row), as rounded by `atropos quantize`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from atropos_core.errors import FitError
from atropos_torch_models import int8_grid


class Int8Linear(nn.Linear):
    """A linear layer with an int8 weight and a scale for each of its rows."""

    scales: Tensor

    def __init__(self, linear: nn.Linear, whole: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = int8_grid.pack(whole.float())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias
        self.stored = whole.dtype

    def whole(self) -> Tensor:
        """Return the unpacked weight, in the dtype that it was stored in."""
        return int8_grid.unpack(self.weight, self.scales).to(self.stored)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.whole().to(input.dtype), self.bias)


def quantize(model: PreTrainedModel, device: str, kind: str) -> None:
    """Store each linear layer except the head and an adapter's own in 4 or 8 bits on `device`, one after another.

    Raises FitError, with the layer's name, if its weights are not on that grid: the engine samples from exactly the model in
    the directory, never from an approximation."""
    head, packed = model.get_output_embeddings(), {"nf4": _pack_nf4, "int8": _pack_int8}[kind]
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and ".lora_" not in name:
            whole = module.weight.detach().to(device)
            layer = packed(module, whole)
            if layer is None:
                dtype = str(whole.dtype).removeprefix("torch.")
                raise FitError(
                    f'engine.quantization = "{kind}" is for a model whose weights are on that grid, and {name} is not.',
                    remedy=f"`atropos quantize MODEL DIRECTORY --format {kind} --dtype {dtype}` writes such a one; then --model DIRECTORY.",
                )
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, layer.requires_grad_(False))


def dtypes(whole: Tensor) -> list[torch.dtype]:
    """Return the dtypes that weights on the grid may have been rounded to."""
    return list(dict.fromkeys((whole.dtype, torch.bfloat16, torch.float16)))


def _pack_int8(linear: nn.Linear, whole: Tensor) -> Int8Linear | None:
    """Return the packed layer, or None if its weights are not on the int8 grid."""
    layer = Int8Linear(linear, whole)
    for layer.stored in dtypes(whole):
        if torch.equal(layer.whole().to(whole.dtype), whole):
            return layer
    return None


def _pack_nf4(linear: nn.Linear, whole: Tensor) -> nn.Module | None:
    from atropos_engine_hf.nf4_linear import packed

    return packed(linear, whole, dtypes(whole))
