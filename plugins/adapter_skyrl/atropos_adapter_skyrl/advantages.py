"""The advantage estimator "atropos" for SkyRL: it uses the per-token advantages of the rows unchanged."""

from __future__ import annotations

from typing import Any

NAME = "atropos"


def given_advantages(token_level_rewards: Any, response_mask: Any, **others: Any) -> tuple[Any, Any]:
    """Return advantages and returns, [S, R] each. With this estimator, SkyRL's "rewards" are the rows' advantages."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


def register() -> None:
    """Make `trainer.algorithm.advantage_estimator=atropos` known in this process, once."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, repopulate_all_registries

    repopulate_all_registries()
    if NAME not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(NAME, given_advantages)
