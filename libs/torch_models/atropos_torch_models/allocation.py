"""How this process gets memory from the system and gives it back, with glibc. Has no effect with another C library.

By default glibc maps each large block anew. The kernel then fills it with zeros page by page, which took 4 of 14 CPU seconds in an
update of a model of 135 M parameters (1,008 packed tokens, fp32), and 8 of 10 ms in the sampling of 16 tokens of 49,152. It also
spreads blocks over one heap for each thread, which leaves gaps. Here blocks come from one heap that keeps what is freed, until it is
returned at once.

Gaps between blocks in use are often left empty. In two LoRA updates of 2,304 packed tokens (6 layers of width 576, fp32, one thread) memory
grew by 1,569 MB with the limit of 32 MiB, and by 1,103 MB with 4 MiB, which took 2 % more CPU time.
"""

from __future__ import annotations

import ctypes

LARGE = 10_000_000  # parameters from which this pays; a smaller model's blocks are not mapped one by one anyway
OWN_MAPPING_BYTES = 32 << 20  # larger blocks are mapped one by one, since a gap of that size would be expensive
ACTIVATION_BYTES = (
    4 << 20
)  # the same for a trainer, whose freed blocks lie between the activations that a backward pass needs
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_blocks(own_mapping_bytes: int = OWN_MAPPING_BYTES) -> None:
    """Keep freed blocks for the next ones. Only before other threads have allocated, since what is in their heaps stays there."""
    for name, value in (
        (_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, own_mapping_bytes), (_M_TRIM_THRESHOLD, (1 << 31) - 1)
    ):  # fmt: skip
        _called("mallopt", name, value)


def return_blocks() -> None:
    """Give all free pages back to the system, also those between blocks that are in use."""
    _called("malloc_trim", 0)


def _called(name: str, *values: int) -> None:
    try:
        getattr(ctypes.CDLL(None), name)(*values)
    except (OSError, AttributeError):
        return
