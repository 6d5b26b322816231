"""Code that runs in the process that has gem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gem
from gem.envs.registration import ENV_REGISTRY

from atropos_core.errors import DataError
from atropos_env_kit.step_host import Shown, StepHost


class GemEpisode:
    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._env = gem.make(name, **parameters)

    def reset(self, seed: int) -> Shown:
        observation, info = self._env.reset(seed=seed)
        return Shown(0, text_of(observation, info))

    def step(self, action: str) -> Shown:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return Shown(0, text_of(observation, info), [float(reward)], ended=bool(terminated or truncated))


def text_of(observation: Any, info: Mapping[str, Any]) -> str:
    """The observation with gem's prefix and suffix (such as a board), as gem's own wrappers show it."""
    if not isinstance(observation, str):
        raise DataError(f"observations must be text, but this environment gives a {type(observation).__name__}")
    parts = (str(info.get("prefix") or ""), observation, str(info.get("suffix") or ""))
    return "\n".join(part.rstrip("\n") for part in parts if part)


call = StepHost(GemEpisode, lambda: sorted(ENV_REGISTRY)).call
