"""Register the rewards `ensemble` and `judge`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Reward
    from atropos_reward_ensemble.config import EnsembleOptions, JudgeOptions


def build_ensemble(options: EnsembleOptions, context: RunContext) -> Reward:
    from atropos_reward_ensemble.ensemble import Ensemble
    from atropos_reward_ensemble.members import build

    return Ensemble(options, [build(name, options, context) for name in options.members], context.deterministic)


def build_judge(options: JudgeOptions, context: RunContext) -> Reward:
    from atropos_reward_ensemble.judge import Judge

    return Judge(options)


@hookimpl
def atropos_rewards() -> Iterable[Provider[Reward]]:
    return [
        Provider(
            "ensemble",
            "several rewards as one, their agreement measured",
            "atropos_reward_ensemble.config:EnsembleOptions",
            build_ensemble,
        ),
        Provider(
            "judge",
            "what an OpenAI-compatible model says of a reply",
            "atropos_reward_ensemble.config:JudgeOptions",
            build_judge,
        ),
    ]
