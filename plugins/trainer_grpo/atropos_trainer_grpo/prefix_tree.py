"""A tree of the common beginnings of sequences.

A node is a run of tokens. Sequences that begin alike share one node for that beginning, and branch below it: the completions of one prompt,
the branches of an episode, a conversation that a later turn continues. `packed_rows.py` stores each node once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

LEAST_SAVED = 16  # tokens: as a segment of attention, a node that saves fewer costs more than its tokens
KEYS_AGAIN = 2.0  # rows of keys in the padded layout per token, from which attention by levels is less work
LEAST_SEGMENT = 128  # average tokens of a segment: attention kernels compute in blocks of this size


def pays_by_levels(keys: int, tokens: int, segments: int) -> bool:
    """True if attention by levels of a tree (flash_attention.py) costs less than a padded layout with `keys` rows of keys."""
    return keys >= KEYS_AGAIN * tokens and tokens >= LEAST_SEGMENT * segments


@dataclass(frozen=True)
class PrefixTree:
    """M nodes in depth-first order: the nodes below a node follow it, without a gap. Children are ordered by the first
    sequence of each."""

    begin: Indices  # [M] first token of a node in its sequences, counted from their start
    end: Indices  # [M]
    sequence: Indices  # [M] one sequence with these tokens
    parent: Indices  # [M] -1 for a node that begins a sequence
    last: Indices  # [S] the node that each sequence ends with

    @property
    def tokens(self) -> int:
        return int((self.end - self.begin).sum())

    @property
    def order(self) -> Indices:
        """[S] the sequences in tree order: each follows the earlier one with which it shares most."""
        return np.argsort(self.last, kind="stable")

    @property
    def inner(self) -> NDArray[np.bool_]:
        """[M] True if a node has nodes below it."""
        inner = np.zeros(len(self.parent), np.bool_)
        inner[self.parent[self.parent >= 0]] = True
        return inner

    def path(self, sequence: int) -> list[int]:
        """The sequence's nodes, from its first token."""
        path, node = [], int(self.last[sequence])
        while node >= 0:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def shared(self) -> Indices:
        """[S] in `order`: the tokens that a sequence shares with the one before it; 0 for the first."""
        shared = np.zeros(len(self.last), np.int64)
        before: list[int] = []
        for place, sequence in enumerate(self.order.tolist()):
            path = self.path(sequence)
            common = [node for node, other in zip(path, before, strict=False) if node == other]
            shared[place] = self.end[common[-1]] if common else 0
            before = path
        return shared


def tree_of(tokens: NDArray[np.int32], starts: Indices, lengths: Indices, *, share: bool = True) -> PrefixTree:
    """Build the tree of sequences of at least one token, each `tokens[start : start + length]`. Without `share`, each stays separate."""
    count = len(lengths)
    if not share or count < 2:
        alone = np.arange(count)
        return PrefixTree(np.zeros(count, np.int64), lengths.astype(np.int64), alone, np.full(count, -1), alone)
    rows = [tokens[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    keys = [row.astype(">i4").tobytes() for row in rows]  # bytes compare as the tokens do
    ordered = sorted(range(count), key=keys.__getitem__)
    common = [_common(rows[one], rows[other]) for one, other in pairwise(ordered)]
    return _Builder(np.array(ordered), np.array(common), lengths).built()


class _Builder:
    """Visits neighbours in lexical order: a node is a run of them, as long as the two with least in common are alike."""

    def __init__(self, ordered: Indices, common: Indices, lengths: Indices) -> None:
        self._ordered = ordered
        self._common = common  # [S - 1] tokens that each shares with the next
        self._lengths = lengths
        self._nodes: list[tuple[int, int, int, int]] = []  # begin, end, sequence, parent
        self._last = np.zeros(len(ordered), np.int64)

    def built(self) -> PrefixTree:
        waiting = [(low, high, 0, -1) for low, high in reversed(self._apart(0, len(self._ordered), 0))]
        while waiting:
            low, high, begin, parent = waiting.pop()
            end = int(self._lengths[self._ordered[low]]) if high - low == 1 else int(self._common[low : high - 1].min())
            runs = self._apart(low, high, end)
            if high - low == 1 or (end - begin) * (len(runs) - 1) >= LEAST_SAVED:
                members = self._ordered[low:high]
                self._nodes.append((begin, end, int(members.min()), parent))
                begin, parent = end, len(self._nodes) - 1
                ended = [(a, b) for a, b in runs if int(self._lengths[self._ordered[a]]) == end]
                for a, b in ended:
                    self._last[self._ordered[a:b]] = parent
                runs = [run for run in runs if run not in ended]
            waiting += [(a, b, begin, parent) for a, b in reversed(runs)]
        begins, ends, sequences, parents = (np.array(column, np.int64) for column in zip(*self._nodes, strict=True))
        return PrefixTree(begins, ends, sequences, parents, self._last)

    def _apart(self, low: int, high: int, length: int) -> list[tuple[int, int]]:
        """The runs that branch after `length` tokens, by the first sequence of each."""
        cuts = (np.flatnonzero(self._common[low : high - 1] <= length) + low + 1).tolist()
        runs = list(zip([low, *cuts], [*cuts, high], strict=True))
        return sorted(runs, key=lambda run: int(self._ordered[run[0] : run[1]].min())) if len(runs) > 1 else runs


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of tokens at the beginning of both."""
    least = min(len(one), len(other))
    differs = one[:least] != other[:least]
    return int(differs.argmax()) if differs.any() else least
