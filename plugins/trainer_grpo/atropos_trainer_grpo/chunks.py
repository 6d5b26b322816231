"""How many rows of logits exist at once: one rule for the head that makes them and for the plan that counts them."""

from __future__ import annotations

LOGITS = (1 << 24, 1 << 27)  # that a chunk holds at most, on a CPU and elsewhere: 64 and 512 MiB in fp32
LEAST_ROWS = 64  # below these the products of a chunk with the head wait for its weights


def rows_at_once(chunk: int, vocabulary: int, device: str) -> int:
    """`chunk`, or fewer where the vocabulary is so large that their logits would be what fills the memory."""
    return min(chunk, max(LEAST_ROWS, LOGITS[device != "cpu"] // vocabulary))
