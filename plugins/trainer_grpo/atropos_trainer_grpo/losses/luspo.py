"""LUSPO: GSPO whose sequences weigh as much as they are long (Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261).

Its objective is 1/S sum_i |o_i| min(s_i A_i, clip(s_i) A_i) with GSPO's ratio s_i. Since every token of a sequence has the
value of s_i A_i here, |o_i| times it is the sum over the sequence's tokens: GSPO's surrogate under the average `sum`. The
bounds are those of the paper's section 5.1."""

from __future__ import annotations

from atropos_trainer_grpo.losses.clipped import clipped_by_sequence
from atropos_trainer_grpo.losses.rows import Clip, Loss

LUSPO = Loss("luspo", clipped_by_sequence, "sum", Clip(2e-3, 2.5e-3), holds_fixed=True, needs_whole=True)
