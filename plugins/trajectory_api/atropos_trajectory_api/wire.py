"""What an old Atropos client sends -> ScoredGroup, and the JSON that goes back.

A body whose values are already of their types takes the fast way; any other goes through `ScoredData` first, which
coerces as the old server did. Masks and sentinels of the old protocol end here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any
from zlib import crc32

import numpy as np
from pydantic import BaseModel, Field, ValidationError, field_validator

from atropos_core.errors import DataError
from atropos_core.types import (
    UNKNOWN_VERSION,
    Bools,
    Draw,
    Episode,
    Floats,
    Rollout,
    ScoredGroup,
    Task,
    TopK,
    offsets_of,
)
from atropos_core.wire import KEYS, MASKED, MASKED_LOGPROB, NO_LOGPROB, to_wire
from atropos_trajectory_api.wire_json import dumps, parse
from atropos_trajectory_api.wire_lists import (
    NOT_OF_ITS_TYPE,
    as_floats,
    counted,
    flat,
    floats,
    index_of,
    ints,
    lists,
    name_what_overflows,
    path_of,
    refuse,
    types_of,
)

__all__ = ["KEYS", "ScoredData", "dumps", "from_wire", "parse", "to_wire"]

MAX_DEPTH = 64  # of lists and objects in what the old protocol leaves to its clients

_VERBATIM = ("generation_params", "overrides", "group_overrides", "images")


class ScoredData(BaseModel):
    """One group as the old protocol has it: a list for each sequence, with an entry for each token."""

    tokens: list[list[int]] = Field(description="Prompt and completion ids of each sequence.")
    masks: list[list[int]] = Field(description="For each token: -100 where the loss does not count it, else its id.")
    scores: list[float] = Field(description="One for each sequence.")
    advantages: list[list[float]] | None = Field(None, description="For each token, over those that scores would give.")
    ref_logprobs: list[list[float]] | None = Field(None, description="For each token, of a reference model.")
    messages: list[list[dict[str, Any]]] | None = Field(None, description="Each with `role` and `content`.")
    generation_params: dict[str, Any] | None = Field(None, description="`temperature` is read.")
    inference_logprobs: list[list[float]] | None = Field(None, description="For each token; 1.0 where it is masked.")
    overrides: list[dict[str, Any]] | None = Field(
        None, description="For each sequence: `set_advantage_to_zero`, `temperature`, `sft`."
    )
    group_overrides: dict[str, Any] | None = Field(None, description="`temperature` and `sft` are read.")
    images: Any | None = None
    env_id: int | None = Field(None, description="As /register-env gave it.")
    distill_token_ids: list[list[list[int]]] | None = Field(None, description="A teacher's likeliest at each token.")
    distill_logprobs: list[list[list[float]]] | None = Field(None, description="Theirs, in the same shape.")

    @field_validator("messages", mode="after")
    @classmethod
    def _messages_say_who_and_what(cls, value: list[list[dict[str, Any]]] | None) -> list[list[dict[str, Any]]] | None:
        if any("role" not in one or "content" not in one for one in chain.from_iterable(value or ())):
            raise ValueError("a message must have 'role' and 'content'")
        return value


def from_wire(data: Any, *, environment: str, version: int | None) -> ScoredGroup:
    """The group that an old client sent, sampled from policy `version` as far as anyone knows. Its draw is nobody's.

    A token is trained where its mask is its own id. Raises DataError that names the field and the index.
    """
    try:
        return _group(data, environment, version)
    except NOT_OF_ITS_TYPE:  # a value that is not of its type: perhaps it can be made so
        pass
    try:
        coerced = ScoredData.model_validate(data).__dict__
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise DataError(f"{path_of(first['loc'])}: {first['msg']}") from None
    try:
        return _group(coerced, environment, version)
    except (OverflowError, struct.error):
        name_what_overflows(coerced)


def _group(data: Mapping[str, Any], environment: str, version: int | None) -> ScoredGroup:
    """Raises one of `NOT_OF_ITS_TYPE` for a value that is not, DataError for what no coercion mends."""
    if type(data) is not dict or not {"tokens", "masks", "scores"} <= data.keys():
        raise TypeError
    rows = lists(data["tokens"])
    lengths = list(map(len, rows))
    if not lengths or not all(lengths):
        raise DataError(f"tokens{path_of((lengths.index(0),)) if lengths else ''}: a sequence needs at least one token")
    at = offsets_of(lengths)
    tokens = ints(list(chain.from_iterable(rows)))
    if tokens.min() < 0:
        refuse("tokens", at, tokens < 0, tokens, "is below 0")
    masks = ints(flat("masks", data["masks"], lengths))
    sampled: Bools = masks == tokens
    wire: dict[str, Any] = {"env_id": data.get("env_id")}
    if type(wire["env_id"]) not in (int, type(None)):
        raise TypeError
    if not (sampled | (masks == MASKED)).all():
        wire["masks"] = [list(map(int, row)) for row in data["masks"]]
    wire |= {key: data[key] for key in _VERBATIM if data.get(key) is not None}

    rewards = floats(counted("scores", data["scores"], len(lengths)))
    scores = list(map(float, data["scores"]))
    if not np.isfinite(rewards).all():
        refuse("scores", None, ~np.isfinite(rewards), rewards, "is not a finite number of 32 bits")
    logprobs = _floats("inference_logprobs", data, wire, lengths, at)
    if logprobs is not None:
        logprobs = _unmasked(logprobs, sampled, data, wire)
    advantages = _floats("advantages", data, wire, lengths, at)
    reference = _floats("ref_logprobs", data, wire, lengths, at)
    teacher = _teacher(data, wire, lengths)
    messages = _messages(data.get("messages"), len(lengths), wire)
    told = _Told(data, len(lengths))
    if any(told.zeroed) and advantages is not None:
        wire["advantages"] = as_floats(
            data["advantages"]
        )  # what is kept beside the tokens is zero where it was overridden
    for key in ("messages", *_VERBATIM):
        _bounded(key, data.get(key))

    versions = np.full(len(tokens), UNKNOWN_VERSION if version is None else version, np.int32)
    episodes: list[Episode] = []
    bounds = at.tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        chosen = sampled[start:end]
        own = None if advantages is None else advantages[start:end]
        rollout = Rollout(
            tokens=tokens[start:end],
            sampled=chosen,
            trained=chosen,
            logprobs=None if logprobs is None else logprobs[start:end],
            policy_version=versions[start:end],
            temperature=told.temperatures[number],
            advantages=np.zeros(end - start, np.float32) if told.zeroed[number] else own,
            ref_logprobs=None if reference is None else reference[start:end],
            teacher=None if teacher is None else teacher[number],
            sft=told.sft[number],
        )
        episodes.append(Episode((rollout,), scores[number], messages=messages[number]))
    prompt = tokens[: int(sampled[: lengths[0]].argmax()) or lengths[0]]
    task = Task(f"{environment}-{crc32(prompt.tobytes()):08x}", ())  # groups of one prompt are of one task
    return ScoredGroup(Draw(-1, environment, "train", -1, 0), task, tuple(episodes), rewards, wire=wire)


class _Told:
    """What the overrides of a group say of each sequence: over the generation parameters, over the group's."""

    def __init__(self, data: Mapping[str, Any], sequences: int) -> None:
        overrides = data.get("overrides") or []
        general, params = data.get("group_overrides") or {}, data.get("generation_params") or {}
        if (
            types_of(overrides) - {dict}
            or type(overrides) is not list
            or type(general) is not dict
            or type(params) is not dict
        ):
            raise TypeError
        if len(overrides) > sequences:
            raise DataError(f"overrides: there are {len(overrides)}, for {sequences} sequences")
        each = [*overrides, *[{}] * (sequences - len(overrides))]
        self.zeroed = [bool(one.get("set_advantage_to_zero")) for one in each]
        self.sft = [bool(one.get("sft", general.get("sft"))) for one in each]
        default = _temperature("group_overrides", general, 1.0)
        default = _temperature("generation_params", params, default)
        self.temperatures = [_temperature(f"overrides[{n}]", one, default) for n, one in enumerate(each)]


