"""Figures whose outcome is known in advance."""

from __future__ import annotations

from typing import Any

from atropos_simulation.figures import Figures, Known

ONE = {
    "run.groups_per_step": 1, "run.group_size": 1, "run.max_staleness": 0, "run.kept_share": 1.0,
    "engine.single_tokens_per_s": 50.0, "engine.peak_tokens_per_s": 1000.0, "engine.max_sequences": 256,
    "rollout.tokens": (100,), "rollout.turns": 1, "rollout.environment_s": 0.0,
    "worker.rollout_s": 0.0, "hub.group_s": 0.0, "trainer.step_s": 0.5, "trainer.token_s": 0.01, "bridge.publish_s": 0.25,
    "loop.step_s": 0.125, "loop.group_s": 0.0625,
}  # fmt: skip


def known(**changes: Any) -> Known:
    """Return known figures. In a keyword, two underscores stand for a figure's dot."""
    values = ONE | {name.replace("__", "."): value for name, value in changes.items()}
    return Known(values, dict.fromkeys(values, "a test"), {})


def figures(**changes: Any) -> Figures:
    return known(**changes).figures()
