"""The component to check: by name or reference, or as a Provider, a class, an instance, or a function that makes one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.config.error_text import NAMED, explain
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Environment
from atropos_core.plugins.environment_methods import check_methods
from atropos_core.plugins.offers import PROVIDERS
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import Provider, RunContext
from atropos_core.plugins.references import construct, provider_of
from atropos_core.plugins.requirements import check_core_api, check_requires

Target = Any  # str | Provider[Any] | type | Callable[[], Any]: distinguished below


@dataclass(frozen=True)
class Subject:
    """A component that can be made any number of times."""

    kind: str
    label: str
    provider: Provider[Any]
    options: Any
    context: RunContext

    def make(self) -> Any:
        return self.provider.build(self.options, self.context)


def find(kind: str, target: Target, options: Mapping[str, Any] | None, directory: Path) -> Subject:
    """Find the component. Raises what a run that names it would raise."""
    provider = _provider(kind, target)
    try:
        values = provider.options.model_validate(dict(options or {}))
    except ValidationError as error:
        named = f"{kind} {provider.name}"
        raise ConfigError(
            f"{named}: {explain(error, provider.options, {})}", remedy=_how(dict(options or {}))
        ) from error
    context = RunContext(directory=directory, model=TOY_MODEL, steps=10, seed=0)
    return Subject(kind, f"{kind} {provider.name!r}", provider, values, context)


def _how(options: Mapping[str, Any]) -> str | None:
    """Return how to set options of other components, which a run file sets elsewhere."""
    nested = next((name for name in NAMED if isinstance(options.get(name), Mapping)), None)
    return (
        None
        if nested is None
        else f"`atropos check` sets options of the one component: --set OPTION=VALUE, without {nested}.NAME."
    )


def _provider(kind: str, target: Target) -> Provider[Any]:
    if isinstance(target, str):
        from atropos_core.plugins.manager import load_plugins

        offer = load_plugins().registry.find(kind, target)
        check_core_api(offer)
        check_requires(offer)
        return offer.provider
    if isinstance(target, Provider):
        return target
    name = getattr(target, "__name__", type(target).__name__)
    if kind == "environment" and inspect.isclass(target) and issubclass(target, Environment):
        check_methods(target, name)
    if inspect.isclass(target) or (inspect.isroutine(target) and not inspect.iscoroutinefunction(target)):
        config = getattr(target, "Options", NoOptions) if inspect.isclass(target) else NoOptions
        return PROVIDERS.get(kind, Provider)(
            name, "", config, lambda values, context: construct(target, values, context)
        )
    return provider_of(kind, target, name)
