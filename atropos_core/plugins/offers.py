"""The kinds of components, the class that describes each, and what a plugin offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atropos_core.errors import PluginError
from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TeacherProvider, TrainerProvider
from atropos_core.plugins.provider import LauncherProvider, Provider

FILES_OF_ROWS = (".jsonl", ".json", ".csv", ".parquet")
KINDS: Mapping[str, str] = {  # kind -> the hook that offers it
    "environment": "atropos_environments",
    "reward": "atropos_rewards",
    "engine": "atropos_engines",
    "trainer": "atropos_trainers",
    "loss": "atropos_losses",
    "bridge": "atropos_bridges",
    "curriculum": "atropos_curricula",
    "transform": "atropos_transforms",
    "teacher": "atropos_teachers",
    "sink": "atropos_sinks",
    "adapter": "atropos_adapters",
    "sandbox": "atropos_sandboxes",
    "launcher": "atropos_launchers",
}
PROVIDERS: Mapping[str, type[Provider[Any]]] = {  # kinds with more to say than a Provider has fields for
    "engine": EngineProvider,
    "trainer": TrainerProvider,
    "bridge": BridgeProvider,
    "teacher": TeacherProvider,
    "launcher": LauncherProvider,
}


@dataclass(frozen=True)
class Offer:
    """A provider, and the plugin that it came from. Raises PluginError for a provider of another kind."""

    kind: str
    provider: Provider[Any]
    plugin: str
    distribution: str

    def __post_init__(self) -> None:
        wanted = PROVIDERS.get(self.kind, Provider)
        of_another = wanted is Provider and isinstance(self.provider, tuple(PROVIDERS.values()))
        if of_another or not isinstance(self.provider, wanted):
            raise PluginError(
                f"{self.kind} {self.provider.name!r} of {self.distribution} is described by a {type(self.provider).__name__}.",
                remedy=f"Describe it by atropos_core.plugins.provider.{wanted.__name__}.",
            )
