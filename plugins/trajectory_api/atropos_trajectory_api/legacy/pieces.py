"""Pieces of groups from old environments, kept until they make a whole group.

An environment that registers with groups of 8 may send 3 sequences and then 5. atroposlib queues them as two groups, so advantages are
computed within each. Here they become one group. Pieces that were acknowledged as buffered are on the disk.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.errors import DataError
from atropos_trajectory_api.legacy.piece_files import Found, PieceFiles
from atropos_trajectory_api.legacy_groups.outgoing_groups import plain
from atropos_trajectory_api.legacy_groups.stored_group import OldGroup, held

TOGETHER = ("tokens", "masks", "scores")
OPTIONAL = (
    "advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides", "distill_token_ids", "distill_logprobs",
)  # fmt: skip
MOST = 4  # times the group size: when pieces reach this without making a whole group, they are queued as they are
TRIED = 256  # oldest pieces to search for a matching sum, if the first ones have none
OVERHEAD_BYTES = 1024  # of a piece, in addition to its frame


@dataclass(frozen=True, slots=True)
class Piece:
    """`frame` is that of an OldGroup. `key` is its key in the hub."""

    key: str
    frame: bytes
    sequences: int
    kind: str  # only pieces with the same kinds of fields can form a group

    @classmethod
    def of(cls, key: str, group: OldGroup, frame: bytes) -> Piece:
        said, count = group.rest, len(group.lengths)
        present = [
            *group.columns,
            *(["teacher"] if group.teacher is not None else []),
            *(["messages"] if isinstance(of := said.get("messages"), list) and len(of) == count else []),
            *(["overrides"] if isinstance(said.get("overrides"), list) else []),
        ]
        temperatures = [(said.get(name) or {}).get("temperature") for name in ("generation_params", "group_overrides")]
        return cls(key, frame, count, json.dumps([present, temperatures]))

    @property
    def size_bytes(self) -> int:
        return len(self.frame) + OVERHEAD_BYTES

    def group(self) -> OldGroup:
        value = held(self.frame)
        assert isinstance(value, OldGroup)
        return value


class Pieces:
    """All buffered pieces. `directory` None: only in memory, as the hub without a journal. `knows`: returns True if the hub has
    a group of that key."""

    def __init__(
        self,
        directory: Path | None,
        *,
        durable: bool = False,
        knows: Callable[[str], bool] = lambda key: False,
        may_write: Callable[[], bool] = lambda: True,
        most_bytes: float = math.inf,
    ) -> None:
        self.most_bytes = most_bytes
        self.size_bytes = 0
        self._of: dict[int, dict[int, Piece]] = {}  # by environment and number, oldest first
        self._counts: dict[int, Counter[str]] = {}  # sequences by kind
        self._going: set[int] = set()  # numbers of pieces on their way into the hub
        self._next = 0
        self._files = PieceFiles(directory, durable=durable, may_write=may_write) if directory is not None else None
        self.found = self._restore(self._files, knows) if self._files else frozenset[str]()  # keys, at the start

    def environments(self) -> list[int]:
        return list(self._of)

    def has(self, environment: int, key: str) -> bool:
        return any(piece.key == key for piece in self._of.get(environment, {}).values())

    def sequences(self, environment: int) -> int:
        return sum(self._counts.get(environment, {}).values())

    def fits(self, piece: Piece) -> bool:
        return self.size_bytes + piece.size_bytes <= self.most_bytes

    def add(self, environment: int, piece: Piece) -> None:
        """Add a piece. Raises StoreFull, and then it is not kept."""
        if self._files is not None:
            self._files.write(Found(environment, self._next, True, piece.key, piece.frame))
        self._keep(environment, self._next, piece)

    def whole(self, environment: int, group_size: int) -> list[int]:
        """Numbers of the pieces that make a group now, oldest first; none if no sum matches."""
        for kind, sequences in self._counts.get(environment, {}).items():
            if sequences >= group_size:
                alike = self._free(environment, kind)
                if chosen := summing_to([piece.sequences for _, piece in alike], group_size):
                    return [alike[i][0] for i in chosen]
        return self.first(environment, group_size) if self.sequences(environment) >= MOST * group_size else []

    def first(self, environment: int, group_size: int) -> list[int]:
        """The oldest pieces that can be one group, up to that size, as they are."""
        size = 0
        taken: list[int] = []
        for number, piece in self._free(environment):
            if not taken:
                kind = piece.kind
            if piece.kind == kind:
                if taken and size + piece.sequences > group_size:
                    break
                taken.append(number)
                size += piece.sequences
        return taken

    def oldest(self) -> int | None:
        """The environment whose piece has waited longest."""
        first = {
            environment: min((number for number in pieces if number not in self._going), default=math.inf)
            for environment, pieces in self._of.items()
        }
        found = min(first, key=first.__getitem__, default=None)
        return None if found is None or first[found] == math.inf else found

    def begin(self, environment: int, numbers: Sequence[int]) -> list[Piece]:
        """Begin to put these into the hub, as the group of the last one's key. Raises StoreFull."""
        pieces = [self._of[environment][number] for number in numbers]
        if self._files is not None:
            self._files.begin(environment, numbers, pieces[-1].key)
        self._going.update(numbers)
        return pieces

    def end(self, environment: int, numbers: Sequence[int], *, stored: bool) -> None:
        """Remove the pieces if the hub has stored them; else keep them."""
        self._going.difference_update(numbers)
        if stored:
            self._remove(environment, numbers)
        if self._files is not None:
            self._files.end(environment, numbers[-1])

    def clear(self) -> None:
        for environment in self.environments():
            self._remove(environment, list(self._of[environment]))

    def _free(self, environment: int, kind: str | None = None) -> list[tuple[int, Piece]]:
        return [
            (number, piece)
            for number, piece in self._of.get(environment, {}).items()
            if number not in self._going and kind in (None, piece.kind)
        ]

    def _keep(self, environment: int, number: int, piece: Piece) -> None:
        self._next = max(self._next, number + 1)
        self._of.setdefault(environment, {})[number] = piece
        self._counts.setdefault(environment, Counter())[piece.kind] += piece.sequences
        self.size_bytes += piece.size_bytes

    def _remove(self, environment: int, numbers: Sequence[int]) -> None:
        pieces, counts = self._of.get(environment, {}), self._counts.get(environment, Counter())
        for number in numbers:
            if (piece := pieces.pop(number, None)) is not None:
                counts[piece.kind] -= piece.sequences
                if not counts[piece.kind]:
                    del counts[piece.kind]
                self.size_bytes -= piece.size_bytes
        if not pieces:
            self._of.pop(environment, None)
            self._counts.pop(environment, None)
        if self._files is not None:
            self._files.remove(environment, numbers)

    def _restore(self, files: PieceFiles, knows: Callable[[str], bool]) -> frozenset[str]:
        keys: set[str] = set()
        gone: list[Found] = []
        for one in files.read():
            self._next = max(self._next, one.number + 1)
            if not one.is_piece:
                gone.append(one)
                continue
            try:
                group = held(one.body)
                if isinstance(group, OldGroup):
                    group.check()
            except DataError as error:
                console.warn(f"piece {one.number} of environment {one.environment} is skipped: {error}")
                continue
            if isinstance(group, OldGroup):
                keys.add(one.key)
                self._keep(one.environment, one.number, Piece.of(one.key, group, one.body))
        for one in gone:
            if knows(one.key):
                self._remove(one.environment, json.loads(one.body))
            files.end(one.environment, one.number)
        return frozenset(keys)


