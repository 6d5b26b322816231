"""The rows of one group as one message: a header, a table of sizes, then each column of all rows as it is in memory.

Reading it copies nothing, and the fixed cost of a message is paid once for a group. Messages are checked column by column by the schema
of every entry to a run (`atropos_core.group_schema`): rows that pass can be trained.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_adapter_skyrl.rows import TrainingRow
from atropos_core.errors import DataError
from atropos_core.group_schema import (
    ID_BOUND,
    LARGEST_METRIC,
    LARGEST_REWARD,
    Named,
    TokenColumns,
    brief,
    check_metric_name,
    check_name,
    check_number,
    check_token_columns,
)
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import UNKNOWN_VERSION, Bools, Floats, Tokens, TurnRewards, Versions

MAGIC = b"SKR3"
PACK_BYTES = 1 << 20  # approximate size of the rows in one message: a slot of a worker
_HEADER = struct.Struct("<4sII")  # magic, rows, bytes of JSON
REWARD_AT = _HEADER.size  # of the first row
_REWARD, _TABLE = np.dtype("<f8"), np.dtype("<u4")
_COLUMNS = 5  # of the table: member, step, tokens of prompt and response, flags
_LOGPROBS, _ADVANTAGES, _LAST = 1, 2, 4
NEWEST = ID_BOUND - 1


class RowPosition(NamedTuple):
    """The place of a row: a member of its group, a step of its trajectory."""

    member: int
    step: int


class Pack(NamedTuple):
    """Rows that came together. `oldest` and `newest`: the policy versions of their trained tokens; NEWEST and
    UNKNOWN_VERSION if none of them has one."""

    rows: list[TrainingRow]
    positions: list[tuple[int, int]]  # member and step of each row
    oldest: int
    newest: int


def packs(trajectories: Sequence[Sequence[TrainingRow]]) -> Iterator[bytes]:
    """Messages for the rows of a group's trajectories, each of at most about PACK_BYTES, or of one row."""
    every = [row for rows in trajectories for row in rows]
    words = 2 + any(row.logprobs is not None for row in every) + any(row.advantages is not None for row in every)
    batch: list[tuple[TrainingRow, RowPosition]] = []
    size = 0
    for member, rows in enumerate(trajectories):
        for step, row in enumerate(rows):
            own = row.prompt.nbytes + len(row.response) * (4 * words + 1)
            if batch and size + own > PACK_BYTES:
                yield packed(batch)
                batch, size = [], 0
            batch.append((row, RowPosition(member, step)))
            size += own
    if batch:
        yield packed(batch)


def packed(placed: Sequence[tuple[TrainingRow, RowPosition]]) -> bytes:
    rows = [row for row, _ in placed]
    flags = [
        _LOGPROBS * (row.logprobs is not None) + _ADVANTAGES * (row.advantages is not None) + _LAST * row.last
        for row in rows
    ]
    table = [
        [place.member for _, place in placed], [place.step for _, place in placed],
        [len(row.prompt) for row in rows], [len(row.response) for row in rows], flags,
    ]  # fmt: skip
    columns = (
        [row.prompt for row in rows], [row.response for row in rows], [row.versions for row in rows],
        _filled_columns([row.logprobs for row in rows], table[3]), _filled_columns([row.advantages for row in rows], table[3]),
        [row.trained for row in rows],
    )  # fmt: skip
    other: dict[str, Any] = {"finish": [row.finish for row in rows]}
    if any(row.metrics for row in rows):
        other["metrics"] = [dict(row.metrics) for row in rows]
    if any(row.turns is not None for row in rows):
        other["turns"] = [row.turns and [row.turns.ends.tolist(), row.turns.values.tolist()] for row in rows]
    text = json.dumps(other).encode()
    return b"".join(
        (
            _HEADER.pack(MAGIC, len(rows), len(text)),
            np.array([row.reward for row in rows], _REWARD).data,
            np.array(table, _TABLE).data,
            *(np.concatenate(column).data for column in columns if column),
            text,
        )
    )


