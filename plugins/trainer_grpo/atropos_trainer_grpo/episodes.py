"""Find the sequences of a batch that belong to one episode, which counts once in a mean over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Batch, Bools, offsets_of

Indices = NDArray[np.int64]


def side_by_side(batch: Batch) -> Batch:
    """The batch with the sequences of an episode, and the episodes of a group, next to each other."""
    order = beside_order(batch)
    return batch if (np.diff(order) == 1).all() else batch.select(order)


def beside_order(batch: Batch) -> Indices:
    """[S] the sequences in the order of `side_by_side`."""
    return np.lexsort((batch.episode, batch.group))


@dataclass(frozen=True)
class Episodes:
    """Episodes of a batch in `side_by_side` order: the first sequence of each [E], and the episode of each sequence [S]."""

    first: Indices
    number: Indices
    lengths: Indices  # [S] tokens of each sequence

    @staticmethod
    def of(batch: Batch) -> Episodes:
        begins = np.ones(batch.sequences, np.bool_)
        begins[1:] = (np.diff(batch.episode) != 0) | (np.diff(batch.group) != 0)
        return Episodes(np.flatnonzero(begins), np.cumsum(begins) - 1, batch.lengths)

    @property
    def several(self) -> bool:
        """True if any episode has more than one sequence."""
        return len(self.first) < len(self.number)

    def sequences(self, episodes: Indices) -> Indices:
        """The sequences of these episodes, one episode after another."""
        ends = np.append(self.first, len(self.number))
        parts = [np.arange(ends[one], ends[one + 1]) for one in episodes]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def numbers(self, sequences: Indices) -> Indices:
        """The episodes of these sequences, which must be whole episodes one after another."""
        of = self.number[sequences]
        return of[np.flatnonzero(np.diff(of, prepend=-1))]

    def token_offsets(self, sequences: Indices) -> Indices:
        """The start of each episode among the tokens of these sequences laid end to end, and the end of the last one."""
        offsets = offsets_of(self.lengths[sequences])
        begins = np.flatnonzero(np.diff(self.number[sequences], prepend=-1))
        return np.append(offsets[begins], offsets[-1])

    def any(self, of_sequences: Bools) -> Bools:
        """[S] True if it holds for any sequence of the same episode."""
        made: Bools = np.logical_or.reduceat(of_sequences, self.first)[self.number]
        return made

    def counted(self, sequences: Indices) -> Indices:
        """From the sequence of each row [R], its episode [R], counted from 0 in order of appearance."""
        of = self.number[sequences]
        return np.cumsum(np.diff(of, prepend=of[:1]) != 0)