def joined(groups: Sequence[OldGroup]) -> dict[str, Any]:
    """One group of all their sequences. Fields of the whole group come from the first one."""
    each = [_by_sequence(group) for group in groups]
    made = dict(each[0])
    for name in (*TOGETHER, *OPTIONAL):
        if made[name] is not None:
            made[name] = [value for data in each for value in data[name]]
    images = [data["images"] for data in each]
    lists = [value for value in images if isinstance(value, list)]
    if len(lists) == len(images) and all(len(v) == len(d["tokens"]) for v, d in zip(lists, each, strict=True)):
        made["images"] = [image for value in lists for image in value]
    return made


def _by_sequence(group: OldGroup) -> Mapping[str, Any]:
    """The fourteen keys. A field by sequence is included only if every sequence has it."""
    data: dict[str, Any] = plain(group.wire())
    sequences = len(group.lengths)
    if isinstance(data["overrides"], list):
        data["overrides"] = [*data["overrides"], *({} for _ in range(sequences - len(data["overrides"])))]
    for name in OPTIONAL:
        if not isinstance(data[name], list) or len(data[name]) != sequences:
            data[name] = None
    return data


def summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Indices of sizes that sum to exactly `target`, the oldest first if possible; empty if none do."""
    taken, total = [], 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            taken.append(index)
            total += size
    if total == target:
        return taken
    within = (1 << target + 1) - 1
    reached = [1]  # bit n: some of the sizes so far make n
    for size in sizes[:TRIED]:
        reached.append((reached[-1] | reached[-1] << size) & within)
    if not reached[-1] >> target & 1:
        return []
    chosen = []
    for index in reversed(range(len(reached) - 1)):
        if not reached[index] >> target & 1:
            chosen.append(index)
            target -= sizes[index]
    return chosen[::-1]
