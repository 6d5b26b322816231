"""Read the tokens of a step, as atropos_core.storage.token_file wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.storage.token_file import (
    EXPERT_NUMBERS,
    EXPERTS_KNOWN,
    FORMAT,
    KEPT_IDS,
    KEPT_SIZES,
    OFFSETS,
    OPTIONAL_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
)
from atropos_core.types import Bools, Floats, Kept, RoutedExperts, Tokens, Versions, offsets_of


@dataclass(frozen=True)
class SequenceTokens:
    """One token history. A missing float is NaN; an optional column is None if the step has none."""

    ids: Tokens  # [T]
    sampled: Bools  # [T] sampled by the policy
    trained: Bools  # [T] counted by the loss
    logprobs: Floats  # [T] the engine's, as sampled
    versions: Versions  # [T] policy version that sampled it; -1 if not sampled, or unknown
    advantages: Floats  # [T] as the loss used them
    trainer_logprobs: Floats | None  # [T] of the policy before the update
    entropy: Floats | None  # [T] of that policy, in nats
    teacher_logprobs: Floats | None  # [T] of this token
    ref_logprobs: Floats | None  # [T]
    episode: int  # its line in the file of texts, from 0
    temperature: float
    truncated: bool  # sampled with top_p, top_k or min_p: logprobs, the trainer's too, are of what these kept
    kept: Kept | None  # of T positions; None if nothing was cut, or if it was not recorded
    experts: RoutedExperts | None  # of T positions; None if none were recorded

    @property
    def replies(self) -> list[tuple[int, int]]:
        """Start and end of each run of sampled tokens: the policy's replies, in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.sampled, [False]]).astype(np.int8)))
        return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def sequences_of(columns: Mapping[str, NDArray[Any]]) -> list[SequenceTokens]:
    """Return all sequences of columns that are in memory."""
    offsets = columns[OFFSETS]
    kept_offsets = offsets_of(columns[KEPT_SIZES]) if KEPT_SIZES in columns else None
    expert_offsets = offsets_of(columns[EXPERTS_KNOWN]) if EXPERTS_KNOWN in columns else None

    def cut(name: str, number: int) -> Any:
        return columns[name][offsets[number] : offsets[number + 1]] if name in columns else None

    return [
        SequenceTokens(
            **{name: cut(name, number) for name in (*TOKEN_COLUMNS, *OPTIONAL_COLUMNS)},
            episode=int(columns["episodes"][number]),
            temperature=float(columns["temperature"][number]),
            truncated=bool(columns["truncated"][number]),
            kept=None
            if kept_offsets is None
            else Kept(
                cut(KEPT_SIZES, number),
                columns[KEPT_IDS][kept_offsets[offsets[number]] : kept_offsets[offsets[number + 1]]],
            ),
            experts=None
            if expert_offsets is None
            else RoutedExperts(
                cut(EXPERTS_KNOWN, number),
                columns[EXPERT_NUMBERS][expert_offsets[offsets[number]] : expert_offsets[offsets[number + 1]]],
            ),
        )
        for number in range(len(offsets) - 1)
    ]