def _filled_columns(columns: Sequence[Floats | None], sizes: Sequence[int]) -> Sequence[Floats]:
    """The columns with zeros for rows that have none; empty if no row has one."""
    if all(column is None for column in columns):
        return ()
    return [
        np.zeros(size, np.float32) if column is None else column for column, size in zip(columns, sizes, strict=True)
    ]


def unpacked(data: bytes, vocabulary: int = 0) -> Pack:
    """The rows, whose columns are views of `data`. Raises DataError for malformed data, and for rows that must not be trained,
    with the field and the value. `vocabulary` 0: not known."""
    try:
        magic, count, text_bytes = _HEADER.unpack_from(data)
        if magic != MAGIC or not count:
            raise ValueError(f"{len(data)} bytes that begin with {magic!r}")
        rewards = np.frombuffer(data, _REWARD, count, REWARD_AT).tolist()
        table_at = REWARD_AT + _REWARD.itemsize * count
        table = np.frombuffer(data, _TABLE, _COLUMNS * count, table_at).reshape(_COLUMNS, count)
        members, steps, prompts, sizes, flags = table.tolist()
        reader = _Columns(data, table_at + table.nbytes)
        prompt, response, versions = reader.of(sum(prompts)), reader.of(size := sum(sizes)), reader.of(size)
        logprobs = reader.of(size).view(np.float32) if any(flag & _LOGPROBS for flag in flags) else None
        advantages = reader.of(size).view(np.float32) if any(flag & _ADVANTAGES for flag in flags) else None
        trained = np.frombuffer(data, np.bool_, size, reader.at)
        if len(data) != reader.at + size + text_bytes:
            raise ValueError(f"{len(data)} bytes, but {count} rows take {reader.at + size + text_bytes}")
        other = json.loads(data[len(data) - text_bytes :])
        finishes, metrics = other["finish"], other.get("metrics") or [{}] * count
        turns = other.get("turns") or [None] * count
        if not (
            type(finishes) is type(metrics) is type(turns) is list
            and len(finishes) == len(metrics) == len(turns) == count
        ):
            raise ValueError(f"{count} rows need as many finish reasons, metrics and turn rewards")
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"a worker sent malformed rows: {error}") from error
    positions = list(zip(members, steps, strict=True))
    if not (all(prompts) and all(sizes)):
        raise DataError("a worker sent a row without a prompt or without a reply")
    _check_values(rewards, finishes, metrics, positions)
    _check_columns(prompt, response, trained, logprobs, advantages, vocabulary, positions, prompts, sizes)
    placed = [_read_turn_rewards(*each) for each in zip(turns, sizes, positions, strict=True)]
    oldest, newest = _versions(versions, trained)
    spans = list(pairwise(accumulate(sizes, initial=0)))
    columns = (
        [prompt[begin:end] for begin, end in pairwise(accumulate(prompts, initial=0))],
        [response[begin:end] for begin, end in spans],
        [trained[begin:end] for begin, end in spans],
        _cut(logprobs, spans, flags, _LOGPROBS),
        [versions[begin:end] for begin, end in spans],
        rewards, finishes, [flag & _LAST > 0 for flag in flags],
        _cut(advantages, spans, flags, _ADVANTAGES),
        metrics, placed,
    )  # fmt: skip
    return Pack(list(map(TrainingRow._make, zip(*columns, strict=True))), positions, oldest, newest)


class _Columns:
    """Columns of four-byte words, one after another, starting at `at`."""

    def __init__(self, data: bytes, at: int) -> None:
        self.at = at
        self._data = data

    def of(self, length: int) -> NDArray[np.int32]:
        found = np.frombuffer(self._data, np.int32, length, self.at)
        self.at += found.nbytes
        return found


