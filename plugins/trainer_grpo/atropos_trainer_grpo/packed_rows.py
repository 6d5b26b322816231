"""Pack sequences into one row of tokens for the model, with the padded view of it that attention needs. Core's `training/batch.py` has
already chosen the sequences of a batch.

Linear layers see N tokens in a row, without padding. A common beginning of sequences (prefix_tree.py: a group's prompt, the turns before a
branch) is stored and computed once, and its gradients add up. For 128 completions of 25 tokens to 16 prompts of 35 that is 3,760 tokens
instead of 7,680, and a step takes half the time (README.md, Speed).

Attention sees segments, the nodes of that tree: the keys of a segment are those above it and its own. In the padded layout segments of
similar length form a bucket, padded to a common shape. Otherwise there are runs of queries and keys, level by level of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_trainer_grpo.prefix_tree import Indices, PrefixTree, pays_by_levels, tree_of

if TYPE_CHECKING:
    from atropos_trainer_grpo.router_replay import Recorded

BUCKET_FILL = 0.9  # a bucket's shortest segment is at least this part of its longest: padding stays below 10 %
BUCKET_FLOOR = 4  # or within this many tokens of it: many tiny buckets cost more than their padding


@dataclass(frozen=True)
class Bucket:
    """S padded segments. On the left are the Tk - Tq keys above them, on the right their own Tq queries and keys."""

    segments: int  # S
    queries: int  # Tq
    keys: int  # Tk
    mask: Tensor | None  # bool[S, 1, Tq, Tk] the keys that a query may see; None: plain causal, Tq = Tk

    def seen(self, window: int | None, device: torch.device) -> Tensor | None:
        """`mask` for a layer in which a token sees itself and the window - 1 tokens before it. A key is as many tokens before a query as
        it is columns to the left: above a segment is what directly precedes it."""
        if window is None or window >= self.keys:
            return self.mask
        column = torch.arange(self.keys, device=device)
        before = column[self.keys - self.queries :, None] - column  # [Tq, Tk] negative: after
        near = before < window
        return near & (before >= 0) if self.mask is None else near & self.mask


@dataclass(frozen=True)
class Runs:
    """S runs of queries, each with the run of keys that it sees, one after another without padding."""

    queries: Tensor  # i64[R] the packed token in each query row
    keys: Tensor  # i64[C] and in each key row
    query_ends: Tensor  # i32[S + 1] rows before each run, and the total
    key_ends: Tensor  # i32[S + 1]
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Packing:
    """One forward pass over N packed tokens. Padded rows are counted through all buckets, one after another."""

    tokens: Tensor  # i64[1, N]
    positions: Tensor  # i64[1, N]
    queries: Tensor  # i64[sum S*Tq] the packed token in each padded query row
    keys: Tensor  # i64[sum S*Tk] the packed token in each padded key row
    query_home: Tensor  # i64[N] the one query row of a packed token; other rows that hold it are padding
    key_home: Tensor  # i64[N] the key row within the same segment
    key_again: Tensor  # i64[D] the repeated key rows of tokens, in segments below their own
    buckets: tuple[Bucket, ...]  # empty without a padded layout
    slots: Indices  # i64[sum of lengths] the packed place of every token of every sequence, in the given order
    longest: int  # tokens of the longest sequence
    alone: bool  # one sequence: there is nothing to gather
    # Instead of the padded layout: all segments with themselves, then for each level of the tree the tokens below it.
    levels: tuple[Runs, ...]
    experts: Recorded | None = None  # of each packed token, for router_replay.py

    @property
    def padding(self) -> float:
        """Rows of queries and keys that exist only for their shape, divided by those that attention needs."""
        real = 2 * len(self.query_home) + len(self.key_again)
        return (len(self.queries) + len(self.keys)) / real - 1

    def at(self, indices: Indices) -> Tensor:
        """The places in the packed row of the tokens at these positions (of the sequences laid end to end)."""
        return torch.from_numpy(self.slots[indices]).to(self.tokens.device)


def pack(
    tokens: NDArray[np.int32],
    lengths: Indices,
    device: torch.device | str = "cpu",
    *,
    share: bool = False,
    attention: str = "padded",
) -> Packing:
    """Lay out sequences that stand end to end in `tokens`, each of at least one token. With `share`, a common beginning is stored
    once. `attention` is trainer.attention: flash goes by levels instead of the padded layout, auto does so if that is faster."""
    starts = np.cumsum(lengths) - lengths  # [S]
    tree = tree_of(tokens, starts, lengths, share=share)
    own = tree.end - tree.begin  # [M]
    ends = np.cumsum(own)
    first = ends - own  # [M] packed place of a node's first token
    slots = np.empty(len(tokens), dtype=np.int64)
    for sequence, start in enumerate(starts.tolist()):
        for node in tree.path(sequence):
            slots[start + tree.begin[node] : start + tree.end[node]] = np.arange(first[node], ends[node])
    packed, positions = np.empty(int(ends[-1]), dtype=np.int64), np.empty(int(ends[-1]), dtype=np.int64)
    packed[slots] = tokens
    positions[slots] = np.arange(len(tokens)) - np.repeat(starts, lengths)

    leveled = attention == "flash" or (
        attention == "auto" and pays_by_levels(int((own + tree.begin).sum()), len(packed), len(own))
    )
    layout = _Layout(len(packed), slots, device)
    above = starts[tree.sequence]  # [M] start in `slots` of the places of everything above a node
    for nodes in () if leveled else (np.flatnonzero(tree.inner), np.flatnonzero(~tree.inner)):
        for segments in _alike_in_both(first[nodes], own[nodes], above[nodes], tree.begin[nodes]):
            layout.add(*segments)

    def tensor(values: Indices) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Packing(
        tokens=tensor(packed)[None],
        positions=tensor(positions)[None],
        queries=tensor(layout.joined(layout.queries)),
        keys=tensor(layout.joined(layout.keys)),
        query_home=tensor(layout.query_home),
        key_home=tensor(layout.key_home),
        key_again=tensor(layout.joined(layout.key_again)),
        buckets=tuple(layout.buckets),
        slots=slots,
        longest=int(lengths.max()),
        alone=len(own) == 1,
        levels=tuple(_levels(tree, first, ends, device)) if leveled else (),
    )


def _levels(tree: PrefixTree, first: Indices, ends: Indices, device: torch.device | str) -> Iterator[Runs]:
    """Yield the runs of each level. A node's tokens are `first` to `ends` [M] in the packed row."""
    yield _runs_of(first, ends, first, ends, device)
    depth = np.zeros(len(first), np.int64)
    for node, parent in enumerate(tree.parent.tolist()):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    below, inner = _ends_below(tree.parent, ends), tree.inner
    for level in np.unique(depth[inner]):
        nodes = np.flatnonzero(inner & (depth == level))
        yield _runs_of(ends[nodes], below[nodes], first[nodes], ends[nodes], device)


