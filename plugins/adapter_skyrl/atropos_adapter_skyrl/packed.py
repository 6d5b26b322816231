"""A row as one message: a header of fixed size, then its columns as they are in memory. Reading it copies nothing."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_adapter_skyrl.rows import Row
from atropos_core.errors import DataError
from atropos_core.types import UNKNOWN_VERSION

MAGIC = b"SKR1"
_HEADER = struct.Struct(
    "<4sBBHIIIIdIi"
)  # magic, flags, finish bytes, 0, member, step, prompt, response, reward, metrics, oldest
_LOGPROBS, _ADVANTAGES, _LAST = 1, 2, 4
NEWEST = (1 << 31) - 1


class Place(NamedTuple):
    """Where a row belongs: a member of its group, a step of its trajectory. `oldest`: the lowest policy version that a
    trained token of it is of; NEWEST where none of them says."""

    member: int
    step: int
    oldest: int


def packed(row: Row, member: int, step: int) -> bytes:
    """`member` of its group, and `step` of its trajectory, say where the row belongs."""
    finish = row.finish.encode()
    metrics = json.dumps(dict(row.metrics)).encode() if row.metrics else b""
    flags = _LAST * row.last
    columns: list[NDArray[Any]] = [row.prompt, row.response, row.versions]
    for flag, column in ((_LOGPROBS, row.logprobs), (_ADVANTAGES, row.advantages)):
        if column is not None:
            flags |= flag
            columns.append(column)
    known = row.versions[row.trained]
    oldest = int(known[known != UNKNOWN_VERSION].min(initial=NEWEST))
    sizes = len(row.prompt), len(row.response)
    header = _HEADER.pack(MAGIC, flags, len(finish), 0, member, step, *sizes, row.reward, len(metrics), oldest)
    flat = [np.ascontiguousarray(one).data for one in columns]
    return b"".join((header, *flat, row.trained.tobytes(), finish, metrics))


def unpacked(data: bytes) -> tuple[Row, Place]:
    """The row, whose columns are views of `data`. Raises DataError for what is no row."""
    try:
        magic, flags, finish, _, member, step, prompts, size, reward, metrics, oldest = _HEADER.unpack_from(data)
        with_logprobs, with_advantages = bool(flags & _LOGPROBS), bool(flags & _ADVANTAGES)
        count = prompts + size * (2 + with_logprobs + with_advantages)
        at = _HEADER.size + 4 * count
        text = at + size
        if magic != MAGIC or len(data) != text + finish + metrics:
            raise ValueError(f"{len(data)} bytes that begin with {magic!r}")
        words = np.frombuffer(data, np.int32, count, _HEADER.size)
        begin = prompts + 2 * size
        row = Row(
            words[:prompts], words[prompts : prompts + size], np.frombuffer(data, np.bool_, size, at),
            words[begin : begin + size].view(np.float32) if with_logprobs else None, words[prompts + size : begin],
            reward, data[text : text + finish].decode(), bool(flags & _LAST),
            words[count - size :].view(np.float32) if with_advantages else None,
            json.loads(data[text + finish :]) if metrics else {},
        )  # fmt: skip
    except (struct.error, ValueError) as error:
        raise DataError(f"a worker sent what is no row: {error}") from error
    return row, Place(member, step, oldest)
