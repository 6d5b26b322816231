"""Seeds that derive from a position in a run, never from a time."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for this path under `seed`; the same on every machine and Python."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def of_replies(seed: int, n: int) -> list[int]:
    """Return the seed of each of `n` replies to one prompt. A single reply has the prompt's own seed."""
    return [seed] if n == 1 else [derive(seed, i) for i in range(n)]
