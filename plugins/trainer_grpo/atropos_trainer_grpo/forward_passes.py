"""Forward passes over one batch: in micro-batches, and on several ranks each by its own part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.types import Batch, Bools, Floats
from atropos_trainer_grpo.attention import attention_of, window_of
from atropos_trainer_grpo.columns import columns_of, token_positions
from atropos_trainer_grpo.distillation import Taught
from atropos_trainer_grpo.episodes import Episodes, side_by_side
from atropos_trainer_grpo.kept_tokens import kept_rows
from atropos_trainer_grpo.logprobs import Scored
from atropos_trainer_grpo.model import language_model, lay_out_tokens, layout_of_model, score, score_empty
from atropos_trainer_grpo.packed_rows import microbatches
from atropos_trainer_grpo.padded_rows import row_microbatches
from atropos_trainer_grpo.process_group import ALONE, ProcessGroup
from atropos_trainer_grpo.router_replay import replay_of

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions

Indices = NDArray[np.int64]

WORTH_JOINING = 0.95  # of rows of logits that are left where those of shared tokens are computed once


class ForwardPasses:
    """Forward passes of `model`, unless a call names another model."""

    def __init__(
        self, model: torch.nn.Module, batch: Batch, options: GrpoOptions, device: str, group: ProcessGroup = ALONE
    ) -> None:
        self.batch = batch = side_by_side(batch)
        self.episodes = Episodes.of(batch)
        self.columns = columns_of(batch, options)
        self.kept_sizes = batch.kept_sizes  # [N]
        self.owner = np.repeat(np.arange(batch.sequences), batch.lengths)  # [N] the sequence of each token
        self.group = group
        self._model = model
        self._options = options
        self._device = device
        self._is_padded = layout_of_model(model).name == "rows"
        config = language_model(model).config
        self._attention = "" if self._is_padded else attention_of(options.attention, config, device)
        self._window = window_of(config)

    def parts(self, sequences: Indices, *, whole: bool = False) -> list[Indices]:
        """This rank's micro-batches; an empty one is a pass that the others make. `whole`: each has whole episodes, all of
        whose sequences are among the given ones."""
        lengths, group = self.batch.lengths, self.batch.group
        if whole and self.episodes.several:
            first = self.episodes.first
            episodes = self.episodes.numbers(sequences)
            if self._is_padded:
                longest, count = np.maximum.reduceat(lengths, first), np.diff(np.append(first, len(lengths)))
                parts = self._cut_rows(episodes, longest, count)
            else:
                parts = self._cut(episodes, np.add.reduceat(lengths, first), group[first])
            return [self.episodes.sequences(part) for part in parts]
        if self._is_padded:
            return self._cut_rows(sequences, lengths, np.ones_like(lengths))
        return self._cut(sequences, lengths, group)

    def _cut_rows(self, order: Indices, longest: Indices, count: Indices) -> list[Indices]:
        limit = self._options.tokens_per_microbatch
        return self.group.passes(longest * count, order, lambda part: row_microbatches(longest, part, limit, count))

    def _cut(self, order: Indices, lengths: Indices, group: NDArray[np.int32]) -> list[Indices]:
        limit = self._options.tokens_per_microbatch
        shared = (self.batch.tokens, group) if self._options.share_prompts else (None, None)
        return self.group.passes(lengths, order, lambda part: microbatches(lengths, part, limit, *shared))

    def score(
        self, sequences: Indices, model: torch.nn.Module | None = None, taught: Taught | None = None
    ) -> tuple[Scored, Indices]:
        """Run one forward pass. Returns the scored tokens of these sequences, and their positions in the batch [R]. With
        `taught`, also logprobs of the teacher's tokens."""
        batch, columns = self.batch, self.columns
        at = token_positions(batch.offsets, sequences)
        tokens = batch.tokens[at]
        model = model or self._model
        lengths = batch.lengths[sequences]
        padded = self._attention == "auto" and lengths.max() > self._window
        packing = lay_out_tokens(
            model,
            tokens,
            lengths,
            self._device,
            share=self._options.share_prompts,
            attention="padded" if padded else self._attention,
        )
        if (replay := replay_of(language_model(model))) is not None:
            experts = replay.of(batch, at, packing.slots, packing.tokens.numel(), self._device)
            packing = replace(packing, experts=experts)
        rows = np.flatnonzero(columns.scored[at])
        temperature = np.repeat(columns.temperature[sequences], batch.lengths[sequences])[rows]
        kept = kept_rows(batch, at[rows], self._device)  # rows that share their tokens may differ in what was kept
        once, of = distinct_rows(packing.slots[rows], temperature, worth=taught is None and kept is None)
        scored = score(
            model,
            packing,
            packing.at(rows[once] - 1),
            self.tensor(tokens[rows[once]].astype(np.int64)),
            None if (temperature == 1).all() else self.tensor(temperature[once]),
            self._options.logprob_chunk,
            None if taught is None else self.tensor(taught.rows(at[rows])[0]),
            kept,
        )
        if of is not None:
            each = self.tensor(of)
            scored = Scored(scored.logprobs.index_select(0, each), scored.entropy.index_select(0, each))
        return scored, at[rows]

    def score_empty(self, model: torch.nn.Module | None = None) -> Tensor:
        """The pass of an empty micro-batch."""
        return score_empty(model or self._model, self._device)

    def over(self, sequences: Indices, model: torch.nn.Module | None = None) -> Iterator[tuple[Scored, Indices]]:
        """`score` of this rank's micro-batches, one after another."""
        for part in self.parts(sequences):
            if len(part):
                yield self.score(part, model)
            else:
                self.score_empty(model)

    @torch.no_grad()
    def computed(self, wanting: Bools, known: Floats, model: torch.nn.Module | None = None) -> Floats:
        """Return `known` [N], with logprobs from a pass without gradient at the tokens in `wanting`. Collective."""
        sequences = np.flatnonzero(np.logical_or.reduceat(wanting, self.batch.offsets[:-1]))
        made = np.zeros(len(known), np.float32)
        for scored, positions in self.over(sequences, model):
            wanted = wanting[positions]
            made[positions[wanted]] = scored.logprobs.cpu().float().numpy()[wanted]
        return np.where(wanting, self.group.sum_array(made), known)

    def tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def distinct_rows(places: Indices, temperature: Floats, *, worth: bool) -> tuple[Indices | slice, Indices | None]:
    """Return the rows of scored tokens at these packed `places` [R] with each shared one once, and for every row the one that represents
    it [R]. The second is None if no rows are joined: too few are shared, or their temperatures differ."""
    if worth and len(places):
        _, first, of = np.unique(places, return_index=True, return_inverse=True)
        if len(first) <= WORTH_JOINING * len(places) and (temperature[first][of] == temperature).all():
            return first, of.astype(np.int64)
    return slice(None), None
