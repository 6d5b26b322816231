"""ROLL's env managers, for `env_manager_cls`. Importing this module registers the environment `atropos` with gem in the
worker that imports it.

    env_manager_cls: atropos_adapter_roll.managers.TrajEnvManager              # observation: delta
    env_manager_cls: atropos_adapter_roll.managers.AgentNativeStepEnvManager   # observation: messages

They are ROLL's own classes. What is added: each rollout says what became of its episode, for the group filter.
"""

from __future__ import annotations

import importlib
from typing import Any

from atropos_adapter_roll import env as env  # registers
from atropos_core.errors import ConfigError, FitError

FILTER = "atropos_adapter_roll.group.GroupFilter"
_PACKAGE = "roll.pipeline.agentic.env_manager."
BASES = {
    "TrajEnvManager": (_PACKAGE + "traj_env_manager", "delta"),
    "AgentNativeStepEnvManager": (_PACKAGE + "agent_native_env_manager", "messages"),
}


def adapted(base: type, observation: str) -> type:
    """`base`, one of ROLL's env managers, whose rollouts carry `meta_info["atropos"]`."""

    class Adapted(base):  # type: ignore[misc] # ROLL has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found = self.env.options.observation
            if found != observation:
                raise ConfigError(
                    f"{base.__name__} shows an environment by {observation!r}, and env_config.observation is {found!r}.",
                    remedy=f"Set env_config.observation: {observation}.",
                )
            if self.worker_config.group_filter_cls != FILTER:
                raise ConfigError(
                    f"group_filter_cls is {self.worker_config.group_filter_cls!r}: failed episodes would be trained as a score "
                    "of 0, and groups that their environment scores as a whole would have no score.",
                    remedy=f"Set group_filter_cls: {FILTER} in train_env_manager and val_env_manager.",
                )
            self.env.score_in_group(self.worker_config.group_size)

        def formulate_rollouts(self, rollout_cache: Any) -> Any:
            rollout = super().formulate_rollouts(rollout_cache)
            record = self.env.record()
            if not record["ended"]:  # ROLL stops an episode by itself where max_steps or sequence_length is reached
                record["failed"] = (
                    "the trainer ended the episode before its environment did (max_steps, sequence_length)"
                )
                rollout.meta_info.setdefault("metrics", {})[f"env/{self.rollout_cache.tag}/failed"] = 1.0
            rollout.meta_info["atropos"] = {**record, "tag": self.rollout_cache.tag}
            rollout.meta_info["drop_flag"] = bool(record["failed"])
            return rollout

    Adapted.__name__ = Adapted.__qualname__ = base.__name__
    Adapted.__module__ = __name__
    return Adapted


def __getattr__(name: str) -> Any:
    """ROLL is imported when a manager is asked for: gem's users have none."""
    if name not in BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(BASES)}")
    module, observation = BASES[name]
    try:
        base = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "roll":
            raise FitError(
                f"{name} needs ROLL, and there is no module {error.name!r}.",
                remedy="Put a checkout of ROLL on PYTHONPATH (the package index's `roll` is something else).",
            ) from error
        raise
    made = globals()[name] = adapted(base, observation)
    return made
