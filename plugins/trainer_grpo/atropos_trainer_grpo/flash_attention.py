"""Exact causal attention over a tree of packed segments, using only FlashAttention's kernels: no mask, no padding, and each key once.

A token sees its own segment up to itself, and the whole of each segment above it. Softmax over several parts is the softmax over each,
weighted by their normalisers: with l_i = log sum_j exp(s_ij) of part i, and l = log sum_i exp(l_i), the output is sum_i exp(l_i - l) o_i
(Hydragen, arXiv 2402.05099, for what sequences share; the online softmax of FlashAttention, arXiv 2205.14135). A kernel's backward pass
computes probabilities again, as exp(s - l). Given l and the output of all parts together, it returns each part's share of the gradient,
as in ring attention (arXiv 2310.01889).

One call attends each segment to itself. One more call for each level of the tree attends all that is below its segments to their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from atropos_core.errors import FitError

if TYPE_CHECKING:
    from atropos_trainer_grpo.packed_rows import Runs

WIDEST_HEAD = 256  # FlashAttention's own bound
LEAST_CAPABILITY = (8, 0)  # Ampere

_ops: Any = torch.ops.aten
State = tuple[Tensor, ...]  # what a kernel's backward pass needs in addition to its inputs and outputs


def tree_attention(query: Tensor, key: Tensor, value: Tensor, levels: Sequence[Runs], scale: float) -> Tensor:
    """Attend from `query` [N, H, D] to `key` and `value` [N, K, D], H a multiple of K. Returns [N, H, D]. `levels[0]` attends each segment
    to itself."""
    return cast("Tensor", _TreeAttention.apply(query, key, value, levels, scale))  # type: ignore[no-untyped-call]


def refuse(device: str, dtype: torch.dtype, head: int | None) -> str:
    """The reason why these kernels cannot be used; "" if they can."""
    if not device.startswith("cuda"):
        return ""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention computes in 16 bits on a GPU, and the model is in {str(dtype).removeprefix('torch.')}"
    if head is not None and head > WIDEST_HEAD:
        return f"FlashAttention takes heads of at most {WIDEST_HEAD} numbers, and the model's have {head}"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"FlashAttention needs a GPU of compute capability 8.0 or more, and {device} is a {torch.cuda.get_device_name(device)}"
    return ""


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, levels: Sequence[Runs], scale: float) -> Tensor:
        mixed, normaliser, state = _forward(query, key, value, levels[0], scale, causal=True)
        states = [state]
        whole = mixed if len(levels) == 1 else mixed.to(normaliser.dtype)  # parts add up in fp32
        for runs in levels[1:]:
            part, its, state = _forward(
                query[runs.queries], key[runs.keys], value[runs.keys], runs, scale, causal=False
            )
            states.append(state)
            before = normaliser[:, runs.queries]  # [H, R]
            both = torch.logaddexp(before, its)
            normaliser[:, runs.queries] = both
            weighted = whole[runs.queries] * _by_row(before - both)
            whole[runs.queries] = weighted.addcmul_(part, _by_row(its - both))
        mixed = whole.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, normaliser)
        ctx.levels, ctx.states, ctx.scale = levels, states, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, normaliser = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        given = (gradient, query, key, value, mixed, normaliser)
        into = _backward(given, ctx.levels[0], ctx.scale, ctx.states[0], causal=True)
        for runs, state in zip(ctx.levels[1:], ctx.states[1:], strict=True):
            rows, columns = runs.queries, runs.keys
            given = (
                gradient[rows], query[rows], key[columns], value[columns], mixed[rows], normaliser[:, rows].contiguous()
            )  # fmt: skip
            parts = _backward(given, runs, ctx.scale, state, causal=False)
            for whole, part, at in zip(into, parts, (rows, columns, columns), strict=True):
                whole.index_add_(0, at, part)
        return (*into, None, None)


def _by_row(logs: Tensor) -> Tensor:
    """[H, R] -> [R, H, 1]"""
    return logs.exp().t()[..., None]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, State]:
    """The output [R, H, D], the normalisers [H, R], and the kernel's state."""
    if query.device.type == "cuda":
        mixed, normaliser, *state, _ = _ops._flash_attention_forward(
            query,
            key,
            value,
            runs.query_ends,
            runs.key_ends,
            runs.longest_query,
            runs.longest_key,
            0.0,
            causal,
            False,
            scale=scale,
        )
        if normaliser.shape != (query.shape[1], len(query)):
            raise FitError(
                f"torch {torch.__version__} gives the normalisers of packed attention as {tuple(normaliser.shape)}.",
                remedy='Set trainer.attention = "padded".',
            )
        return mixed, normaliser, tuple(state)
    mixed = torch.empty_like(query)
    normaliser = query.new_empty(query.shape[1], len(query), dtype=_accumulated(query.dtype))
    for rows, columns in _each(runs):
        part, its = _ops._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(query, (query[rows], key[columns], value[columns])), 0.0, causal, scale=scale
        )
        mixed[rows], normaliser[:, rows] = part[0].transpose(0, 1), its[0]
    return mixed, normaliser, ()


def _backward(
    given: tuple[Tensor, ...], runs: Runs, scale: float, state: State, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """From gradient, query, key, value, output and normalisers, return the gradients of query, key and value."""
    gradient, query, key, value, mixed, normaliser = given
    if query.device.type == "cuda":
        return cast(
            "tuple[Tensor, Tensor, Tensor]",
            _ops._flash_attention_backward(
                gradient, query, key, value, mixed, normaliser, runs.query_ends, runs.key_ends, runs.longest_query, runs.longest_key,
                0.0, causal, *state, scale=scale,
            ),
        )  # fmt: skip
    into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for rows, columns in _each(runs):
        each = _heads_first(query, (gradient[rows], query[rows], key[columns], value[columns], mixed[rows]))
        parts = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *each, normaliser[None, :, rows].contiguous(), 0.0, causal, scale=scale
        )
        for whole, part, at in zip(into, parts, (rows, columns, columns), strict=True):
            heads = whole.shape[1]
            whole[at] = part[0].transpose(0, 1).unflatten(1, (heads, -1)).sum(dim=2)
    return into


def _heads_first(query: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """[R, K, D] -> [1, H, R, D]: the kernel of CPUs takes as many keys as queries."""
    for tensor in tensors:
        yield tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1).transpose(0, 1)[None]


def _each(runs: Runs) -> Iterator[tuple[slice, slice]]:
    ends = zip(pairwise(runs.query_ends.tolist()), pairwise(runs.key_ends.tolist()), strict=True)
    yield from ((slice(*rows), slice(*columns)) for rows, columns in ends)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
