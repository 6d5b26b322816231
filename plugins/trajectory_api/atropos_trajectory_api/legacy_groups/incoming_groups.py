"""Read and check what an old client sends, and write the JSON that goes back.

If all values of a body have the right types, it is read the fast way. Other bodies go through `ScoredData` first, which coerces
values as the old server did.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, FailFast, Field, ValidationError, field_validator

from atropos_core import console
from atropos_core.errors import DataError
from atropos_core.types import Floats, ScoredGroup, Tokens, offsets_of
from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS, MASKED, to_wire
from atropos_trajectory_api.legacy_groups.stored_group import VERBATIM, OldGroup
from atropos_trajectory_api.legacy_groups.wire_json import dumps, parse, without_arrays
from atropos_trajectory_api.legacy_groups.wire_lists import (
    NOT_OF_ITS_TYPE,
    FlatRows,
    by_token,
    counted,
    floats,
    index_of,
    ints,
    lengths_of,
    lists,
    name_what_overflows,
    path_of,
    tokens_of,
    types_of,
)

__all__ = ["KEYS", "ScoredData", "dumps", "from_wire", "parse", "read", "to_wire"]

_T = TypeVar("_T")
MAX_DEPTH = 64  # of lists and objects in fields that the old protocol leaves to its clients

MOST_WARNED = 1000
_WARNED: set[str] = set()  # environments whose advantages were ignored

_COLUMNS = ("advantages", "ref_logprobs", "inference_logprobs")
_NO_TEACHER = [None, None]
_TEACHER = ("distill_token_ids", "distill_logprobs")
_SAID = ("messages", *VERBATIM)


class _First(FailFast):
    """For a list: name its first wrong entry, and do not look further. It must be hashable for a union."""

    __hash__ = object.__hash__


_FIRST = _First()
Row = Annotated[list[_T], _FIRST]
Rows = Annotated[list[Row[_T]], _FIRST]


class ScoredData(BaseModel):
    """One group in the old protocol: a list for each sequence, with an entry for each token."""

    tokens: Rows[int] = Field(description="Prompt and completion ids of each sequence.")
    masks: Rows[int] = Field(description="For each token: its id, or -100 if the loss does not count it.")
    scores: Row[float] = Field(description="One for each sequence.")
    advantages: Rows[float] | None = Field(None, description="For each token; they replace those from scores.")
    ref_logprobs: Rows[float] | None = Field(None, description="For each token, of a reference model.")
    messages: Rows[dict[str, Any]] | None = Field(None, description="Each with `role` and `content`.")
    generation_params: dict[str, Any] | None = Field(None, description="`temperature` is read.")
    inference_logprobs: Rows[float] | None = Field(None, description="For each token; 1.0 if it is masked.")
    overrides: Row[dict[str, Any]] | None = Field(
        None, description="For each sequence: `set_advantage_to_zero`, `temperature`, `sft`."
    )
    group_overrides: dict[str, Any] | None = Field(None, description="`temperature` and `sft` are read.")
    images: Any | None = None
    env_id: int | None = Field(None, description="As /register-env gave it.")
    distill_token_ids: Rows[Row[int]] | None = Field(None, description="A teacher's likeliest tokens at each token.")
    distill_logprobs: Rows[Row[float]] | None = Field(None, description="Their logprobs, in the same shape.")

    @field_validator("messages", mode="after")
    @classmethod
    def _messages_say_who_and_what(cls, value: Rows[dict[str, Any]] | None) -> list[list[dict[str, Any]]] | None:
        if any("role" not in one or "content" not in one for one in chain.from_iterable(value or ())):
            raise ValueError("a message must have 'role' and 'content'")
        return value


def from_wire(data: Any, *, environment: str, version: int | None) -> ScoredGroup:
    """The group that an old client sent, as sampled from policy `version` at best. Its draw belongs to no trainer.

    A token is trained if its mask is its own id. Raises DataError that names the field and the index.
    """
    return read(data, environment).group(version)


def read(data: Any, environment: str) -> OldGroup:
    """The group in the form in which the hub keeps it."""
    try:
        return _read(data, environment)
    except NOT_OF_ITS_TYPE:  # a value of the wrong type, which may be coercible
        pass
    try:
        coerced = ScoredData.model_validate(without_arrays(data)).__dict__
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise DataError(
            f"{path_of(first['loc'])}: {first['msg']}",
            remedy="The server's /openapi.json describes each field of a group.",
        ) from None
    try:
        return _read(coerced, environment)
    except (OverflowError, struct.error):
        name_what_overflows(coerced)


def _read(data: Mapping[str, Any], environment: str) -> OldGroup:
    """Raises one of `NOT_OF_ITS_TYPE` for a value of the wrong type, DataError for what coercion cannot fix."""
    if type(data) is not dict or not ("tokens" in data and "masks" in data and "scores" in data):
        raise TypeError
    rows = data["tokens"]
    lengths = lengths_of(rows)
    if not lengths or not all(lengths):
        raise DataError(f"tokens{path_of((lengths.index(0),)) if lengths else ''}: a sequence needs at least one token")
    tokens, masks, sampled = tokens_of(rows, data["masks"], lengths)
    rest: dict[str, Any] = {"env_id": data.get("env_id")}
    if type(rest["env_id"]) not in (int, type(None)):
        raise TypeError
    if np.count_nonzero(sampled) + np.count_nonzero(masks == MASKED) < len(
        masks
    ):  # no token is MASKED, so none is counted twice
        if type(data["masks"]) is FlatRows:
            raise TypeError
        rest["masks"] = [list(map(int, row)) for row in data["masks"]]
    scores = list(map(float, _as_numbers(counted("scores", data["scores"], len(lengths)))))
    columns: dict[str, Floats] = {}
    for name in _COLUMNS:
        given = data.get(name)
        if name == "advantages" and given and _differ_in_length(given, lengths):
            rest[name] = _ignored(given, environment)
        elif given:
            columns[name] = floats(by_token(name, given, lengths))
        elif given is not None:  # an empty list has no meaning, and is returned unchanged
            rest[name] = lists(given)
    teacher = _teacher(data, rest, lengths)
    if (messages := data.get("messages")) is not None:
        _check_messages(messages)
    for key in _SAID:
        if (said := data.get(key)) is not None:
            _bounded(key, said)
            rest[key] = said
    group = OldGroup(environment, lengths, tokens, sampled, scores, columns, teacher, rest)
    group.check()
    return group


def _differ_in_length(rows: Any, lengths: list[int]) -> bool:
    return lengths_of(rows) != lengths


def _ignored(rows: Any, environment: str) -> list[list[float]]:
    """atroposlib accepts advantages of any length, and its trainers do not read them; its clients drop a group that is refused."""
    if type(rows) is FlatRows or any(type(row) is not list for row in rows):
        raise TypeError  # read them again as lists
    kept = [_as_numbers(row) for row in rows]
    _bounded("advantages", kept)
    if environment not in _WARNED and len(_WARNED) < MOST_WARNED:
        _WARNED.add(environment)
        console.warn(
            f"environment {environment!r} sends advantages that are not one for each token: they are ignored, and those from its "
            "scores are trained. This is reported once."
        )
    return kept


def _as_numbers(scores: list[Any]) -> list[Any]:
    if types_of(scores) - {float, int, bool}:
        raise TypeError
    return scores


def _teacher(
    data: Mapping[str, Any], rest: dict[str, Any], lengths: Sequence[int]
) -> tuple[NDArray[np.int64], Tokens, Floats] | None:
    names = _TEACHER
    given = [data.get(name) for name in names]
    if given == _NO_TEACHER:
        return None
    if not any(given):
        rest |= {name: lists(rows) for name, rows in zip(names, given, strict=True) if rows is not None}
        return None
    if not all(given):
        raise DataError(f"{names[not given[1]]} is missing: the two fields of a teacher go together")
    positions = [
        lists(list(chain.from_iterable(by_token(name, rows, lengths)))) for name, rows in zip(names, given, strict=True)
    ]
    counts = [list(map(len, rows)) for rows in positions]
    if counts[0] != counts[1]:
        differ = np.asarray(counts[0]) != np.asarray(counts[1])
        where = index_of(offsets_of(lengths), int(differ.argmax()))
        raise DataError(f"distill_logprobs{where}: as many as distill_token_ids{where} are needed")
    at = offsets_of(counts[0])
    ids = ints([list(chain.from_iterable(positions[0]))])
    logprobs = floats([list(chain.from_iterable(positions[1]))])
    for name, values, wrong in zip(names, (ids, logprobs), (ids < 0, ~np.isfinite(logprobs)), strict=True):
        if wrong.any():
            where = index_of(offsets_of(lengths), int(np.searchsorted(at, wrong.argmax(), "right")) - 1)
            raise DataError(f"{name}{where}: {values[wrong.argmax()]} is refused")
    return at, ids, logprobs


def _check_messages(given: Any) -> None:
    every = list(chain.from_iterable(lists(given)))
    if types_of(every) - {dict} or not all("role" in one and "content" in one for one in every):
        raise TypeError


def _bounded(name: str, value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise DataError(f"{name}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{name}: {value} is not a finite number")
    if isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            if isinstance(entry, (dict, list, float)):
                _bounded(name, entry, depth + 1)
