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
from atropos_trainer_grpo.architecture import architecture_of
from atropos_trainer_grpo.flash_attention import refuse, tree_attention
from atropos_trainer_grpo.packed_rows import Bucket, Packing

NAME = "atropos_packed"  # among transformers' attention functions


def attention_of(wanted: str, config: Any, device: str) -> str:
    """Resolve trainer.attention for a model with this configuration on this device: auto becomes padded if FlashAttention's kernels
    cannot be used. Raises FitError if they cannot and flash was requested."""
    if wanted == "padded":
        return wanted
    why_not = refuse(device, config.dtype, _head_width(config.get_text_config(decoder=True)))
    if more := sorted(architecture_of(config).attention - {"window"}):
        why_not = f"a {config.model_type!r} model has attention with {' and '.join(more)}, which FlashAttention's kernels lack here"
    if why_not and wanted == "flash":
        raise FitError(f'trainer.attention = "flash": {why_not}.', remedy='Set trainer.attention = "padded".')
    return "padded" if why_not else wanted


def _head_width(config: Any) -> int | None:
    """The largest number of elements in a head of a layer; None for a model without heads."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = [
        (getattr(one, "head_dim", None), getattr(one, "num_attention_heads", None), one.hidden_size) for one in layers
    ]
    return max((width or hidden // count for width, count, hidden in heads if width or count), default=None)


def window_of(config: Any) -> float:
    """The smallest number of tokens that a layer sees; infinity if all layers see all."""
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    return window if window and "window" in architecture_of(config).attention else float("inf")


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
    window, cap, sinks = rest.get("sliding_window"), rest.get("softcap"), rest.get("s_aux")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if packing.levels:  # no dropout there: `open_model` sets all of it to zero
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return tree_attention(q, k, v, packing.levels, scale)[None], None
    heads, width = query.shape[1], query.shape[3]
    if packing.alone:
        whole = Bucket(1, packing.longest, packing.longest, None)
        mask = whole.seen(window, query.device)
        return attend(query, key, value, mask, scale, dropout, cap, sinks).transpose(1, 2), None
    q_rows = _gather(_rows(query), packing.queries, packing.query_home, None)  # [sum S*Tq, H*D]
    kv_rows = _gather(  # [sum S*Tk, K*D + K*E]
        torch.cat([_rows(key), _rows(value)], dim=1), packing.keys, packing.key_home, packing.key_again
    )
    outputs = []
    q_parts = q_rows.split([bucket.segments * bucket.queries for bucket in packing.buckets])
    kv_parts = kv_rows.split([bucket.segments * bucket.keys for bucket in packing.buckets])
    of_keys = key.shape[1] * width
    for bucket, q, kv in zip(packing.buckets, q_parts, kv_parts, strict=True):
        k, v = (
            states.view(bucket.segments, bucket.keys, key.shape[1], -1).transpose(1, 2)  # [S, K, Tk, D or E]
            for states in (kv[:, :of_keys], kv[:, of_keys:])
        )
        q = q.view(bucket.segments, bucket.queries, heads, width).transpose(1, 2)  # [S, H, Tq, D]
        mixed = attend(q, k, v, bucket.seen(window, query.device), scale, dropout, cap, sinks)
        outputs.append(mixed.transpose(1, 2).reshape(bucket.segments * bucket.queries, -1))  # [S*Tq, H*E]
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _return(together, packing.query_home).view(1, -1, heads, value.shape[3]), None


def attend(
    query: Tensor,  # [S, H, Tq, D]
    key: Tensor,  # [S, K, Tk, D]
    value: Tensor,  # [S, K, Tk, E]
    mask: Tensor | None,  # bool, broadcast to [S, H, Tq, Tk]; None: causal
    scale: float,
    dropout: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # [S, H, Tq, E]
    """Attention with what some models add: scores s become cap * tanh(s / cap) (Gemma 2), and softmax has one more score for each head,
    `sinks` [H], that no value comes with (gpt-oss)."""
    grouped = query.shape[1] != key.shape[1]
    if cap is not None:
        return _capped(query, key, value, mask, scale, cap, sinks)
    if sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, scale, sinks)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Have one more key give each head its sink as score, so that torch's own kernels compute softmax: queries get one more number,
    sink / scale, by which this key has 1 and all others 0. Its value is zero."""
    rows, heads, queries, _ = query.shape
    more = (sinks.to(query.dtype) / scale).view(1, heads, 1, 1).expand(rows, heads, queries, 1)
    query = torch.cat([query, more], dim=3)
    key = torch.nn.functional.pad(key, (0, 1, 0, 1))
    key[:, :, -1, -1] = 1.0
    value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    seen = _causal(queries, query.device) if mask is None else mask
    return query, key, value, torch.nn.functional.pad(seen, (0, 1), value=True)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * (scale / cap))
    scores = scores.masked_fill(~(_causal(query.shape[2], query.device) if mask is None else mask), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return scores.float().softmax(dim=3).to(value.dtype)[..., : key.shape[2]] @ value


def _causal(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def _checked(module: torch.nn.Module, packing: Packing | None, rest: dict[str, Any]) -> Packing:
    if packing is None:
        raise TypeError("packed attention needs its layout: call the model with packing=pack(...)")
    window = rest.get("sliding_window")
    if packing.levels and window is not None and window < (longest := packing.longest):
        raise FitError(
            f"{longest} tokens in a sequence exceed the model's sliding window of {window}, which FlashAttention's kernels lack here.",
            remedy='Set trainer.attention = "padded".',
        )
    if rest.get("position_bias") is not None:
        raise FitError(
            f"{type(module).__name__} asks for 'position_bias' in its attention, which packed training lacks."
        )
    return packing


def register() -> None:
    AttentionInterface.register(NAME, packed_attention)


def _rows(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).flatten(1)  # [N, heads * D]
