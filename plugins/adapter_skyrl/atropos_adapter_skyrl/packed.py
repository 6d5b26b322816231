"""A row as one message: a header of fixed size, then its columns as they are in memory. Reading it copies nothing."""

from __future__ import annotations

import json
import struct

import numpy as np

from atropos_adapter_skyrl.rows import Row
from atropos_core.codec import Buffer
from atropos_core.errors import DataError

MAGIC = b"SKR1"
_HEADER = struct.Struct(
    "<4sBBHIIIIdI4x"
)  # magic, flags, finish bytes, 0, member, step, prompt, response, reward, metrics bytes
_LOGPROBS, _ADVANTAGES, _LAST = 1, 2, 4


def packed(row: Row, member: int, step: int) -> list[Buffer]:
    """`member` of its group, and `step` of its trajectory, say where the row belongs."""
    finish = row.finish.encode()
    metrics = json.dumps(dict(row.metrics)).encode() if row.metrics else b""
    flags = _LAST * row.last
    columns: list[Buffer] = [
        np.ascontiguousarray(row.prompt, "<i4").data, np.ascontiguousarray(row.response, "<i4").data,
        np.ascontiguousarray(row.versions, "<i4").data,
    ]  # fmt: skip
    for flag, column in ((_LOGPROBS, row.logprobs), (_ADVANTAGES, row.advantages)):
        if column is not None:
            flags |= flag
            columns.append(np.ascontiguousarray(column, "<f4").data)
    columns += [np.ascontiguousarray(row.trained).view(np.uint8).data, finish, metrics]
    header = _HEADER.pack(
        MAGIC, flags, len(finish), 0, member, step, len(row.prompt), len(row.response), row.reward, len(metrics)
    )
    return [header, *columns]


def unpacked(data: bytes) -> tuple[Row, int, int]:
    """The row, whose columns are views of `data`, its member and its step. Raises DataError for what is no row."""
    try:
        magic, flags, finish, _, member, step, prompts, size, reward, metrics = _HEADER.unpack_from(data)
        words = prompts + size * (2 + bool(flags & _LOGPROBS) + bool(flags & _ADVANTAGES))
        trained = _HEADER.size + 4 * words
        if magic != MAGIC or len(data) != trained + size + finish + metrics:
            raise ValueError(f"{len(data)} bytes that begin with {magic!r}")
        at = _HEADER.size
        prompt = np.frombuffer(data, "<i4", prompts, at)
        at += 4 * prompts
        response = np.frombuffer(data, "<i4", size, at)
        at += 4 * size
        versions = np.frombuffer(data, "<i4", size, at)
        at += 4 * size
        logprobs = advantages = None
        if flags & _LOGPROBS:
            logprobs = np.frombuffer(data, "<f4", size, at)
            at += 4 * size
        if flags & _ADVANTAGES:
            advantages = np.frombuffer(data, "<f4", size, at)
        end = trained + size + finish
        row = Row(
            prompt, response, np.frombuffer(data, np.bool_, size, trained), logprobs, versions, reward,
            data[trained + size : end].decode(), bool(flags & _LAST), advantages,
            json.loads(data[end:]) if metrics else {},
        )  # fmt: skip
    except (struct.error, ValueError) as error:
        raise DataError(f"a worker sent what is no row: {error}") from error
    return row, member, step