def _runs_of(
    query_first: Indices, query_end: Indices, key_first: Indices, key_end: Indices, device: torch.device | str
) -> Runs:
    def laid_out(first: Indices, end: Indices) -> tuple[Tensor, Tensor, int]:
        lengths = end - first
        after = np.cumsum(lengths)
        rows = np.arange(int(after[-1])) + np.repeat(first - (after - lengths), lengths)
        ends = np.concatenate([[0], after]).astype(np.int32)
        return torch.from_numpy(rows).to(device), torch.from_numpy(ends).to(device), int(lengths.max())

    (queries, query_ends, longest_query), (keys, key_ends, longest_key) = (
        laid_out(query_first, query_end), laid_out(key_first, key_end)
    )  # fmt: skip
    return Runs(queries, keys, query_ends, key_ends, longest_query, longest_key)


def _ends_below(parent: Indices, ends: Indices) -> Indices:
    """[M] The end of the last node below each node; nodes below a node follow it."""
    last = ends.copy()
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            last[parent[node]] = max(last[parent[node]], last[node])
    return last


class _Layout:
    """The padded layout, bucket by bucket."""

    def __init__(self, tokens: int, slots: Indices, device: torch.device | str) -> None:
        self.buckets: list[Bucket] = []
        self.queries: list[Indices] = []
        self.keys: list[Indices] = []
        self.key_again: list[Indices] = []
        self.query_home = np.empty(tokens, dtype=np.int64)
        self.key_home = np.empty(tokens, dtype=np.int64)
        self._query_rows = self._key_rows = 0
        self._slots = slots
        self._device = device

    @staticmethod
    def joined(parts: list[Indices]) -> Indices:
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def add(self, first: Indices, length: Indices, above: Indices, depth: Indices) -> None:
        """Add a bucket of segments: packed place and length of each, the start in `slots` of the places of the tokens above it, and their
        number."""
        segments, right, left = len(first), int(length.max()), int(depth.max())
        column = np.arange(right)
        real = column < length[:, None]  # [S, Tq]
        place = first[:, None] + np.minimum(column, length[:, None] - 1)  # padding repeats the last token
        back = np.arange(left) - (left - depth[:, None])  # [S, Tk - Tq] negative: padding
        there = back >= 0
        earlier = np.where(there, self._slots[above[:, None] + np.maximum(back, 0)], first[:, None])

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
    """Cut `order` (sequence numbers, groups together) into runs of at most `limit` packed tokens; a longer sequence gets its own run.
    With `tokens` and `group`, a common beginning of the sequences of a run counts once, and the sequences of a group are ordered by what
    they share.

    Two ways of filling are tried for the fewest runs, which are then made about equal: cutting through `order`, or placing whole groups,
    largest first, each in the emptiest run."""
    if not len(order):
        return []
    alone = [order[run] for run in _runs(lengths[order], np.zeros(len(order), np.int64), np.arange(len(order)), limit)]
    if tokens is None or group is None or len(alone) == 1:
        return alone
    starts = np.cumsum(lengths) - lengths
    alike, shared = _by_prefix(tokens, starts, lengths, order, group)
    of = np.cumsum(np.diff(group[alike], prepend=group[alike[0]]) != 0)
    runs = [alike[run] for run in _runs(lengths[alike], shared, of, limit)]

    def fits(run: Indices) -> bool:
        return (
            len(run) == 1 or lengths[run].sum() <= limit or tree_of(tokens, starts[run], lengths[run]).tokens <= limit
        )

    if not all(fits(run) for run in runs):  # a separate run may share less: nodes that save little are dropped
        runs = _greedy(alike, fits)
    return min(runs, alone, key=len)


