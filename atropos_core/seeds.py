"""Seeds that derive from where something stands in a run, never from when it happened."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed for this place under `seed`; the same on every machine and Python."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def of_replies(seed: int, n: int) -> list[int]:
    """The seed of each of `n` replies to one prompt. One alone has the prompt's own."""
    return [seed] if n == 1 else [derive(seed, i) for i in range(n)]
