"""The losses, as pure functions of packed columns.

Every loss here is `sum_t w_t * l_t` over the trained tokens of a minibatch: `token_weights` gives w, a `Loss` gives l. The
weights are computed over the whole minibatch before it is split, and what a loss needs whole is whole within a micro-batch, so
any split into micro-batches (or over ranks) adds up to the same loss and the same gradient. So does any split of an episode
into rollouts that train the same tokens.

A loss of your own is one decorated function. The run file names it as `loss = "./mine.py:mine"`, or by the name under which
a plugin offers it (`atropos_losses`), and `atropos check ./mine.py:mine --kind loss` puts it through the invariances that
these hold:

    from atropos_trainer_grpo.losses import Clip, Rows, Surrogate, register

    @register(average="token")
    def mine(rows: Rows, clip: Clip) -> Surrogate:
        ratio = rows.ratio()
        return Surrogate(-ratio * rows.advantages, ratio.detach())

No log-ratio goes into `exp` as it is: a sender may claim any logprob, and one infinite ratio would make the gradient of the
whole batch NaN, also where the clip leaves it out (0 x inf). `bounded_exp` is what goes in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.types import Bools, Floats

if TYPE_CHECKING:
    from atropos_core.interfaces import Finding

Average = Literal["sequence", "token", "constant", "sum"]

FURTHEST = 60.0  # nats: e^60 = 1.1e26 leaves float32 twelve decades for advantages and for the network's own factors


def bounded_exp(logs: Tensor) -> Tensor:
    """exp(logs), and e^60 for all beyond 60, with itself as its gradient everywhere: what is beyond still pushes the way
    that it should, as hard as at the bound."""
    fixed = logs.detach()
    return (fixed.clamp(max=FURTHEST) + (logs - fixed)).exp()


@dataclass(frozen=True)
class Rows:
    """The trained tokens of some sequences, [R] each, one sequence after another.

    An episode in several rollouts (branches, a history that was rewritten) is one sequence here: its rollouts' tokens, one
    rollout after another. A loss that adds up over sequences has them whole in every micro-batch: `Loss.needs_whole`."""

    logprobs: Tensor  # of the policy that is trained, with gradient
    old: Tensor  # of the policy that the ratio is taken against
    advantages: Tensor
    sequence: Tensor  # i64[R] which of them, counted from 0 with no gap

    def ratio(self) -> Tensor:
        """[R]: exp(logprobs - old), with gradient, and finite: see `bounded_exp`."""
        return bounded_exp(self.logprobs - self.old)

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """[R]: the mean of `values` [R] over the trained tokens of each token's sequence."""
        return self.sum_by_sequence(values) / self.sum_by_sequence(torch.ones_like(values))

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[R]: the sum of `values` [R] over the trained tokens of each token's sequence."""
        if not len(self.sequence):
            return values
        sums = values.new_zeros(int(self.sequence[-1]) + 1).index_add(0, self.sequence, values)
        return sums[self.sequence]


class Clip(NamedTuple):
    """How far a ratio may go: from 1 - low to 1 + high, and for a negative advantage to `dual` at most."""

    low: float
    high: float
    dual: float | None = None


class Surrogate(NamedTuple):
    """What a loss gives for each row [R]."""

    values: Tensor  # l_t, with gradient
    ratio: Tensor  # as it was clipped, without gradient: for the metrics
    clipped: Tensor | None = None  # bool: the clip took the gradient away


@dataclass(frozen=True)
class Loss:
    """One loss: the function, and what goes with it unless the run file says otherwise."""

    name: str
    surrogate: Callable[[Rows, Clip], Surrogate]
    average: Average
    clip: Clip
    holds_fixed: bool = False  # its gradient is not that of its value: a factor is constant (a stop-gradient)
    needs_whole: bool = False  # the rollouts of an episode must be in one micro-batch: it adds up over `Rows.sequence`

    def __call__(self, rows: Rows, clip: Clip) -> Surrogate:
        return self.surrogate(rows, clip)

    def findings(self, *, skip: Sequence[str] = ()) -> list[Finding]:
        from atropos_trainer_grpo.contract import findings

        return findings(self, skip=skip)


def register(
    *,
    average: Average = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    holds_fixed: bool = False,
    needs_whole: bool = True,
) -> Callable[[Callable[[Rows, Clip], Surrogate]], Loss]:
    """Make a function a loss. `needs_whole=False` saves memory where episodes have several rollouts, and is right where
    every row's value is of that row alone."""
    return lambda function: Loss(function.__name__, function, average, Clip(*clip), holds_fixed, needs_whole)


