"""Sequences -> one packed row of tokens for the model, and the padded view of it that attention needs. Which sequences are in
a batch is decided before, in core's `training/packing.py`.

Linear layers see N tokens in a row, without padding. Sequences of a group that begin alike (the prompt) share the
tokens of that beginning: they are computed once, and their gradients add up. For 128 completions of 25 tokens to 16
prompts of 35 that is 3,760 tokens in place of 7,680, and a step takes half the time (README.md, Speed).

Attention sees segments: a shared beginning is one, the rest of each sequence is another, whose keys are that beginning
and itself. Segments of similar length form a bucket, padded to a common shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]

BUCKET_FILL = 0.9  # a bucket's shortest segment is at least this part of its longest: padding stays below 10 %
BUCKET_FLOOR = 4  # or within this many tokens of it: many tiny buckets cost more than their padding


@dataclass(frozen=True)
class Bucket:
    """S segments, padded: beginnings to the left of Tk - Tq keys, the rest to the right of Tq queries and keys."""

    segments: int  # S
    queries: int  # Tq
    keys: int  # Tk
    mask: Tensor | None  # bool[S, 1, Tq, Tk] what a query may see; None: plain causal, Tq = Tk


@dataclass(frozen=True)
class Packing:
    """One forward pass over N packed tokens. Padded rows are counted through all buckets, one after another."""

    tokens: Tensor  # i64[1, N]
    positions: Tensor  # i64[1, N]
    queries: Tensor  # i64[sum S*Tq] the packed token in each padded query row
    keys: Tensor  # i64[sum S*Tk] the packed token in each padded key row
    query_home: (
        Tensor  # i64[N] the one query row where a packed token really stands; other rows that hold it are padding
    )
    key_home: Tensor  # i64[N] the key row within the same segment
    key_again: Tensor  # i64[D] the key rows of shared beginnings within the segments that follow them
    buckets: tuple[Bucket, ...]
    slots: Indices  # i64[sum of lengths] the packed place of every token of every sequence, in the order given

    @property
    def padding(self) -> float:
        """Rows of queries and keys that are there for their shape alone, over those that attention needs."""
        real = 2 * len(self.query_home) + len(self.key_again)
        return (len(self.queries) + len(self.keys)) / real - 1

    def at(self, indices: Indices) -> Tensor:
        """Where the tokens at these positions (of the sequences laid end to end) stand in the packed row."""
        return torch.from_numpy(self.slots[indices]).to(self.tokens.device)


def pack(
    tokens: NDArray[np.int32],
    lengths: Indices,
    device: torch.device | str = "cpu",
    group: NDArray[np.int32] | None = None,
) -> Packing:
    """Lay out sequences that stand end to end in `tokens`, each of at least one token. With `group`, neighbours of one
    group share the beginning that they have in common."""
    starts = np.cumsum(lengths) - lengths  # [S]
    owner, shared = _common_beginnings(tokens, starts, lengths, group)
    own = lengths - shared  # [S]
    owns = (owner == np.arange(len(lengths))) & (shared > 0)  # its packed tokens are the beginning and its own
    ends = np.cumsum(own + shared * owns)
    rest = ends - own  # [S] packed place of the first token of its own
    head = rest[owner] - shared  # [S] packed place of its beginning
    of = np.repeat(np.arange(len(lengths)), lengths)  # [n] the sequence of every token
    t = np.arange(len(tokens)) - starts[of]  # [n] its position there
    slots = np.where(t < shared[of], head[of] + t, rest[of] + t - shared[of])
    packed, positions = np.empty(int(ends[-1]), dtype=np.int64), np.empty(int(ends[-1]), dtype=np.int64)
    packed[slots], positions[slots] = tokens, t

    beginnings = np.flatnonzero(owns)
    nothing = np.zeros(len(beginnings), dtype=np.int64)
    layout = _Layout(len(packed), device)
    for segments in _alike_in_both(head[beginnings], shared[beginnings], nothing, nothing):
        layout.add(*segments)
    for segments in _alike_in_both(rest, own, head, shared):
        layout.add(*segments)

    def tensor(values: Indices) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Packing(
        tokens=tensor(packed)[None],
        positions=tensor(positions)[None],
        queries=tensor(np.concatenate(layout.queries)),
        keys=tensor(np.concatenate(layout.keys)),
        query_home=tensor(layout.query_home),
        key_home=tensor(layout.key_home),
        key_again=tensor(np.concatenate(layout.key_again)),
        buckets=tuple(layout.buckets),
        slots=slots,
    )


class _Layout:
    """The padded layout, bucket by bucket."""

    def __init__(self, tokens: int, device: torch.device | str) -> None:
        self.buckets: list[Bucket] = []
        self.queries: list[Indices] = []
        self.keys: list[Indices] = []
        self.key_again: list[Indices] = []
        self.query_home = np.empty(tokens, dtype=np.int64)
        self.key_home = np.empty(tokens, dtype=np.int64)
        self._query_rows = self._key_rows = 0
        self._device = device

    def add(self, first: Indices, length: Indices, before: Indices, before_length: Indices) -> None:
        """A bucket of segments: packed place and length of each, and of the beginning that it follows."""
        segments, right, left = len(first), int(length.max()), int(before_length.max())
        column = np.arange(right)
        real = column < length[:, None]  # [S, Tq]
        place = first[:, None] + np.minimum(column, length[:, None] - 1)  # padding repeats the last token
        back = np.arange(left) - (left - before_length[:, None])  # [S, Tk - Tq] negative where padded
        there = back >= 0
        earlier = np.where(there, before[:, None] + back, first[:, None])

        query_row = self._query_rows + np.arange(segments * right).reshape(segments, right)
        key_row = self._key_rows + np.arange(segments * (left + right)).reshape(segments, left + right)
        self.query_home[place[real]] = query_row[real]
        self.key_home[place[real]] = key_row[:, left:][real]
        self.key_again.append(key_row[:, :left][there])
        self.queries.append(place.ravel())
        self.keys.append(np.concatenate([earlier, place], axis=1).ravel())
        self._query_rows += query_row.size
        self._key_rows += key_row.size

        mask = None
        if left:
            causal = np.broadcast_to(np.tri(right, dtype=np.bool_), (segments, right, right))
            seen = np.broadcast_to(there[:, None, :], (segments, right, left))
            mask = torch.from_numpy(np.concatenate([seen, causal], axis=2)[:, None]).to(self._device)
        self.buckets.append(Bucket(segments, right, left + right, mask))


def microbatches(
    lengths: Indices,
    order: Indices,
    limit: int,
    tokens: NDArray[np.int32] | None = None,
    group: NDArray[np.int32] | None = None,
) -> list[Indices]:
    """`order` (sequence numbers, groups together) in runs of at most `limit` packed tokens; a longer sequence gets a run of
    its own. With `tokens` and `group`, what the sequences of a group have in common counts once a run.

    Runs are as few as two ways of filling them find, and then of near counts: cuts through `order` where it stands, or
    whole groups, largest first, each to the run that holds least."""
    if not len(order):
        return []
    own, shared, of = _counts(lengths, order, tokens, group)
    indices = np.arange(len(order))
    least = int((own + shared).max())
    cut = _cut(own, shared, of, indices, limit)
    low, high = min(least, limit), limit  # the lowest capacity that needs no more runs is the one that evens them out
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(own, shared, of, indices, middle)) <= len(cut) else (middle + 1, high)
    filled = _filled(own, shared, of, limit, fewer_than=len(cut))
    return [order[run] for run in filled or _cut(own, shared, of, indices, high)]


def _counts(
    lengths: Indices, order: Indices, tokens: NDArray[np.int32] | None, group: NDArray[np.int32] | None
) -> tuple[Indices, Indices, Indices]:
    """Per place in `order`: packed tokens of the sequence's own, those of its beginning, and whose beginning it is."""
    ordered = lengths[order]
    if tokens is None or group is None:
        return ordered, np.zeros_like(ordered), np.arange(len(order))
    starts = (np.cumsum(lengths) - lengths)[order]
    of, shared = _common_beginnings(tokens, starts, ordered, group[order])
    return ordered - shared, shared, of


