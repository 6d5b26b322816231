"""A sum tree over tasks whose nodes count, for each of a few cells, the tasks below them that are in it.

Weights that change with time and hold for a whole cell then cost nothing per task: a cell is drawn by its count times
its weight, and one of its tasks by rank. Moving a task and finding one touch a node on each of three levels, 256 wide
each (the top level is as wide as it must be). All counts are whole numbers, so the tree depends only on the tasks' cells,
not on the order in which they moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 256
NO_CELL = 255  # fills the last block

Ints = NDArray[np.int64]


class CellTree:
    """`cells` u8[n] is kept as given and written by `move`. Cells are numbered below `count`."""

    def __init__(self, cells: NDArray[np.uint8], count: int) -> None:
        self.size = len(cells)
        supers = max(-(-self.size // WIDTH**2), 1)
        self._cells = np.full(supers * WIDTH**2, NO_CELL, np.uint8)
        self._cells[: self.size] = cells
        self._blocks = np.zeros((supers * WIDTH, count), np.int32)
        for at in range(supers):  # one super block at a time, to keep the temporary arrays small
            part = self._cells[at * WIDTH**2 : (at + 1) * WIDTH**2]
            inside = np.flatnonzero(part != NO_CELL)
            keys = (inside // WIDTH) * count + part[inside]
            counted = np.bincount(keys, minlength=WIDTH * count).reshape(WIDTH, count)
            self._blocks[at * WIDTH : (at + 1) * WIDTH] = counted
        self._supers = self._blocks.reshape(supers, WIDTH, count).sum(axis=1, dtype=np.int64)
        self.counts: Ints = self._supers.sum(axis=0)  # tasks in each cell

    @property
    def cells(self) -> NDArray[np.uint8]:
        return self._cells[: self.size]

    @property
    def size_bytes(self) -> int:
        return int(self._cells.nbytes + self._blocks.nbytes + self._supers.nbytes)

    def move(self, index: int, cell: int) -> None:
        before = self._cells[index]
        if before == cell:
            return
        self._cells[index] = cell
        for level, at in ((self._blocks, index // WIDTH), (self._supers, index // WIDTH**2)):
            level[at, before] -= 1
            level[at, cell] += 1
        self.counts[before] -= 1
        self.counts[cell] += 1

    def find(self, cells: Ints, ranks: Ints) -> Ints:
        """The `ranks[m]`-th task, counted from 0, of cell `cells[m]`, for each m. Ranks are below the cell's count."""
        at, ranks = _descend(self._supers[:, cells].T, ranks)
        blocks = self._blocks.reshape(-1, WIDTH, self._blocks.shape[1])
        below, ranks = _descend(blocks[at, :, cells], ranks)
        at = at * WIDTH + below
        within, _ = _descend(self._cells.reshape(-1, WIDTH)[at] == cells[:, None], ranks)
        return at * WIDTH + within


def _descend(counts: NDArray[Any], ranks: Ints) -> tuple[Ints, Ints]:
    """For each row of counts [M, W], the first column at which the running sum passes the rank, and the rank in it."""
    sums = np.cumsum(counts, axis=1, dtype=np.int64)
    column = (sums <= ranks[:, None]).sum(axis=1)
    rows = np.arange(len(ranks))
    before = sums[rows, column] - counts[rows, column]
    return column, ranks - before
