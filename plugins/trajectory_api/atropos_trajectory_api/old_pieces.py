"""Pieces of groups from old environments, kept until they make a whole one.

An environment that registers with groups of 8 may send 3 sequences and then 5. atroposlib queues them as two groups, and
their advantages are then reckoned within each; here they become one. What was acknowledged as buffered is on the disk:
one file for each environment, replaced in one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core.durable import sync
from atropos_core.errors import StoreFull
from atropos_core.wire import plain
from atropos_trajectory_api.old_group import OldGroup

TOGETHER = ("tokens", "masks", "scores")
OPTIONAL = (
    "advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides", "distill_token_ids", "distill_logprobs",
)  # fmt: skip
MOST = 4  # times the group size: pieces that have not made a whole by then are queued as they are


@dataclass(frozen=True)
class Piece:
    """`data` has the fourteen keys. `key` is what the hub would know it by."""

    key: str
    data: Mapping[str, Any]

    @classmethod
    def of(cls, key: str, group: OldGroup) -> Piece:
        """What is said of each sequence, and only where it is said of every one."""
        data = plain(group.wire())
        sequences = len(data["tokens"])
        if isinstance(data["overrides"], list):
            data["overrides"] = [*data["overrides"], *({} for _ in range(sequences - len(data["overrides"])))]
        for name in OPTIONAL:
            if not isinstance(data[name], list) or len(data[name]) != sequences:
                data[name] = None
        return cls(key, data)

    @property
    def sequences(self) -> int:
        return len(self.data["tokens"])

    @property
    def kind(self) -> str:
        """Only pieces that say the same things of their sequences make one group."""
        present = [name for name in OPTIONAL if self.data.get(name) is not None]
        temperatures = [
            (self.data.get(name) or {}).get("temperature") for name in ("generation_params", "group_overrides")
        ]
        return json.dumps([present, temperatures])


class Pieces:
    """All buffers. `directory` None: in memory alone, as the hub without a journal."""

    def __init__(self, directory: Path | None, *, durable: bool = False) -> None:
        self._directory = directory
        self._durable = durable
        self._of: dict[int, list[Piece]] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("*.json"):
                self._of[int(path.stem)] = [Piece(key, data) for key, data in json.loads(path.read_bytes())]

    def environments(self) -> list[int]:
        return list(self._of)

    def keys(self) -> list[str]:
        return [piece.key for pieces in self._of.values() for piece in pieces]

    def sequences(self, environment: int) -> int:
        return sum(piece.sequences for piece in self._of.get(environment, ()))

    def add(self, environment: int, piece: Piece) -> None:
        """Raises StoreFull, and then it is not kept."""
        self._replace(environment, [*self._of.get(environment, ()), piece])

    def whole(self, environment: int, group_size: int) -> list[Piece]:
        """The pieces that make a group now, oldest first; none where nothing adds up."""
        pieces = self._of.get(environment, [])
        for kind in dict.fromkeys(piece.kind for piece in pieces):
            alike = [piece for piece in pieces if piece.kind == kind]
            if chosen := summing_to([piece.sequences for piece in alike], group_size):
                return [alike[i] for i in chosen]
        if self.sequences(environment) >= MOST * group_size:
            alike = [piece for piece in pieces if piece.kind == pieces[0].kind]
            size = 0
            taken: list[Piece] = []
            for piece in alike:
                if taken and size + piece.sequences > group_size:
                    break
                taken.append(piece)
                size += piece.sequences
            return taken
        return []

    def remove(self, environment: int, gone: Iterable[Piece]) -> None:
        keys = {piece.key for piece in gone}
        self._replace(environment, [piece for piece in self._of.get(environment, ()) if piece.key not in keys])

    def clear(self) -> None:
        for environment in self.environments():
            self._replace(environment, [])

    def _replace(self, environment: int, pieces: list[Piece]) -> None:
        if self._directory is not None:
            self._write(self._directory / f"{environment}.json", pieces)
        if pieces:
            self._of[environment] = pieces
        else:
            self._of.pop(environment, None)

    def _write(self, path: Path, pieces: list[Piece]) -> None:
        partial = path.with_suffix(".partial")
        try:
            if not pieces:
                path.unlink(missing_ok=True)
                return
            partial.write_text(json.dumps([[piece.key, piece.data] for piece in pieces]))
            if self._durable:
                sync(partial)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StoreFull(f"a piece of a group cannot be kept in {path}: {error.strerror}.") from error


def joined(pieces: Sequence[Piece]) -> dict[str, Any]:
    """One group of all their sequences; what is said of the whole group is the first one's."""
    made = dict(pieces[0].data)
    for name in (*TOGETHER, *OPTIONAL):
        if made.get(name) is not None:
            made[name] = [value for piece in pieces for value in piece.data[name]]
    images = [piece.data.get("images") for piece in pieces]
    lists = [value for value in images if isinstance(value, list)]
    if len(lists) == len(images) and all(len(v) == p.sequences for v, p in zip(lists, pieces, strict=True)):
        made["images"] = [image for value in lists for image in value]
    return made


def summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Indices of sizes that make exactly `target`, the oldest first as far as that works; empty where none do."""
    taken, total = [], 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            taken.append(index)
            total += size
    if total == target:
        return taken
    reached: dict[int, list[int]] = {0: []}
    for index, size in enumerate(sizes):
        for total, chosen in list(reached.items()):
            if total + size <= target:
                reached.setdefault(total + size, [*chosen, index])
    return reached.get(target, [])
