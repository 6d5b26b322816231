"""Run tasks without a trainer and keep their groups: one JSON line each, in the order of the draws."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError, RunDirectoryError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.producer import PATIENCE, no_progress
from atropos_core.rollouts.runner import RolloutRunner, task_count
from atropos_core.seeds import derive
from atropos_core.types import Draw, Sampling, ScoredGroup, Split
from atropos_trajectory_api.legacy_groups import outgoing_groups as wire


def draws(environments: Mapping[str, Environment], groups: int, split: Split, seed: int) -> list[Draw]:
    """Draws of environments in turns, each through its tasks in order and then from the first again."""
    sizes = {name: task_count(name, environment, split) for name, environment in environments.items()}
    if empty := [name for name, size in sizes.items() if not size]:
        raise DataError(
            f"environment {empty[0]!r} has no {split} tasks.",
            remedy="Leave --test out." if split == "test" else "For its held-out tasks: --test.",
        )
    names = list(environments)
    made: list[Draw] = []
    for number in range(groups):
        name = names[number % len(names)]
        made.append(Draw(number, name, split, number // len(names) % sizes[name], derive(seed, "process", number)))
    return made


async def scored_groups(
    runner: RolloutRunner, drawn: list[Draw], group_size: int, sampling: Sampling, *, at_once: int
) -> AsyncGenerator[ScoredGroup, None]:
    """The group of each draw, including failed members. Raises NoProgress if one after another fails as a whole."""
    waiting = deque(drawn)
    running: deque[asyncio.Task[ScoredGroup]] = deque()
    failed_in_a_row = 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                draw = waiting.popleft()
                places = runner.schedule_keys(draw, group_size)
                running.append(asyncio.create_task(runner.run(draw, places, group_size, sampling)))
            group = await running[0]
            running.popleft()
            failed_in_a_row = 0 if group.episodes else failed_in_a_row + 1
            if failed_in_a_row >= min(PATIENCE * at_once, len(drawn)):
                raise no_progress(failed_in_a_row, group)
            yield group
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def native_line(group: ScoredGroup) -> str:
    """The group's record and its contents, by field name, without empty fields."""
    return json.dumps(wire.plain(_named(group)), ensure_ascii=False, default=str, separators=(",", ":")) + "\n"


def _named(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _named(entry) for name, entry in held.items() if entry is not None}
    return [_named(entry) for entry in value] if isinstance(value, (list, tuple)) else value


class Lines:
    """A new file that always has only whole lines, even if writing one fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise RunDirectoryError(f"{path} exists already.", remedy="Name another file, or remove it.") from None
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, line: str) -> None:
        start = self._file.tell()
        left = memoryview(line.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(start)
            self._file.seek(start)
            raise self._unwritable(error) from error
        self.count += 1

    def close(self) -> None:
        self._file.close()

    def _unwritable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self.path} cannot be written: {error.strerror}.", remedy="Free some space, or name another place."
        )


async def write(
    groups: AsyncIterator[ScoredGroup],
    put: Callable[[ScoredGroup], None],
    *,
    whole: bool,
    shown: Callable[[ScoredGroup], None],
) -> int:
    """Returns the number of groups that were left out: those without an episode, if `whole` groups are wanted."""
    left_out = 0
    async for group in groups:
        if whole and not group.episodes:
            left_out += 1
        else:
            put(group)
        shown(group)
    return left_out
