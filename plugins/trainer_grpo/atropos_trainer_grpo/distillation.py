"""A teacher's logprobs of each token, as a loss: forward KL over its likeliest tokens, or reverse KL on the student's own.

A teacher's entry at token t is the distribution that predicts token t, like the student's: nothing is shifted here. Its logprobs are over
its whole vocabulary, at the temperature of the rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.errors import DataError
from atropos_core.types import Batch, Bools, Floats, offsets_of

LEAST = 2.0**-22  # a teacher's probability outside its tokens: less is rounding of float32 logprobs that add up to 1


def forward_kl(student: Tensor, outside: Tensor, teacher: Tensor, present: Tensor) -> Tensor:
    """[R] KL(teacher || student) over the teacher's K tokens and one bucket for all others: sum_k p_k (log p_k - log q_k) + p_rest
    (log p_rest - log q_rest). The gradient is that of `student` [R, K] and of `outside` [R].

    Logprobs are over the whole vocabulary. Renormalised over K the loss would be zero for a student that puts 1 % of its mass there.
    `outside` is log q_rest itself, since 1 - sum_k q_k has no digits left if the student is sure of the teacher's tokens. Never below
    0 except for rounding."""
    teacher = teacher.detach()
    p = torch.where(present, teacher.exp(), 0.0)
    rest_p = (1 - p.double().sum(dim=1)).to(p.dtype)
    counted = (rest_p > LEAST) & outside.isfinite()  # if the teacher names the whole vocabulary, nothing is outside
    rest_p = torch.where(counted, rest_p, 0.0)
    among = torch.where(present, p * (teacher - student), 0.0).sum(dim=1)
    return among + torch.xlogy(rest_p, rest_p) - rest_p * torch.where(counted, outside, 0.0)


@dataclass(frozen=True)
class Taught:
    """A batch's teacher scores, by token: `counts` [N] entries each, one after another."""

    counts: NDArray[np.int64]
    offsets: NDArray[np.int64]  # [N + 1]
    token_ids: NDArray[np.int64]
    logprobs: Floats

    @classmethod
    def of(cls, batch: Batch, vocabulary: int) -> Taught:
        """Raises DataError if no sequence of the batch came with a teacher (one without scores counts), or if the teacher names
        tokens that the student does not have."""
        if "teacher_token_ids" not in batch.ragged:
            raise DataError(
                "trainer.distillation is set, but no group of the batch came with a teacher's logprobs.",
                remedy="Add a teacher ([teacher.NAME]), have the environment send distill_token_ids and distill_logprobs, "
                "or remove [trainer.distillation].",
            )
        ids, logprobs = batch.ragged["teacher_token_ids"], batch.ragged["teacher_logprobs"]
        token_ids = ids.values.astype(np.int64)
        if len(token_ids) and (highest := int(token_ids.max())) >= vocabulary:
            raise DataError(
                f"the teacher names token {highest}, but the policy's vocabulary has {vocabulary}: the teacher has another tokenizer.",
                remedy="Distillation compares token by token: use a teacher with the policy's tokenizer.",
            )
        return cls(np.diff(ids.offsets), ids.offsets, token_ids, logprobs.values)

    def rows(self, positions: NDArray[np.int64], most: int = 0) -> tuple[NDArray[np.int64], Floats, Bools]:
        """Ids and logprobs of the teacher's tokens at these positions [R, K], and which of them exist. K is `most`, or the largest
        number at any position. Missing ids repeat the position's first, so that all are the teacher's own."""
        counts = self.counts[positions]
        most = most or max(int(counts.max(initial=0)), 1)
        present = np.arange(most) < counts[:, None]
        ids, logprobs = np.zeros(present.shape, np.int64), np.zeros(present.shape, np.float32)
        begin = offsets_of(counts)[:-1]
        at = np.repeat(self.offsets[positions] - begin, counts) + np.arange(counts.sum())
        ids[present], logprobs[present] = self.token_ids[at], self.logprobs[at]
        ids = np.where(present, ids, ids[:, :1])
        return ids, logprobs, present

    def of_own(self, tokens: NDArray[np.int32]) -> tuple[Floats, Bools]:
        """The teacher's logprob of each token [N] itself, and which of them it gave."""
        owner = np.repeat(np.arange(len(tokens)), self.counts)
        own = np.flatnonzero(self.token_ids == tokens[owner])
        made, known = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)
        made[owner[own]], known[owner[own]] = self.logprobs[own], True
        return made, known