class TokenFile:
    """A step's columns, each read when it is requested. Raises DataError for damaged data, at once or when it is read."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            if path.exists() and not path.is_file():  # it would wait for a pipe
                raise OSError("it is not a file")
            self._file: Any = safe_open(path, framework="numpy")  # the library has no types
            self._check()
        except (OSError, SafetensorError) as error:
            raise _damaged(path, str(error)) from error
        self.column = cache(self._column)
        self._offsets_of = cache(lambda name: offsets_of(self._file.get_tensor(name)))

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    def _column(self, name: str) -> NDArray[Any] | None:
        """Return the column of this name, [N] or [S], or None if this step has none."""
        if name not in self.names:
            return None
        found: NDArray[Any] = self._file.get_tensor(name)
        return found

    def sequence(self, number: int) -> SequenceTokens:
        """Read only this sequence. Raises IndexError."""
        if not 0 <= number < self.sequences:
            raise IndexError(f"{self.path} has {self.sequences} sequences, and no number {number}")
        start, end = int(self.offsets[number]), int(self.offsets[number + 1])

        def cut(name: str) -> Any:
            return self._file.get_slice(name)[start:end] if name in self.names else None

        return SequenceTokens(
            **{name: cut(name) for name in (*TOKEN_COLUMNS, *OPTIONAL_COLUMNS)},
            episode=int(self._row("episodes", number)),
            temperature=float(self._row("temperature", number)),
            truncated=bool(self._row("truncated", number)),
            kept=self._kept(start, end),
            experts=self._experts(start, end),
        )

    def _kept(self, start: int, end: int) -> Kept | None:
        if KEPT_SIZES not in self.names:
            return None
        offsets = self._offsets_of(KEPT_SIZES)
        ids = self._file.get_slice(KEPT_IDS)[int(offsets[start]) : int(offsets[end])]
        return Kept(np.diff(offsets[start : end + 1]).astype(np.int32), ids)

    def _experts(self, start: int, end: int) -> RoutedExperts | None:
        if EXPERTS_KNOWN not in self.names:
            return None
        offsets = self._offsets_of(EXPERTS_KNOWN)
        numbers = self._file.get_slice(EXPERT_NUMBERS)[int(offsets[start]) : int(offsets[end])]
        return RoutedExperts(self._file.get_slice(EXPERTS_KNOWN)[start:end], numbers)

    def of_episode(self, line: int) -> list[int]:
        """Return the numbers of an episode's sequences."""
        episodes = self.column("episodes")
        return [] if episodes is None else np.flatnonzero(episodes == line).tolist()

    def _row(self, name: str, number: int) -> Any:
        column = self.column(name)
        assert column is not None, "checked when it was opened"
        return column[number]

    def _check(self) -> None:
        path, file = self.path, self._file
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise _damaged(path, f"it says format {metadata.get('format')!r:.40}, and this program reads {FORMAT!r}")
        self.names = frozenset(file.keys())
        wanted = {OFFSETS: "I64", **TOKEN_COLUMNS, **SEQUENCE_COLUMNS}
        wanted |= {name: "F32" for name in OPTIONAL_COLUMNS if name in self.names}
        wanted |= {name: "I32" for name in (KEPT_SIZES, KEPT_IDS) if {KEPT_SIZES, KEPT_IDS} & self.names}
        if {EXPERTS_KNOWN, EXPERT_NUMBERS} & self.names:
            wanted |= {EXPERTS_KNOWN: "BOOL", EXPERT_NUMBERS: self._type_of_experts()}
        if lacking := sorted(wanted.keys() - self.names):
            raise _damaged(path, f"it has no {', '.join(lacking)}")
        shapes = {}
        for name, dtype in wanted.items():
            part = file.get_slice(name)
            axes = 3 if name == EXPERT_NUMBERS else 1
            if part.get_dtype() != dtype or len(part.get_shape()) != axes:
                raise _damaged(
                    path, f"{name} is {part.get_dtype()} of shape {part.get_shape()}, not {dtype} of {axes} axes"
                )
            shapes[name] = part.get_shape()[0]
        self.offsets: NDArray[np.int64] = file.get_tensor(OFFSETS)
        if not len(self.offsets) or self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise _damaged(path, f"{OFFSETS} do not rise from 0")
        for name in wanted.keys() - {OFFSETS}:
            length = self.sequences if name in SEQUENCE_COLUMNS else self.tokens
            if name == KEPT_IDS:
                length = int(file.get_tensor(KEPT_SIZES).sum())
            elif name == EXPERT_NUMBERS:
                length = int(np.count_nonzero(file.get_tensor(EXPERTS_KNOWN)))
            if shapes[name] != length:
                raise _damaged(path, f"{name} has {shapes[name]} entries, and {OFFSETS} say {length}")

    def _type_of_experts(self) -> str:
        found = self._file.get_slice(EXPERT_NUMBERS).get_dtype() if EXPERT_NUMBERS in self.names else "U8"
        return found if found == "U16" else "U8"


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} is damaged: {what}.",
        remedy="The run did not write this: copy the file again from an intact copy, or remove it; the texts next to it stay.",
    )
