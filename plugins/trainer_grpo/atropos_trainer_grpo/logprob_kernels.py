"""Triton kernels of the language-model head on a GPU: each logit is read once forward, and once backward.

Logits come from the matrix product in the model's dtype and are never there in fp32: each lane of a program holds a running maximum of its
row, and the sum and the weighted sum of what is below it, in fp32 (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). The
gradient takes the place of the logits. With TRITON_INTERPRET=1 the same kernels run on a CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def scored(logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """From logits [R, V] / temperature, return the logprobs of `targets` i64[R] and the entropy in nats, each f32[R], and the normalisers
    f32[2, R]: the maximum, and the log sum exp relative to it. Both are kept, since their sum is as coarse as the logits are large."""
    rows, vocabulary = logits.shape
    logprobs, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    normaliser = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    score_kernel[(rows,)](
        logits, logits.stride(0), targets, targets if temperature is None else temperature, logprobs, entropy, normaliser,
        vocabulary, TEMPERED=temperature is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logprobs, entropy, normaliser


def turn_into_gradient(
    logits: Tensor,  # [R, V], and the gradient once this returns
    targets: Tensor,  # i64[R]
    temperature: Tensor | None,
    normaliser: Tensor,  # f32[2, R], as `scored` gives it
    entropy: Tensor,  # f32[R]
    of_logprobs: Tensor | None,  # what comes back to the logprobs, f32[R]
    of_entropy: Tensor | None,  # and to the entropy
) -> None:
    """d logprob[target] / d logits = 1[target] - p, and d H / d logits = -p (log p + H); both over the temperature."""
    rows, vocabulary = logits.shape
    gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, logits.stride(0), targets, targets if temperature is None else temperature, normaliser, entropy,
        normaliser if of_logprobs is None else of_logprobs.contiguous(),
        normaliser if of_entropy is None else of_entropy.contiguous(),
        vocabulary, TEMPERED=temperature is not None, OF_LOGPROBS=of_logprobs is not None, OF_ENTROPY=of_entropy is not None,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def score_kernel(
    logits, stride, targets, temperature, logprobs, entropy, normaliser, vocabulary,
    TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    by = 1.0 / tl.load(temperature + row).to(tl.float32) if TEMPERED else 1.0
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + lanes
        z = tl.load(begin + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * by
        higher = tl.maximum(highest, z)
        fell = tl.where(total > 0, highest - higher, 0.0)
        over = tl.where(z > float("-inf"), z - higher, float("-inf"))  # a lane may have seen nothing but -inf
        added = tl.exp(over)
        weighted = (weighted + total * fell) * tl.exp(fell) + tl.where(added > 0, added * over, 0.0)
        total = total * tl.exp(fell) + added
        highest = higher
    top = tl.max(highest, axis=0)
    fell = tl.where(total > 0, highest - top, 0.0)
    whole = tl.sum(total * tl.exp(fell), axis=0)
    mean = tl.sum((weighted + total * fell) * tl.exp(fell), axis=0) / whole  # of what a logit is below the highest
    log_sum = tl.log(whole)
    tl.store(normaliser + row, top)
    tl.store(normaliser + tl.num_programs(0) + row, log_sum)
    tl.store(entropy + row, log_sum - mean)
    tl.store(logprobs + row, tl.load(begin + tl.load(targets + row)).to(tl.float32) * by - top - log_sum)


@triton.jit
def gradient_kernel(
    logits, stride, targets, temperature, normaliser, entropy, of_logprobs, of_entropy,
    vocabulary, TEMPERED: tl.constexpr, OF_LOGPROBS: tl.constexpr, OF_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < vocabulary
    places = logits + row * stride + at
    by = 1.0 / tl.load(temperature + row).to(tl.float32) if TEMPERED else 1.0
    top, log_sum = tl.load(normaliser + row), tl.load(normaliser + tl.num_programs(0) + row)
    log_p = tl.load(places, mask=within, other=float("-inf")).to(tl.float32) * by - top - log_sum
    p = tl.exp(log_p)
    back = tl.zeros((BLOCK,), tl.float32)
    if OF_LOGPROBS:
        is_target = at == tl.load(targets + row)
        back += tl.load(of_logprobs + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if OF_ENTROPY:
        back -= tl.load(of_entropy + row) * tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
    tl.store(places, (back * by).to(logits.dtype.element_ty), mask=within)