def _cut(own: Indices, shared: Indices, of: Indices, indices: Indices, limit: int) -> list[Indices]:
    """Cuts through `indices` wherever the next sequence would exceed the limit."""
    cuts, filled_tokens, last = [0], 0, -1
    for at, (rest, beginning, whose) in enumerate(
        zip(own[indices].tolist(), shared[indices].tolist(), of[indices].tolist(), strict=True)
    ):
        more = rest if whose == last else rest + beginning
        if filled_tokens and filled_tokens + more > limit:
            cuts.append(at)
            filled_tokens, more = 0, rest + beginning
        filled_tokens, last = filled_tokens + more, whose
    return np.split(indices, cuts[1:])


def _filled(own: Indices, shared: Indices, of: Indices, limit: int, fewer_than: int) -> list[Indices] | None:
    """Runs of whole groups, where these are fewer; a group that is larger than the limit is cut."""
    groups = np.split(np.arange(len(own)), np.flatnonzero(np.diff(of)) + 1)
    parts = [part for members in groups for part in _cut(own, shared, of, members, limit)]
    sizes = np.array([int(own[part].sum() + shared[part[0]]) for part in parts])
    largest_first = np.argsort(-sizes, kind="stable").tolist()
    alone = int((sizes > limit).sum())
    for count in range(max(1, alone - (-int(sizes[sizes <= limit].sum()) // limit)), fewer_than):
        filled_tokens = np.zeros(count, np.int64)
        runs: list[list[int]] = [[] for _ in range(count)]
        for part in largest_first:
            least = int(filled_tokens.argmin())
            runs[least].append(part)
            filled_tokens[least] += sizes[part]
        if all(filled_tokens[i] <= limit or len(run) == 1 for i, run in enumerate(runs)):
            return [np.concatenate([parts[part] for part in sorted(run)]) for run in runs]
    return None


def _common_beginnings(
    tokens: NDArray[np.int32], starts: Indices, lengths: Indices, group: NDArray[np.int32] | None
) -> tuple[Indices, Indices]:
    """Per sequence: with whom it shares its beginning (the first of its group), and how many tokens of it."""
    owner = np.arange(len(lengths))
    shared = np.zeros(len(lengths), dtype=np.int64)
    if group is None or len(group) < 2:
        return owner, shared
    for members in np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(group)) + 1):
        if len(members) > 1:
            width = int(lengths[members].min()) - 1  # one token stays its own, so that no segment is empty
            table = tokens[starts[members][:, None] + np.arange(width)]  # [G, width]
            differs = np.flatnonzero((table != table[0]).any(axis=0))
            shared[members] = differs[0] if len(differs) else width
            owner[members] = members[0]
    return owner, shared


def _alike_in_both(*columns: Indices) -> Iterator[tuple[Indices, ...]]:
    """Segments (first, length, before, before_length), cut into buckets that are alike in both lengths."""
    for alike in _alike(columns[1]):
        for chosen in _alike(columns[3][alike]):
            yield tuple(column[alike[chosen]] for column in columns)


def _alike(lengths: Indices) -> Iterator[Indices]:
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order].tolist()
    begin = 0
    for place in range(1, len(ordered) + 1):
        longest = ordered[begin]
        if place == len(ordered) or ordered[place] < min(BUCKET_FILL * longest, longest - BUCKET_FLOOR):
            yield order[begin:place]
            begin = place
