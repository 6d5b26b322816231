"""Why a loss or a gradient is not a finite number: looked for once it has happened, so that what is advised is the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import TrainingDiverged
from atropos_core.types import Bools, Floats

if TYPE_CHECKING:  # the update runs where no options can be read from a file
    from atropos_trainer_grpo.config import GrpoOptions

RESUME = "resume from the last checkpoint with a lower trainer.learning_rate"


def against_old(options: GrpoOptions) -> str:
    """What to do about ratios to the old policy that are too large."""
    rollout = options.old_logprobs != "recompute" and options.correction is None
    if rollout:
        ours = 'Set trainer.old_logprobs = "recompute", which takes no sender\'s word'
        moves = [name for name in ("clip_low", "clip_high", "dual_clip") if getattr(options, name) is not None]
        if moves and options.updates_once:
            ours += f", and leave trainer.{', trainer.'.join(moves)} out"
    else:
        ours = "The policy moves that far within one batch: lower trainer.learning_rate"
    ratios = rollout or not options.updates_once  # else all are 1, and a bound is refused
    clips = ratios and options.takes_dual_clip and options.dual_clip is None
    return f"{ours}{', or set trainer.dual_clip = 3' if clips else ''}."


def against_reference(options: GrpoOptions) -> str:
    """What to do about ratios to the reference that are too large."""
    k3 = options.kl is not None and options.kl.estimator in ("k3", "k3_ratio")
    other = ', or set trainer.kl.estimator = "k2", whose gradient grows with the log-ratio alone' if k3 else ""
    return f"Look at the reference logprobs, where groups bring their own (ref_logprobs){other}."


@dataclass(frozen=True)
class Evidence:
    """Of the minibatch that failed, in the batch's own token order [N]."""

    trained: Bools
    owner: NDArray[np.int64]  # the sequence of each token
    broken_weights: int  # parameters that are not finite
    logprobs: Floats  # the policy's own, where trained
    inputs: dict[str, tuple[Floats, float, str]]  # name -> values, what is within reason, what to do about more

    def error(self, where: str) -> TrainingDiverged:
        why, remedy = self._cause()
        return TrainingDiverged(f"{where} {why}", remedy=remedy)

    def _cause(self) -> tuple[str, str]:
        if self.broken_weights:
            return (
                f"{self.broken_weights} of the weights are not finite numbers: an update before this one broke them.",
                f"{RESUME[0].upper()}{RESUME[1:]}.",
            )
        if (silent := self.trained & ~np.isfinite(self.logprobs)).any():
            return (
                f"The weights are finite, and the model gives no finite logprob for {silent.sum()} of {self.trained.sum()} "
                f"trained tokens, of sequence {self.owner[silent][0]} first: what it computes overflows.",
                f"Where steps before this one went well, {RESUME}; where the first step fails, the model itself is broken, or needs "
                "another trainer.dtype.",
            )
        far = []
        for name, (values, reason, remedy) in self.inputs.items():
            sizes = np.where(self.trained, np.abs(values), 0.0)
            if not sizes.max(initial=0.0) <= reason:
                at = int(np.nanargmax(np.where(np.isfinite(sizes), sizes, np.inf)))
                far.append((f"{name} {values[at]:.6g} (sequence {self.owner[at]})", remedy))
        if far:
            return (
                f"The weights are finite and so are the model's logprobs; what the loss was given is too large for it: "
                f"{', '.join(what for what, _ in far)}.",
                " ".join(remedy for _, remedy in far),
            )
        return (
            "The weights, the model's logprobs and all that the loss was given are within reason: it is the backward pass "
            "through the model that overflows.",
            "Nothing here says that the learning rate is too high. Look at the model's own activations, and try a wider trainer.dtype; "
            f"where steps before this one went well, their updates may have taken the weights there: then {RESUME}.",
        )
