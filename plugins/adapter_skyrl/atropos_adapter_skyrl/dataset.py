"""SkyRL data sets made from environments' tasks, without a file: each row names its task."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import task_count
from atropos_core.types import Draw, Split

KEY = "atropos"  # in a row's extras


class TaskDataset:
    """One split of several environments in sequence, with at most `limit` tasks of each.

    Rows have the form that SkyRL's own collate function returns. A row gets a new uid each time it is read: SkyRL 0.3.0 stops
    if a uid occurs twice in a batch, and dynamic sampling may collect a row twice across the end of an epoch.
    With `lasting`, a row keeps its uid, also in the next process: SkyRL's fully asynchronous trainer saves the uids that an
    epoch has trained, and skips them when it resumes."""

    def __init__(
        self, environments: Mapping[str, Environment], split: Split, limit: int | None = None, *, lasting: bool = False
    ) -> None:
        self._split: Split = split
        self._lasting = lasting
        self._given = itertools.count()
        self._environments = environments
        self._sizes = {
            name: min(task_count(name, environment, split), limit or 1 << 62)
            for name, environment in environments.items()
        }
        if not sum(self._sizes.values()):
            raise DataError(f"none of {', '.join(environments)} has {split} tasks.")

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def __getitem__(self, at: int) -> dict[str, Any]:
        index = at
        for name, size in self._sizes.items():
            if index < size:
                messages = [dict(message) for message in self._environments[name].tasks(self._split)[index].messages]
                extras = {KEY: {"environment": name, "split": self._split, "index": index}, "data_source": name}
                uid = f"{name}-{index}" if self._lasting else f"{at}-{next(self._given)}"
                return {"prompt": messages, "env_class": name, "env_extras": extras, "uid": uid}
            index -= size
        raise IndexError(at)

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows


@dataclass(frozen=True)
class Block:
    """Consecutive rows of SkyRL's input that form one group: `n` rollouts of one task."""

    environment: str
    split: Split
    index: int
    name: str  # of the task, for SkyRL
    n: int

    def draw(self, number: int, seed: int) -> Draw:
        return Draw(number, self.environment, self.split, self.index, seed)


def blocks_of(batch: Mapping[str, Any]) -> list[Block]:
    """Return the groups of a GeneratorInput. A block ends when the task changes or its repetition ids start again.

    Raises DataError without trajectory ids or extras, ConfigError if the rows are not from TaskDataset."""
    ids: Sequence[Any] | None = batch.get("trajectory_ids")
    extras: Sequence[Mapping[str, Any]] | None = batch.get("env_extras")
    if not ids or not extras:
        raise DataError(
            "generate() was given rows without trajectory_ids or env_extras: which tasks they are is unknown."
        )
    blocks: list[Block] = []
    before: tuple[str, int] | None = None
    for one, extra in zip(ids, extras, strict=True):
        if KEY not in extra:
            raise ConfigError(
                f"a row of SkyRL's data set has no column {KEY!r}, which says what task of an environment it is.",
                remedy="Leave the data set to the entry point: trainer.override_entrypoint=atropos_adapter_skyrl.entrypoint",
            )
        task = extra[KEY]
        if before is not None and before[0] == one.instance_id and before[1] < one.repetition_id:
            last = blocks[-1]
            blocks[-1] = Block(last.environment, last.split, last.index, last.name, last.n + 1)
        else:
            blocks.append(Block(task["environment"], task["split"], int(task["index"]), str(one.instance_id), 1))
        before = (one.instance_id, one.repetition_id)
    return blocks