def _cut(
    column: Floats | None, spans: Sequence[tuple[int, int]], flags: Sequence[int], flag: int
) -> Sequence[Floats | None]:
    """Cut a column into the part of each row whose flag says that it has one."""
    if column is None:
        return [None] * len(spans)
    return [column[begin:end] if own & flag else None for (begin, end), own in zip(spans, flags, strict=True)]


def _check_values(
    rewards: Sequence[float], finishes: Sequence[Any], metrics: Sequence[Any], positions: Sequence[tuple[int, int]]
) -> None:
    for reward, finish, own, place in zip(rewards, finishes, metrics, positions, strict=True):
        if not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            check_number(f"{_row(place)}.reward", reward)
        if finish not in ("stop", "length"):
            check_name(f"{_row(place)}.finish", finish)
        if own:
            if not isinstance(own, Mapping):
                raise DataError(f"{_row(place)}.metrics is {brief(own)}: must be a mapping")
            for name, value in own.items():
                check_metric_name(name)
                check_number(f"{_row(place)}.metrics[{name!r}]", value, LARGEST_METRIC)


def _read_turn_rewards(given: Any, size: int, place: tuple[int, int]) -> TurnRewards | None:
    """Read a row's turn rewards. Raises DataError for those that are not in its response of `size` tokens."""
    if given is None:
        return None
    try:
        ends, values = given
        made = turn_rewards(ends, values)
    except (ValueError, TypeError, OverflowError, DataError) as error:
        raise DataError(f"{_row(place)}.turns are not turn rewards: {error}") from error
    if len(made.ends) and made.ends[-1] > size:
        raise DataError(f"{_row(place)}.turns end at token {made.ends[-1]}, but the response has {size} tokens")
    for value in made.values.tolist():
        check_number(f"{_row(place)}.turns", value)
    return made


def _check_columns(
    prompt: Tokens, response: Tokens, trained: Bools, logprobs: Floats | None, advantages: Floats | None, vocabulary: int,
    positions: Sequence[tuple[int, int]], prompts: Sequence[int], sizes: Sequence[int],
) -> None:  # fmt: skip
    """Check the columns of all rows at once."""
    if int(np.maximum.reduce(flags := trained.view(np.uint8))) > 1:
        at = int(flags.argmax())
        raise DataError(f"{_named('response', positions, sizes)('trained', at)} is {flags[at]}: a mask is 0 or 1")
    if int(np.maximum.reduce(prompt.view(np.uint32))) >= (vocabulary or ID_BOUND):  # the schema then finds the token
        unsampled = np.zeros(len(prompt), np.bool_)
        of_prompts = TokenColumns(prompt, unsampled, unsampled, None, None, None, None)
        check_token_columns(of_prompts, vocabulary, _named("prompt", positions, prompts))
    of_replies = TokenColumns(response, trained, trained, logprobs, None, advantages, None)
    check_token_columns(of_replies, vocabulary, _named("response", positions, sizes))


def _versions(versions: Versions, trained: Bools) -> tuple[int, int]:
    """The oldest and the newest version of trained tokens."""
    counted = versions if trained.all() else versions[trained]
    if not len(counted):
        return NEWEST, UNKNOWN_VERSION
    oldest, newest = int(np.minimum.reduce(counted)), int(np.maximum.reduce(counted))
    if oldest < UNKNOWN_VERSION:
        raise DataError(f"a worker sent tokens of policy version {oldest}, but versions start at 0")
    if oldest == UNKNOWN_VERSION:
        oldest = int(counted[counted != UNKNOWN_VERSION].min(initial=NEWEST))
    return oldest, newest


def _named(ids: str, positions: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Named:
    """Names for errors: the row, and the place in it. The schema's tokens are `ids` of a row."""

    def name_of(column: str, at: int) -> str:
        ends = list(accumulate(sizes))
        row = bisect_right(ends, at)
        return f"{_row(positions[row])}.{ids if column == 'tokens' else column}[{at - ends[row] + sizes[row]}]"

    return name_of


def _row(place: tuple[int, int]) -> str:
    return "member {}, step {}".format(*place)
