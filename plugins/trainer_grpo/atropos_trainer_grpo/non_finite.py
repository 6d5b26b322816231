"""Find out why a loss or a gradient is not finite, after it has happened, so that the error advises the right fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import TrainingDiverged
from atropos_core.types import Bools, Floats

if TYPE_CHECKING:  # so that the update does not import the code that reads options
    from atropos_trainer_grpo.config import GrpoOptions

RESUME = "resume from the last checkpoint with a lower trainer.learning_rate"


def against_old(options: GrpoOptions) -> str:
    """The remedy for ratios to the old policy that are too large."""
    rollout = options.old_logprobs != "recompute" and options.correction is None
    if rollout:
        ours = 'Set trainer.old_logprobs = "recompute", which does not rely on the sender\'s logprobs'
        moves = [name for name in ("clip_low", "clip_high", "dual_clip") if getattr(options, name) is not None]
        if moves and options.updates_once:
            ours += f", and leave trainer.{', trainer.'.join(moves)} out"
    else:
        ours = "The policy moves too far within one batch: lower trainer.learning_rate"
    ratios = rollout or not options.updates_once  # else all are 1, and a bound is refused
    clips = ratios and options.takes_dual_clip and options.dual_clip is None
    return f"{ours}{', or set trainer.dual_clip = 3' if clips else ''}."


def against_reference(options: GrpoOptions) -> str:
    """The remedy for ratios to the reference that are too large."""
    k3 = options.kl is not None and options.kl.estimator in ("k3", "k3_ratio")
    other = ', or set trainer.kl.estimator = "k2", whose gradient is only linear in the log-ratio' if k3 else ""
    return f"If groups bring their own reference logprobs (ref_logprobs), check these{other}."


@dataclass(frozen=True)
class Evidence:
    """Data of the minibatch that failed, in the batch's token order [N]."""

    trained: Bools
    owner: NDArray[np.int64]  # the sequence of each token
    broken_weights: int  # parameters that are not finite
    logprobs: Floats  # the policy's own, of trained tokens
    inputs: dict[str, tuple[Floats, float, str]]  # name -> values, reasonable limit, remedy if they exceed it

    def error(self, where: str) -> TrainingDiverged:
        why, remedy = self._cause()
        return TrainingDiverged(f"{where} {why}", remedy=remedy)

    def _cause(self) -> tuple[str, str]:
        if self.broken_weights:
            return (
                f"{self.broken_weights} of the weights are not finite: an earlier update broke them.",
                f"{RESUME[0].upper()}{RESUME[1:]}.",
            )
        if (silent := self.trained & ~np.isfinite(self.logprobs)).any():
            return (
                f"The weights are finite, but the model gives no finite logprob for {silent.sum()} of {self.trained.sum()} "
                f"trained tokens, first in sequence {self.owner[silent][0]}: its forward pass overflows.",
                f"If earlier steps went well, {RESUME}. If the first step fails, the model itself is broken, or needs "
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
                f"The weights and the model's logprobs are finite, but an input of the loss is too large: "
                f"{', '.join(what for what, _ in far)}.",
                " ".join(remedy for _, remedy in far),
            )
        return (
            "The weights, the model's logprobs and the inputs of the loss are within reason: the backward pass "
            "through the model overflows.",
            "This does not show that the learning rate is too high. Check the model's activations, and try a wider trainer.dtype. "
            f"If earlier steps went well, their updates may have moved the weights there: then {RESUME}.",
        )
