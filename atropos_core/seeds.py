"""Seeds that derive from where something stands in a run, never from when it happened."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed for this place under `seed`; the same on every machine and Python."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
