"""Groups that say of themselves who they are and whether they are whole.

A unit is what one put, or one POST, carries: `of` sequences that share a serial number. Each sequence holds the serial,
its own place, `of`, noise that follows from serial and place, and a checksum over all of it. atroposlib's clients may
send pieces, so one group in the hub may hold several units.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task

SERIALS = 1_000_000  # of each producer
MASK = 0x7FFFFFFF
VERSION = np.int32(0)


def sequence(serial: int, place: int, of: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[length]"""
    made = np.empty(length, np.int32)
    made[:3] = serial, place, of
    made[3:-1] = np.random.default_rng((serial, place)).integers(0, MASK, length - 4)
    made[-1] = zlib.crc32(made[:-1].tobytes()) & MASK
    return made


def native_unit(environment: str, serial: int, of: int, length: int) -> ScoredGroup:
    sampled = np.ones(length, bool)
    sampled[0] = False
    episodes = []
    for place in range(of):
        tokens = sequence(serial, place, of, length)
        logprobs = np.where(sampled, logprobs_of(tokens), np.float32(0))
        rollout = Rollout(tokens, sampled, sampled, logprobs, np.full(length, VERSION), 1.0)
        episodes.append(Episode((rollout,), float(place)))
    rewards = np.arange(of, dtype=np.float32)
    return ScoredGroup(Draw(-1, environment, "train", serial, serial), Task(str(serial), ()), tuple(episodes), rewards)


def old_unit(serial: int, of: int, length: int, env_id: int) -> dict[str, Any]:
    """As BaseEnv posts it."""
    rows = [sequence(serial, place, of, length) for place in range(of)]
    return {
        "tokens": [row.tolist() for row in rows],
        "masks": [[-100, *row[1:].tolist()] for row in rows],
        "scores": [float(place) for place in range(of)],
        "inference_logprobs": [[1.0, *logprobs_of(row)[1:].tolist()] for row in rows],
        "env_id": env_id,
    }


def logprobs_of(tokens: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[T], exact in float32 and in JSON."""
    made: np.ndarray[Any, np.dtype[np.float32]] = (tokens % 97).astype(np.float32) / np.float32(-16)
    return made


def serials_of(group: ScoredGroup) -> list[int]:
    """The serials of its units. Raises ValueError where a sequence is not as it was made, or a unit is not complete."""
    positions: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for episode, reward in zip(group.episodes, group.rewards, strict=True):
        (rollout,) = episode.rollouts
        tokens = rollout.tokens
        serial, place, of = (int(number) for number in tokens[:3])
        whole = (
            zlib.crc32(tokens[:-1].tobytes()) & MASK == int(tokens[-1])
            and rollout.logprobs is not None
            and np.array_equal(rollout.logprobs[1:], logprobs_of(tokens)[1:])
            and rollout.sampled.tolist() == [False] + [True] * (len(tokens) - 1)
            and float(reward) == place
        )
        if not whole:
            raise ValueError(f"sequence {place} of unit {serial} is torn")
        positions.setdefault(serial, []).append(place)
        sizes[serial] = of
    for serial, found in positions.items():
        if sorted(found) != list(range(sizes[serial])):
            raise ValueError(f"unit {serial} has sequences {found} of {sizes[serial]}")
    return list(positions)
