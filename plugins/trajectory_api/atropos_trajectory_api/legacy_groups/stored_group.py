"""A group of an old client as the hub keeps it: one array for a whole column, and the rest as the client sent it.

It becomes a `ScoredGroup` only when a native trainer asks for it; an old trainer gets it back almost unchanged. An 8 x 64 group takes
10 us to encode this way, compared with 147 as the 41 arrays of a ScoredGroup's frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from atropos_core.codec import PREFIX_BYTES, decode, encode_bytes, framed
from atropos_core.errors import DataError
from atropos_core.group_schema import (
    LARGEST_REWARD,
    TokenColumns,
    check_greedy,
    check_group,
    check_kept_is_known,
    check_number,
    check_token_columns,
)
from atropos_core.types import (
    UNKNOWN_VERSION,
    Bools,
    Draw,
    Episode,
    Floats,
    Rollout,
    ScoredGroup,
    Task,
    Tokens,
    TopK,
    offsets_of,
)
from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS, MASKED, MASKED_LOGPROB, NO_LOGPROB, to_wire
from atropos_trajectory_api.legacy_groups.shared_settings import SETTINGS, SharedSettings
from atropos_trajectory_api.legacy_groups.wire_json import dumps
from atropos_trajectory_api.legacy_groups.wire_lists import index_of

VERBATIM = ("generation_params", "overrides", "group_overrides", "images")
_NAMES = {"logprobs": "inference_logprobs", "teacher": "distill_logprobs"}  # the schema's -> the protocol's
_MARK = "old_group"
_BEGIN = f'{{"{_MARK}":'.encode()  # of the header of such a frame


@dataclass(slots=True, eq=False)  # not frozen: that would take three times as long to make
class OldGroup:
    """A checked group with sequences of `lengths` tokens, N in all. `rest` is JSON: every key that has no array here."""

    environment: str
    lengths: list[int]
    tokens: Tokens  # [N]
    sampled: Bools  # [N] the mask is the token's own id
    scores: list[float]
    columns: Mapping[str, Floats]  # [N] each, as sent: advantages, ref_logprobs, inference_logprobs
    teacher: tuple[NDArray[np.int64], Tokens, Floats] | None  # offsets [N + 1], ids, logprobs
    rest: Mapping[str, Any]

    @property
    def task(self) -> str:
        """The task's name, the same for groups of one prompt."""
        first = self.lengths[0]
        prompt = self.tokens[: int(self.sampled[:first].argmax()) or first]
        return f"{self.environment}-{crc32(prompt.tobytes()):08x}"

    def place(self, at: int) -> str:
        """Token `at` of all, as the index that the client knows it by."""
        return index_of(offsets_of(self.lengths), at)

    def check(self, vocabulary: int = 0) -> None:
        """Raises DataError for values that must not be trained (`atropos_core.group_schema`), under the protocol's names
        for them. A `vocabulary` of 0 is unknown."""
        scores = self.scores
        if not (min(scores) >= -LARGEST_REWARD and max(scores) <= LARGEST_REWARD and not math.isnan(sum(scores))):
            for number, score in enumerate(scores):
                check_number(f"scores[{number}]", score)
        check_token_columns(self._columns(), vocabulary, lambda name, at: _NAMES.get(name, name) + self.place(at))
        if SETTINGS.isdisjoint(self.rest):
            return
        settings = SharedSettings(self.rest, len(self.lengths))
        for number, temperature in enumerate(settings.temperatures) if 0 in settings.temperatures else ():
            if temperature == 0 and not settings.zeroed[number]:
                at = offsets_of(self.lengths)
                own = self._columns_of(slice(int(at[number]), int(at[number + 1])))
                check_greedy(f"sequence {number}: its", own, sft=settings.sft[number])

    def _columns(self) -> TokenColumns:
        teacher, own = self.teacher, self.columns
        return TokenColumns(
            self.tokens, self.sampled, self.sampled, own.get("inference_logprobs"), own.get("ref_logprobs"),
            own.get("advantages"), None if teacher is None else TopK(*teacher),
        )  # fmt: skip

    def _columns_of(self, part: slice) -> TokenColumns:
        """Without the teacher."""
        sampled, own = self.sampled[part], {name: values[part] for name, values in self.columns.items()}
        return TokenColumns(
            self.tokens[part],
            sampled,
            sampled,
            own.get("inference_logprobs"),
            own.get("ref_logprobs"),
            own.get("advantages"),
            None,
        )

    def frame(self) -> bytes:
        """The group as bytes, which `held` reads."""
        body: list[bytes] = []
        size = 0

        def put(values: NDArray[Any]) -> dict[str, Any]:
            nonlocal size
            if values.dtype == bool:
                mark: dict[str, Any] = {"~p": [values.shape, size]}
                values = np.packbits(values)
            else:
                mark = {"~a": [values.dtype.str, values.shape, size]}
            body.append(values.tobytes())
            size += values.nbytes
            return mark

        header = {
            "environment": self.environment,
            "lengths": self.lengths,
            "teacher": None if self.teacher is None else [put(values) for values in self.teacher],
            "tokens": put(self.tokens),
            "columns": {name: put(values) for name, values in self.columns.items()},
            "sampled": put(self.sampled),
            "scores": self.scores,
            "rest": dumps(self.rest).decode(),  # as text: a key in it may look like a mark
        }
        return framed(dumps({_MARK: header}), *body)

    def wire(self) -> dict[str, Any]:
        """Exactly `KEYS`, with token columns as contiguous arrays."""
        made: dict[str, Any] = dict.fromkeys(KEYS)
        made["tokens"] = self._rows(self.tokens)
        made["masks"] = self._rows(np.where(self.sampled, self.tokens, np.int32(MASKED)))
        made["scores"] = self.scores
        made |= {name: self._rows(values) for name, values in self.columns.items()}
        if self.teacher is not None:
            at, *likeliest = self.teacher
            bounds, sequences = list(pairwise(at.tolist())), list(pairwise(offsets_of(self.lengths).tolist()))
            for name, values in zip(("distill_token_ids", "distill_logprobs"), likeliest, strict=True):
                by_token = [values[start:end] for start, end in bounds]
                made[name] = [by_token[start:end] for start, end in sequences]
        made.update(self.rest)
        return made

    def group(self, version: int | None = None) -> ScoredGroup:
        """As sampled from policy `version` at best. Its draw belongs to no trainer. Masks and sentinels are converted here."""
        rest, columns = self.rest, self.columns
        wire = {"env_id": rest.get("env_id")} | {key: value for key, value in rest.items() if key != "messages"}
        settings = SharedSettings(rest, len(self.lengths))
        logprobs = columns.get("inference_logprobs")
        if logprobs is not None:
            logprobs = self._unmasked(logprobs, wire)
        advantages, reference = columns.get("advantages"), columns.get("ref_logprobs")
        if any(settings.zeroed) and advantages is not None:
            wire["advantages"] = self._lists(advantages)  # the originals: the tokens' are zero if that was overridden
        messages = rest.get("messages")
        if messages is not None and (len(messages) != len(self.lengths) or not any(messages)):
            wire["messages"], messages = messages, None
        versions = np.full(len(self.tokens), UNKNOWN_VERSION if version is None else version, np.int32)
        episodes: list[Episode] = []
        for number, (start, end) in enumerate(pairwise(offsets_of(self.lengths).tolist())):
            chosen = self.sampled[start:end]
            own = None if advantages is None else advantages[start:end]
            rollout = Rollout(
                tokens=self.tokens[start:end],
                sampled=chosen,
                trained=chosen,
                logprobs=None if logprobs is None else logprobs[start:end],
                policy_version=versions[start:end],
                temperature=settings.temperatures[number],
                advantages=np.zeros(end - start, np.float32) if settings.zeroed[number] else own,
                ref_logprobs=None if reference is None else reference[start:end],
                teacher=self._taught(start, end),
                sft=settings.sft[number],
            )
            said = tuple(messages[number]) if messages is not None else ()
            episodes.append(Episode((rollout,), self.scores[number], messages=said))
        rewards = np.array(self.scores, np.float32)
        draw = Draw(-1, self.environment, "train", -1, 0)
        return ScoredGroup(draw, Task(self.task, ()), tuple(episodes), rewards, wire=wire)

    def _taught(self, start: int, end: int) -> TopK | None:
        if self.teacher is None:
            return None
        at, ids, logprobs = self.teacher
        return TopK(at[start : end + 1] - at[start], ids[at[start] : at[end]], logprobs[at[start] : at[end]])

    def _unmasked(self, logprobs: Floats, wire: dict[str, Any]) -> Floats:
        """The logprobs with 0 at masked tokens. If the client had another value there than the protocol's, it is remembered."""
        hidden = logprobs[~self.sampled]
        if len(hidden) and not (hidden == NO_LOGPROB).all():
            if (hidden == hidden[0]).all():
                wire[MASKED_LOGPROB] = float(hidden[0])
            else:
                wire["inference_logprobs"] = self._lists(logprobs)
        return np.where(self.sampled, logprobs, np.float32(0))

    def _rows(self, values: NDArray[Any]) -> Sequence[NDArray[Any]] | NDArray[Any]:
        lengths = self.lengths
        if lengths.count(lengths[0]) == len(lengths):
            return values.reshape(len(lengths), lengths[0])
        return [values[start:end] for start, end in pairwise(offsets_of(lengths).tolist())]

    def _lists(self, values: NDArray[Any]) -> list[list[float]]:
        return [row.tolist() for row in self._rows(values)]


def held(payload: bytes) -> OldGroup | ScoredGroup:
    """The group that the hub holds as this payload."""
    value = decode(payload)
    if isinstance(value, ScoredGroup):
        return value
    fields = value[_MARK]
    return OldGroup(**fields | {"rest": json.loads(fields["rest"])})


def check_stored(payload: bytes, vocabulary: int) -> None:
    """Raises DataError for a group that a server of another version accepted, but that cannot be trained."""
    try:
        value = held(payload)
        if isinstance(value, OldGroup):
            value.check(vocabulary)
        else:
            check_group(value, vocabulary)
            check_kept_is_known(value)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DataError(f"it cannot be read: {error}") from error


def as_frame(payload: bytes) -> bytes:
    """The frame of a ScoredGroup, whatever client the group came from."""
    if not payload.startswith(_BEGIN, PREFIX_BYTES):
        return payload
    value = held(payload)
    return encode_bytes(value.group()) if isinstance(value, OldGroup) else payload


def as_wire(payload: bytes) -> dict[str, Any]:
    """The group in the form of the old protocol, whatever client it came from."""
    value = held(payload)
    return value.wire() if isinstance(value, OldGroup) else to_wire(value)
