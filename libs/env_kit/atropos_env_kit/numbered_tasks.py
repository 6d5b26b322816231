"""Tasks that are made from their number when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from atropos_core.types import Task


class NumberedTasks(Sequence[Task]):
    """`count` tasks; `make(number)`, from 0, returns the same one each time."""

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(number) for number in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._make(index % self._count)
