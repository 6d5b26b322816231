"""The arithmetic of one update, and what a plain product of two matrices reaches on the same device.

Model FLOPs utilization is the first over the time of the update, divided by the second (PaLM, arXiv 2204.02311, appendix B).
Activations that are computed again are not counted. Unlike there, attention is counted over the keys that a token sees, and the head
over the tokens that are scored. What sequences share is counted once if it is computed once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_core.types import Batch

SIZE = {"cuda": 8192, "cpu": 512}  # of the square matrices
REPEATS = 10


@dataclass(frozen=True)
class Counts:
    """The tokens that go through the model in one update."""

    tokens: int
    keys: int  # that all tokens see together; a token sees itself
    scored: int  # rows of the head


def counts_of(batch: Batch, *, share: bool) -> Counts:
    from atropos_trainer_grpo.packed_rows import pack

    packing = pack(batch.tokens, np.diff(batch.offsets), share=share, attention="flash")
    scored = len(np.unique(packing.slots[batch.sampled]))
    return Counts(packing.tokens.numel(), int((packing.positions + 1).sum()), scored)


def update_flops(shape: dict[str, Any], counts: Counts, rank: int = 0) -> int:
    """FLOPs of the forward and backward pass of a Qwen3 of this shape; with a `rank`, of LoRA adapters on all linear layers but the head.

    A product of [m, k] and [k, n] has 2 m k n. A trained matrix has three of them: output, gradient of the input, its own gradient.
    A frozen one has no gradient, and below the first adapters no input has one. Attention has two products forward and four backward."""
    hidden, inner, layers = (shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, shared = (
        shape["head_dim"] * shape[name] for name in ("num_attention_heads", "num_key_value_heads")
    )  # widths
    first = [(hidden, heads), (hidden, shared), (hidden, shared)]
    linear = [*first, (heads, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    weights = layers * sum(one * other for one, other in linear)
    attention = 6 * 2 * layers * heads * counts.keys
    head = 2 * hidden * shape["vocab_size"] * counts.scored
    if not rank:
        return 3 * 2 * weights * counts.tokens + attention + 3 * head
    adapters = layers * rank * sum(one + other for one, other in linear)
    below = sum(one * (other + rank) for one, other in first)
    return 2 * (2 * weights + 3 * adapters - below) * counts.tokens + attention + 2 * head


def product_flops_s(device: str) -> float:
    """FLOP/s of a bfloat16 product of two square matrices."""
    import torch

    size = SIZE["cpu" if device == "cpu" else "cuda"]
    one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        made = one @ other
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    del made
    return 2 * size**3 / statistics.median(seconds)
