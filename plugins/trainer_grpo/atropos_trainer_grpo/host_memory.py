"""How much page-locked host memory torch takes for a tensor: the next power of two, which it keeps for another of that size
(CachingHostAllocator.h of torch 2.13)."""

from __future__ import annotations

# Bytes. What is large and does not last lies in pieces of that many, of which only the last is rounded up.
PIECE = 1 << 24


def page_locked(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def in_pieces(size: int) -> int:
    whole, rest = divmod(size, PIECE)
    return whole * PIECE + page_locked(rest)
