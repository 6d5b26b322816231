"""Sequences -> one packed row of tokens for the model, and the padded view of it that attention needs.

Linear layers see N tokens in a row, without padding. Sequences of a group that begin alike (the prompt) share the
tokens of that beginning: they are computed once, and their gradients add up. For 128 completions of 25 tokens to 16
prompts of 35 that is 3,760 tokens in place of 7,680.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]

BUCKET_FILL = 0.7  # a bucket's shortest sequence is at least this part of its longest: padding stays below 30 %
BUCKET_FLOOR = 16  # or within this many tokens of it: many tiny buckets cost more than their padding


@dataclass(frozen=True)
class Bucket:
    """S sequences of similar length in the padded layout: row `s * length + t` of this bucket."""

    sequences: int
    length: int


@dataclass(frozen=True)
class Packing:
    """One forward pass. P rows of the padded layout, all buckets one after another; N packed tokens."""

    tokens: Tensor  # i64[1, N]
    positions: Tensor  # i64[1, N]
    rows: Tensor  # i64[P] the packed token that stands in each padded row; padding repeats a sequence's last token
    home: Tensor  # i64[N] a padded row in which the packed token stands
    again: Tensor  # i64[D] padded rows in which a token stands that has its home elsewhere (shared beginnings)
    buckets: tuple[Bucket, ...]
    slots: Indices  # i64[sum of lengths] the packed place of every token of every sequence, in the order given

    def at(self, places: Indices) -> Tensor:
        """Where the tokens at these places (of the sequences laid end to end) stand in the packed row."""
        return torch.from_numpy(self.slots[places]).to(self.tokens.device)


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
    kept = lengths - shared  # [S] tokens of its own
    base = np.cumsum(kept) - kept  # [S] where they begin in the packed row
    of = np.repeat(np.arange(len(lengths)), lengths)  # [n] the sequence of every token
    t = np.arange(len(tokens)) - starts[of]  # [n] its position there
    borrowed = t < shared[of]
    slots = np.where(borrowed, base[owner[of]] + t, base[of] + t - shared[of])

    order, buckets = _buckets(lengths)
    widths = np.repeat([bucket.length for bucket in buckets], [bucket.sequences for bucket in buckets]).astype(np.int64)
    first = np.empty(len(lengths), dtype=np.int64)  # [S] padded row of each sequence's first token
    first[order] = np.cumsum(widths) - widths
    padded = np.repeat(order, widths)  # [P] the sequence of every padded row
    place = np.minimum(np.arange(len(padded)) - first[padded], lengths[padded] - 1)

    packed = np.empty(int(kept.sum()), dtype=np.int64)
    positions, home = np.empty_like(packed), np.empty_like(packed)
    packed[slots], positions[slots] = tokens, t
    home[slots[~borrowed]] = (first[of] + t)[~borrowed]
    again = (first[of] + t)[borrowed]

    def tensor(values: Indices) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Packing(
        tokens=tensor(packed)[None],
        positions=tensor(positions)[None],
        rows=tensor(slots[starts[padded] + place]),
        home=tensor(home),
        again=tensor(again),
        buckets=buckets,
        slots=slots,
    )


def microbatches(lengths: Indices, order: Indices, limit: int) -> list[Indices]:
    """Cut `order` (sequence numbers) into runs of at most `limit` tokens; a longer sequence gets a run of its own."""
    runs: list[Indices] = []
    begin, held = 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        if held and held + length > limit:
            runs.append(order[begin:place])
            begin, held = place, 0
        held += length
    if begin < len(order):
        runs.append(order[begin:])
    return runs


def _common_beginnings(
    tokens: NDArray[np.int32], starts: Indices, lengths: Indices, group: NDArray[np.int32] | None
) -> tuple[Indices, Indices]:
    """Per sequence: whose beginning it borrows, and how many tokens of it."""
    owner = np.arange(len(lengths))
    shared = np.zeros(len(lengths), dtype=np.int64)
    if group is None or len(group) < 2:
        return owner, shared
    edges = np.flatnonzero(np.diff(group)) + 1
    for members in np.split(owner, edges):
        if len(members) < 2:
            continue
        width = int(lengths[members].min()) - 1  # one token stays its own, so that no sequence is empty
        table = tokens[starts[members][:, None] + np.arange(width)]  # [G, width]
        differs = np.flatnonzero((table != table[0]).any(axis=0))
        shared[members[1:]] = differs[0] if len(differs) else width
        owner[members] = members[0]
    return owner, shared


def _buckets(lengths: Indices) -> tuple[Indices, tuple[Bucket, ...]]:
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Bucket] = []
    begin = 0
    ordered: Sequence[int] = lengths[order].tolist()
    for place in range(1, len(ordered) + 1):
        longest = ordered[begin]
        if place == len(ordered) or ordered[place] < min(BUCKET_FILL * longest, longest - BUCKET_FLOOR):
            buckets.append(Bucket(place - begin, longest))
            begin = place
    return order, tuple(buckets)
