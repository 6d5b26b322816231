"""The learning rate and warm-up that suit a model. docs/defaults.md lists the published runs between which the rate lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions

LEAST_RATE, MOST_RATE = 1e-6, 2e-6
WIDTH_OF_LEAST = 3584  # the hidden size of models of 7 billion parameters, which are trained with 1e-6
MOST_WARMUP = 10


def learning_rate(width: int) -> float:
    """Return the rate for training all weights of a model with this hidden size: inversely proportional to it, within bounds, in one
    significant digit. An adapter's rate is LORA_RATE times as high (config.py)."""
    rate = LEAST_RATE * WIDTH_OF_LEAST / width
    return float(f"{min(max(rate, LEAST_RATE), MOST_RATE):.0e}")


def suits(options: GrpoOptions, width: int, steps: int) -> Mapping[str, Any]:
    """Return a learning rate, and a warm-up over a twentieth of the optimiser steps, at most `MOST_WARMUP`."""
    updates = steps * options.epochs * options.minibatches
    return {"learning_rate": learning_rate(width), "warmup_steps": min(MOST_WARMUP, updates // 20)}
