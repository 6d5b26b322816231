"""Random numbers by position: the same for draw i in every run with one seed, however many are requested at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(key: int, positions: NDArray[np.int64], stream: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """In [0, 1), 53 bits, for each place of a stream under `key`: SplitMix64 (Steele et al. 2014) of their number."""
    at = np.asarray(positions, np.uint64) * np.uint64(64) + np.asarray(stream, np.uint64)  # 64 streams
    mixed = np.uint64(key) + (at + np.uint64(1)) * GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