def _greedy(order: Indices, fits: Callable[[Indices], bool]) -> list[Indices]:
    """Cut through `order` before each sequence that would not fit."""
    runs, begin = [], 0
    for end in range(1, len(order) + 1):
        if not fits(order[begin:end]):
            runs.append(order[begin : end - 1])
            begin = end - 1
    return [*runs, order[begin:]]


def _by_prefix(
    tokens: NDArray[np.int32], starts: Indices, lengths: Indices, order: Indices, group: NDArray[np.int32]
) -> tuple[Indices, Indices]:
    """`order` with each group sorted by common beginnings, and the number of tokens that each shares with the one before it."""
    orders, shares = [], []
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        tree = tree_of(tokens, starts[members], lengths[members])
        orders.append(members[tree.order])
        shares.append(tree.shared())
    return np.concatenate(orders), np.concatenate(shares)


def _runs(lengths: Indices, shared: Indices, of: Indices, limit: int) -> list[Indices]:
    """Places [S] in runs, by each one's length, the tokens that it shares with the one before, and its group."""
    indices = np.arange(len(lengths))
    cut = _cut(lengths, shared, indices, limit)
    low, high = (
        min(int(lengths.max()), limit),
        limit,
    )  # the lowest capacity that needs no more runs is the one that evens them out
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, shared, indices, middle)) <= len(cut) else (middle + 1, high)
    return _filled(lengths, shared, of, limit, fewer_than=len(cut)) or _cut(lengths, shared, indices, high)


def _cut(lengths: Indices, shared: Indices, indices: Indices, limit: int) -> list[Indices]:
    """Cut through `indices` before each sequence that would exceed the limit."""
    cuts, filled_tokens = [0], 0
    for at, (length, common) in enumerate(zip(lengths[indices].tolist(), shared[indices].tolist(), strict=True)):
        more = length - common if at > cuts[-1] else length
        if filled_tokens and filled_tokens + more > limit:
            cuts.append(at)
            filled_tokens, more = 0, length
        filled_tokens += more
    return np.split(indices, cuts[1:])


def _filled(lengths: Indices, shared: Indices, of: Indices, limit: int, fewer_than: int) -> list[Indices] | None:
    """Runs of whole groups, if these are fewer; a group larger than the limit is cut."""
    groups = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(of)) + 1)
    parts = [part for members in groups for part in _cut(lengths, shared, members, limit)]
    sizes = np.array([int(lengths[part].sum() - shared[part[1:]].sum()) for part in parts])
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


def _alike_in_both(*columns: Indices) -> Iterator[tuple[Indices, ...]]:
    """Segments (first, length, before, before_length), cut into buckets of similar lengths."""
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
