"""Rows of one group as one message: a header, a table of their sizes, then each column of all of them as it is in memory.

Reading it copies nothing, and what is paid for each message is paid once for a group.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_adapter_skyrl.rows import Row
from atropos_core.errors import DataError
from atropos_core.types import UNKNOWN_VERSION

MAGIC = b"SKR2"
PACK_BYTES = 1 << 20  # of rows in one message, about: a slot of a worker
_HEADER = struct.Struct("<4sIIi")  # magic, rows, bytes of JSON, oldest
REWARD_AT = _HEADER.size  # of the first row
_REWARD, _TABLE = np.dtype("<f8"), np.dtype("<u4")
_COLUMNS = 5  # of the table: member, step, tokens of prompt and response, flags
_LOGPROBS, _ADVANTAGES, _LAST = 1, 2, 4
NEWEST = (1 << 31) - 1


class Place(NamedTuple):
    """Where a row belongs: a member of its group, a step of its trajectory."""

    member: int
    step: int


class Pack(NamedTuple):
    """Rows that came together. `oldest`: the lowest policy version that a trained token of them is of; NEWEST where none of
    them says."""

    rows: list[tuple[Row, Place]]
    oldest: int


def packs(trajectories: Sequence[Sequence[Row]]) -> Iterator[bytes]:
    """Messages for the rows of a group's trajectories, each of about PACK_BYTES at most, or of one row."""
    batch: list[tuple[Row, Place]] = []
    size = 0
    for member, rows in enumerate(trajectories):
        for step, row in enumerate(rows):
            if batch and size + row.size_bytes > PACK_BYTES:
                yield packed(batch)
                batch, size = [], 0
            batch.append((row, Place(member, step)))
            size += row.size_bytes
    if batch:
        yield packed(batch)


def packed(placed: Sequence[tuple[Row, Place]]) -> bytes:
    rows = [row for row, _ in placed]
    flags = [
        _LOGPROBS * (row.logprobs is not None) + _ADVANTAGES * (row.advantages is not None) + _LAST * row.last
        for row in rows
    ]
    table = [
        [place.member for _, place in placed], [place.step for _, place in placed],
        [len(row.prompt) for row in rows], [len(row.response) for row in rows], flags,
    ]  # fmt: skip
    words = (
        [row.prompt for row in rows], [row.response for row in rows], [row.versions for row in rows],
        [row.logprobs for row in rows if row.logprobs is not None],
        [row.advantages for row in rows if row.advantages is not None],
    )  # fmt: skip
    versions, trained = np.concatenate(words[2]), np.concatenate([row.trained for row in rows])
    oldest = int(versions[trained & (versions != UNKNOWN_VERSION)].min(initial=NEWEST))
    said: dict[str, Any] = {"finish": [row.finish for row in rows]}
    if any(row.metrics for row in rows):
        said["metrics"] = [dict(row.metrics) for row in rows]
    text = json.dumps(said).encode()
    return b"".join(
        (
            _HEADER.pack(MAGIC, len(rows), len(text), oldest),
            np.array([row.reward for row in rows], _REWARD).data,
            np.array(table, _TABLE).data,
            _flat(words[0]), _flat(words[1]), versions.data, _flat(words[3]), _flat(words[4]), trained.data, text,
        )
    )  # fmt: skip


def _flat(columns: Sequence[NDArray[Any]]) -> bytes | memoryview:
    return np.concatenate(columns).data if columns else b""


def unpacked(data: bytes) -> Pack:
    """The rows, whose columns are views of `data`. Raises DataError for what is none."""
    try:
        magic, count, text, oldest = _HEADER.unpack_from(data)
        if magic != MAGIC or not count:
            raise ValueError(f"{len(data)} bytes that begin with {magic!r}")
        at = REWARD_AT + _REWARD.itemsize * count
        rewards = np.frombuffer(data, _REWARD, count, REWARD_AT).tolist()
        table = np.frombuffer(data, _TABLE, _COLUMNS * count, at).reshape(_COLUMNS, count)
        at += table.nbytes
        members, steps, prompts, sizes, flags = table.tolist()
        with_logprobs, with_advantages = (table[3, table[4] & flag > 0] for flag in (_LOGPROBS, _ADVANTAGES))
        lengths = [sum(prompts), sum(sizes), sum(sizes), int(with_logprobs.sum()), int(with_advantages.sum())]
        total = sum(lengths)
        if len(data) != at + 4 * total + lengths[1] + text:
            raise ValueError(
                f"{len(data)} bytes, where {count} rows of {total} words are {at + 4 * total + lengths[1] + text}"
            )
        prompt, response, version, *floats = np.split(np.frombuffer(data, np.int32, total, at), np.cumsum(lengths[:-1]))
        logprob, advantage = (one.view(np.float32) for one in floats)
        trained = np.frombuffer(data, np.bool_, lengths[1], at + 4 * total)
        said = json.loads(data[len(data) - text :])
        finishes, metrics = said["finish"], said.get("metrics") or [{}] * count
        rows = []
        p = r = known_at = values_at = 0
        for member, step, ahead, size, flag, reward, finish, own in zip(
            members, steps, prompts, sizes, flags, rewards, finishes, metrics, strict=True
        ):
            q, s = p + ahead, r + size
            known = values = None
            if flag & _LOGPROBS:
                known = logprob[known_at : known_at + size]
                known_at += size
            if flag & _ADVANTAGES:
                values = advantage[values_at : values_at + size]
                values_at += size
            row = Row(
                prompt[p:q],
                response[r:s],
                trained[r:s],
                known,
                version[r:s],
                reward,
                finish,
                flag & _LAST > 0,
                values,
                own,
            )
            rows.append((row, Place(member, step)))
            p, r = q, s
    except (struct.error, ValueError, LookupError, TypeError) as error:
        raise DataError(f"a worker sent what are no rows: {error}") from error
    return Pack(rows, oldest)


def rows_in(found: Iterable[Pack]) -> list[tuple[Row, Place]]:
    return [one for pack in found for one in pack.rows]
