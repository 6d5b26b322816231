"""Check proposed tokens with the right probabilities inside vLLM's worker (part of `--worker-extension-cls`).

vLLM 0.32 has two faults that matter here. It gives every proposed token the temperature, top_p and top_k of its request
(`expand_batch_to_tokens`); its kernel for CPUs takes only 64-bit integers and writes others into a copy, so that they stay uninitialized
memory. On any device, the worker dies of a top_k in a step without proposals, as it looks for the largest of no values
(`apply_top_k_top_p`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

OPEN = "atropos_open_speculation"


class SpeculationWorker:
    """A mixin for vLLM's worker class; `/collective_rpc` calls its method by OPEN."""

    device: Any

    def atropos_open_speculation(self) -> None:
        """Repair both functions. May be called again."""
        from vllm.v1.sample import rejection_sampler

        if not isinstance(own := rejection_sampler.apply_top_k_top_p, partial):
            rejection_sampler.apply_top_k_top_p = partial(cut, own)
        if str(self.device).startswith("cpu"):
            rejection_sampler.expand_batch_to_tokens = repeat_for_tokens


def cut(own: Callable[[Any, Any, Any], Any], logits: Any, top_k: Any, top_p: Any) -> Any:
    """Do what vLLM's own function does, and nothing for no rows."""
    return own(logits, top_k, top_p) if len(logits) else logits


def repeat_for_tokens(values: Any, ends: Any, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """Return [tokens]: the values [R] of requests, once for each token of the request. `ends` [R] are the cumulative numbers of tokens. A
    value of `replace_from` becomes `replace_to`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=tokens)
