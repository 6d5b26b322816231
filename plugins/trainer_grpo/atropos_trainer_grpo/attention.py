"""Causal attention over packed sequences, as an attention function of transformers.

Queries, keys and values of the packed row are gathered into a padded layout, go through torch's own causal attention
bucket by bucket, and are gathered back. The model builds no mask: transformers makes none for a name that is missing
from its mask interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from atropos_core.errors import FitError
from atropos_trainer_grpo.packing import Packing

NAME = "atropos_packed"


class _Gather(torch.autograd.Function):
    """Rows of the packed layout -> rows of the padded one.

    The gradient is gathered too, from each token's home; only shared beginnings add to one another. That is exact
    because rows of padding get a gradient of zero: nothing looks at what comes out of them.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Tensor, home: Tensor, again: Tensor) -> Tensor:
        ctx.save_for_backward(rows, home, again)
        return packed.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, home, again = ctx.saved_tensors
        into = grad.index_select(0, home)
        if len(again):
            into.index_add_(0, rows.index_select(0, again), grad.index_select(0, again))
        return into, None, None, None


class _Return(torch.autograd.Function):
    """Rows of the padded layout -> rows of the packed one, each from its home."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        ctx.rows = len(padded)
        return padded.index_select(0, home)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (home,) = ctx.saved_tensors
        into = grad.new_zeros(ctx.rows, grad.shape[1])
        into[home] = grad
        return into, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **rest: Any,  # what else a model may ask of its attention
) -> tuple[Tensor, None]:
    """The forward of `transformers`' attention interface; `packing` travels there as a keyword of the model's forward."""
    if packing is None:
        raise TypeError("packed attention needs its layout: call the model with packing=pack(...)")
    window = rest.get("sliding_window")
    if window is not None and window < packing.buckets[0].length:
        raise FitError(f"a sequence of {packing.buckets[0].length} tokens exceeds the model's sliding window of {window}.")
    for name in ("softcap", "s_aux", "position_bias"):
        if rest.get(name) is not None:
            raise FitError(f"{type(module).__name__} asks for {name!r} in its attention, which packed training lacks.")
    heads = [tensor.shape[1] for tensor in (query, key, value)]
    width = query.shape[-1]
    joined = torch.cat([tensor[0].transpose(0, 1).flatten(1) for tensor in (query, key, value)], dim=1)  # [N, (H+2K)D]
    padded = _Gather.apply(joined, packing.rows, packing.home, packing.again)
    outputs = []
    begin = 0
    for bucket in packing.buckets:
        end = begin + bucket.sequences * bucket.length
        rows = padded[begin:end].view(bucket.sequences, bucket.length, sum(heads), width).transpose(1, 2)
        q, k, v = rows.split(heads, dim=1)  # [S, H or K, T, D]
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=heads[0] != heads[1]
        )
        outputs.append(mixed.transpose(1, 2).reshape(end - begin, -1))  # [S*T, H*D]
        begin = end
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Return.apply(together, packing.home).view(1, -1, heads[0], width), None


def register() -> None:
    AttentionInterface.register(NAME, packed_attention)