def _temperature(where: str, said: Mapping[str, Any], default: float) -> float:
    if said.get("temperature") is None:
        return default
    try:
        value = float(said["temperature"])
    except (TypeError, ValueError, OverflowError):
        value = -1.0
    if not 0 <= value < math.inf:
        raise DataError(f"{where}['temperature']: {said['temperature']!r} is not a finite number of at least 0")
    return value


def _floats(
    name: str, data: Mapping[str, Any], wire: dict[str, Any], lengths: Sequence[int], at: np.ndarray[Any, Any]
) -> Floats | None:
    """One number a token [N], or None. An empty list says nothing, and is given back as it came."""
    rows = data.get(name)
    if not rows:
        if rows is not None:
            wire[name] = lists(rows)
        return None
    values: Floats = floats(flat(name, rows, lengths))
    if not (finite := np.isfinite(values)).all():
        refuse(name, at, ~finite, values, "is not a finite number of 32 bits")
    return values


def _unmasked(logprobs: Floats, sampled: Bools, data: Mapping[str, Any], wire: dict[str, Any]) -> Floats:
    """0 at masked tokens. What the client had there is remembered where it was not the protocol's own value."""
    hidden = logprobs[~sampled]
    if len(hidden) and not (hidden == NO_LOGPROB).all():
        if (hidden == hidden[0]).all():
            wire[MASKED_LOGPROB] = float(hidden[0])
        else:
            wire["inference_logprobs"] = as_floats(data["inference_logprobs"])
    return np.where(sampled, logprobs, np.float32(0))


