"""How many rows of logits exist at once: one rule for the head that makes them and for the plan that counts them."""

from __future__ import annotations

LOGITS = (1 << 24, 1 << 27)  # that a chunk holds at most, on a CPU and elsewhere: 64 and 512 MiB in fp32
LOGITS_IN_ONE_PASS = 1 << 28  # 512 MiB in 16 bits
LEAST_ROWS = 64  # below these the products of a chunk with the head wait for its weights


def in_one_pass(device: str, double: bool, more: bool) -> bool:
    """Return True if Triton kernels process the logits, which then exist once and in the model's dtype: on a GPU, not in float64, and
    not with `more`: logprobs of other tokens than the targets, or a distribution over kept tokens."""
    return device != "cpu" and not double and not more


def rows_at_once(chunk: int, vocabulary: int, device: str, *, one_pass: bool = False) -> int:
    """Return `chunk`, or fewer rows if the vocabulary is so large that their logits would fill the memory."""
    most = LOGITS_IN_ONE_PASS if one_pass else LOGITS[device != "cpu"]
    return min(chunk, max(LEAST_ROWS, most // vocabulary))
