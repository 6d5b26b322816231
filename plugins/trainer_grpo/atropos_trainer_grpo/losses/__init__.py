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
"""

from __future__ import annotations

from atropos_core.advantages import Average, token_weights
from atropos_trainer_grpo.losses.clipped import CLIPPED, clipped_by_sequence, clipped_by_token, policy_gradient
from atropos_trainer_grpo.losses.dppo import DPPO
from atropos_trainer_grpo.losses.gmpo import GMPO
from atropos_trainer_grpo.losses.kpop import KPOP
from atropos_trainer_grpo.losses.luspo import LUSPO
from atropos_trainer_grpo.losses.rows import FURTHEST, Clip, Loss, Rows, Surrogate, bounded_exp, register
from atropos_trainer_grpo.losses.sapo import SAPO
from atropos_trainer_grpo.losses.vespo import VESPO

__all__ = [
    "FURTHEST", "LOSSES", "Average", "Clip", "Loss", "Rows", "Surrogate", "bounded_exp", "clipped_by_sequence", "clipped_by_token",
    "policy_gradient", "register", "token_weights",
]  # fmt: skip

LOSSES = {loss.name: loss for loss in (*CLIPPED, SAPO, VESPO, LUSPO, KPOP, GMPO, DPPO)}