def _teacher(data: Mapping[str, Any], wire: dict[str, Any], lengths: Sequence[int]) -> list[TopK] | None:
    names = ("distill_token_ids", "distill_logprobs")
    given = [data.get(name) for name in names]
    if not any(given):
        wire |= {name: lists(rows) for name, rows in zip(names, given, strict=True) if rows is not None}
        return None
    if not all(given):
        raise DataError(f"{names[not given[1]]} is missing: the two of a teacher come together")
    positions = [lists(flat(name, rows, lengths)) for name, rows in zip(names, given, strict=True)]
    counts = [list(map(len, rows)) for rows in positions]
    tokens_at = offsets_of(lengths)
    if counts[0] != counts[1]:
        differ = np.asarray(counts[0]) != np.asarray(counts[1])
        where = index_of(tokens_at, int(differ.argmax()))
        raise DataError(f"distill_logprobs{where}: as many as distill_token_ids{where} are needed")
    at = offsets_of(counts[0])
    ids = ints(list(chain.from_iterable(positions[0])))
    logprobs = floats(list(chain.from_iterable(positions[1])))
    for name, values, wrong in zip(names, (ids, logprobs), (ids < 0, ~np.isfinite(logprobs)), strict=True):
        if wrong.any():
            where = index_of(tokens_at, int(np.searchsorted(at, wrong.argmax(), "right")) - 1)
            raise DataError(f"{name}{where}: {values[wrong.argmax()]} is refused")
    bounds = tokens_at.tolist()
    return [
        TopK(at[start : end + 1] - at[start], ids[at[start] : at[end]], logprobs[at[start] : at[end]])
        for start, end in pairwise(bounds)
    ]


def _messages(given: Any, sequences: int, wire: dict[str, Any]) -> Sequence[tuple[Mapping[str, Any], ...]]:
    """Those of each sequence. Lists that are not one for each sequence are only given back."""
    nothing: list[tuple[Mapping[str, Any], ...]] = [()] * sequences
    if given is None:
        return nothing
    every = list(chain.from_iterable(lists(given)))
    if types_of(every) - {dict} or not all("role" in one and "content" in one for one in every):
        raise TypeError
    if len(given) != sequences or not every:
        wire["messages"] = given
        return nothing
    return [tuple(one) for one in given]


def _bounded(name: str, value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise DataError(f"{name}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{name}: {value} is not a finite number")
    if isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            if isinstance(entry, (dict, list, float)):
                _bounded(name, entry, depth + 1)