def token_weights(
    average: Average, trained: Bools, offsets: NDArray[np.int64], loss_length: int | None = None
) -> Floats:
    """Per token w: f32[N], 0 where not trained. `offsets` [S + 1] are those of whole episodes, which count once each however
    many rollouts they are in. S counts the sequences that have a trained token, |o_i| those tokens.

    - sequence: 1 / (S |o_i|), the mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3).
    - token: 1 / sum_i |o_i|, the mean over all tokens of the minibatch (DAPO, arXiv 2503.14476, eq. 8).
    - constant: 1 / (S L) with L = `loss_length`, the token sum over a constant length (Dr.GRPO, arXiv 2503.20783, section
      3.2). This is TRL's convention, B * L_max; verl's seq-mean-token-sum-norm divides by L alone.
    - sum: 1 / S, the token sum, then the mean over sequences: the policy gradient as it is derived (REINFORCE, RLOO).
    """
    counts = np.add.reduceat(trained.astype(np.int64), offsets[:-1])  # [S]
    sequences = max(int((counts > 0).sum()), 1)
    if average == "sequence":
        each = 1.0 / (sequences * np.maximum(counts, 1))
    elif average == "token":
        each = np.full(len(counts), 1.0 / max(int(counts.sum()), 1))
    elif average == "constant":
        assert loss_length is not None, "the options see to it"
        each = np.full(len(counts), 1.0 / (sequences * loss_length))
    else:
        each = np.full(len(counts), 1.0 / sequences)
    weights = np.repeat(each, np.diff(offsets)) * trained
    return weights.astype(np.float32)


# -- l_t


def clipped_by_token(rows: Rows, clip: Clip) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old), for either sign of A (PPO, arXiv 1707.06347,
    eq. 7). With `dual` c, -max(min(...), c A) where A < 0 (Ye et al., arXiv 1912.09729, eq. 5)."""
    return _clipped(rows.ratio(), rows.advantages, clip)


def clipped_by_sequence(rows: Rows, clip: Clip) -> Surrogate:
    """The same with the sequence's ratio s = exp(mean_t(logprobs - old)) in place of the token's (GSPO, arXiv 2507.18071,
    eq. 5). Each token carries its part of the gradient of s, the paper's GSPO-token (eq. 13), which is GSPO where all
    tokens of a sequence have one advantage."""
    log_ratio = rows.mean_by_sequence((rows.logprobs - rows.old).detach())
    return _clipped(bounded_exp(log_ratio + (rows.logprobs - rows.logprobs.detach())), rows.advantages, clip)


def weighed_by_ratio(rows: Rows, clip: Clip) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A logprobs: no token loses its gradient (CISPO, arXiv 2506.13585, eq. 4)."""
    ratio = rows.ratio().detach()
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(-bounded * rows.advantages * rows.logprobs, ratio)


def policy_gradient(rows: Rows, clip: Clip) -> Surrogate:
    """-A logprobs, the policy gradient itself (Williams 1992), with no ratio: several updates on one batch, or stale
    tokens, are as if they were fresh. With the advantages of RLOO (arXiv 2402.14740) it is RLOO."""
    return Surrogate(-rows.advantages * rows.logprobs, rows.ratio().detach())


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    """-ratio A where the ratio may still move that way; where it may not, -A times the bound that it has passed."""
    seen, good, bad = ratio.detach(), advantages > 0, advantages < 0
    above, below = good & (seen > 1.0 + clip.high), bad & (seen < 1.0 - clip.low)
    bound = torch.where(above, 1.0 + clip.high, 1.0 - clip.low)
    stopped = above | below
    if clip.dual is not None:
        beyond = bad & (seen > clip.dual)
        bound, stopped = torch.where(beyond, clip.dual, bound), stopped | beyond
    return Surrogate(-torch.where(stopped, bound, ratio) * advantages, seen, stopped)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("grpo", clipped_by_token, "sequence", Clip(0.2, 0.2)),
        Loss("dr_grpo", clipped_by_token, "constant", Clip(0.2, 0.2)),
        Loss("dapo", clipped_by_token, "token", Clip(0.2, 0.28)),
        Loss("gspo", clipped_by_sequence, "sequence", Clip(3e-4, 4e-4), holds_fixed=True, needs_whole=True),
        # No lower bound, as in the paper. 4 above is TRL's epsilon_high = 5, which bounds r itself.
        Loss("cispo", weighed_by_ratio, "token", Clip(1.0, 4.0), holds_fixed=True),
        Loss("reinforce", policy_gradient, "sum", Clip(0.2, 0.2)),
    )
}
