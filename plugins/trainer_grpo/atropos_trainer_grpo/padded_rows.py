"""Lay out sequences one to a row, padded on the right, for models whose layers would mix packed sequences.

Attention is the model's own. Padding needs no mask, because a causal model looks only to the left, and all padding is on the right. The
probe (layout_probe.py) finds a model that looks to the right all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_trainer_grpo.prefix_tree import Indices

if TYPE_CHECKING:
    from atropos_trainer_grpo.router_replay import Recorded


@dataclass(frozen=True)
class PaddedRows:
    """One forward pass over S sequences of at most T tokens. `at` and `slots` are those of `Packing`."""

    tokens: Tensor  # i64[S, T] padding repeats a row's last token
    slots: Indices  # i64[sum of lengths] the place in the flattened rows of every token of every sequence
    experts: Recorded | None = None  # of each place in the flattened rows, for router_replay.py

    def at(self, indices: Indices) -> Tensor:
        """The places in the flattened rows of the tokens at these positions (of the sequences laid end to end)."""
        return torch.from_numpy(self.slots[indices]).to(self.tokens.device)


def pad(tokens: NDArray[np.int32], lengths: Indices, device: torch.device | str = "cpu") -> PaddedRows:
    """Lay out sequences that stand end to end in `tokens`, each of at least one token."""
    starts = np.cumsum(lengths) - lengths  # [S]
    column = np.arange(int(lengths.max()))
    rows = tokens[starts[:, None] + np.minimum(column, lengths[:, None] - 1)].astype(np.int64)  # [S, T]
    slots = np.flatnonzero(column < lengths[:, None])
    return PaddedRows(torch.from_numpy(rows).to(device), slots)


def row_microbatches(longest: Indices, order: Indices, limit: int, count: Indices | None = None) -> list[Indices]:
    """Cut `order` into runs of items of similar length, each of at most `limit` tokens, padding included. An item is one sequence, or
    an episode of `count` sequences, the longest of which has `longest` tokens. A larger item gets its own run."""
    if not len(order):
        return []
    rows = np.ones_like(longest) if count is None else count
    by_length = order[np.argsort(-longest[order], kind="stable")]
    cuts, width, filled = [0], 0, 0
    for at, (length, several) in enumerate(zip(longest[by_length].tolist(), rows[by_length].tolist(), strict=True)):
        if filled and (filled + several) * width > limit:
            cuts.append(at)
            filled = 0
        if not filled:
            width = length
        filled += several
    return np.split(by_length, cuts[1:])
