"""Causal attention over packed sequences, as an attention function of transformers.

In the padded layout, queries, keys and values of the packed row are gathered into a padded layout, go through torch's own causal attention
bucket by bucket, and are gathered back. Without it, attention is over the packed row as it is, level by level of the tree
(flash_attention.py).
The model builds no mask: transformers makes none for a name that is missing from its mask interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from atropos_core.errors import FitError
from atropos_trainer_grpo.flash_attention import refuse, tree_attention
from atropos_trainer_grpo.packed_rows import Packing

NAME = "atropos_packed"  # among transformers' attention functions


def attention_of(wanted: str, config: Any, device: str) -> str:
    """Resolve trainer.attention for a model with this configuration on this device: auto becomes padded if FlashAttention's kernels
    cannot be used. Raises FitError if they cannot and flash was requested."""
    if wanted == "padded":
        return wanted
    decoder = config.get_text_config(decoder=True)
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    why_not = refuse(device, config.dtype, width)
    if why_not and wanted == "flash":
        raise FitError(f'trainer.attention = "flash": {why_not}.', remedy='Set trainer.attention = "padded".')
    return "padded" if why_not else wanted


class _Gather(torch.autograd.Function):
    """Rows of the packed layout -> rows of the padded one.

    The gradient is gathered too, from each token's home; only shared beginnings add to it. That is exact because rows
    of padding get a gradient of zero: nothing looks at what comes out of them.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Tensor, home: Tensor, again: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, home, again)
        return packed.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, home, again = ctx.saved_tensors
        into = grad.index_select(0, home)
        if again is not None and len(again):
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
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, home, grad), None


_gather: Callable[..., Tensor] = _Gather.apply  # torch leaves apply untyped
_return: Callable[..., Tensor] = _Return.apply


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **rest: Any,  # what else a model may ask of its attention
) -> tuple[Tensor, None]:
    """The function that transformers' attention interface calls; `packing` arrives as a keyword of the model's forward."""
    packing = _checked(module, packing, rest)
    if packing.levels:  # no dropout there: `open_model` sets all of it to zero
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return tree_attention(q, k, v, packing.levels, scale)[None], None
    heads, width = query.shape[1], query.shape[3]
    if packing.alone:
        grouped = heads != key.shape[1]
        mixed = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )
        return mixed.transpose(1, 2), None
    q_rows = _gather(_rows(query), packing.queries, packing.query_home, None)  # [sum S*Tq, H*D]
    kv_rows = _gather(  # [sum S*Tk, 2*K*D]
        torch.cat([_rows(key), _rows(value)], dim=1), packing.keys, packing.key_home, packing.key_again
    )
    outputs = []
    q_parts = q_rows.split([bucket.segments * bucket.queries for bucket in packing.buckets])
    kv_parts = kv_rows.split([bucket.segments * bucket.keys for bucket in packing.buckets])
    for bucket, q, kv in zip(packing.buckets, q_parts, kv_parts, strict=True):
        k, v = kv.view(bucket.segments, bucket.keys, -1, width).transpose(1, 2).chunk(2, dim=1)  # [S, K, Tk, D]
        mixed = scaled_dot_product_attention(
            q.view(bucket.segments, bucket.queries, heads, width).transpose(1, 2),  # [S, H, Tq, D]
            k,
            v,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=heads != k.shape[1],
        )
        outputs.append(mixed.transpose(1, 2).reshape(len(q), -1))  # [S*Tq, H*D]
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _return(together, packing.query_home).view(1, -1, heads, width), None


def _checked(module: torch.nn.Module, packing: Packing | None, rest: dict[str, Any]) -> Packing:
    if packing is None:
        raise TypeError("packed attention needs its layout: call the model with packing=pack(...)")
    window = rest.get("sliding_window")
    if window is not None and window < (longest := packing.longest):
        raise FitError(f"{longest} tokens in a sequence exceed the model's sliding window of {window}.")
    for name in ("softcap", "s_aux", "position_bias"):
        if rest.get(name) is not None:
            raise FitError(f"{type(module).__name__} asks for {name!r} in its attention, which packed training lacks.")
    return packing


def register() -> None:
    AttentionInterface.register(NAME, packed_attention)


def _rows(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).flatten(1)  # [N, heads * D]
