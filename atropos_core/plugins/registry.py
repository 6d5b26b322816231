"""Components by kind and name."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, PluginError, UnknownComponent
from atropos_core.plugins.offers import FILES_OF_ROWS, Offer
from atropos_core.plugins.references import OBJECT, is_reference, kind_of, load_reference, provider_at
from atropos_core.plugins.requirements import check_core_api


class Registry:
    """All offers of the loaded plugins. A broken plugin, or a name that two plugins offer, raises only when it is requested."""

    def __init__(self) -> None:
        self._offers: dict[tuple[str, str], list[Offer]] = {}
        self._broken: dict[str, Exception] = {}  # plugin -> what went wrong

    def add(self, offer: Offer) -> None:
        self._offers.setdefault((offer.kind, offer.provider.name), []).append(offer)

    def add_broken(self, plugin: str, error: Exception) -> None:
        self._broken[plugin] = error

    def offers(self, kind: str | None = None) -> list[Offer]:
        return [
            offer for (found, _), offers in sorted(self._offers.items()) for offer in offers if kind in (None, found)
        ]

    def contested(self) -> list[list[Offer]]:
        """Return names that two distributions both offer."""
        return [offers for offers in self._offers.values() if len(offers) > 1]

    def find(self, kind: str, name: str) -> Offer:
        """Return the offer of that name, or raise an error that lists what is installed. The name may be a reference,
        `pkg.mod:Name` or `./file.py:Name`, or NAME:ARGUMENT if a provider of that name takes an argument."""
        offers = self._offers.get((kind, name), [])
        if len(offers) > 1:
            both = " and ".join(sorted(offer.distribution for offer in offers))
            raise PluginError(
                f"two plugins offer {_a(kind)} named {name!r}: {both}.",
                remedy=f"Uninstall one, or block it: ATROPOS_DISABLE_PLUGINS={offers[-1].plugin}",
            )
        if offers:
            check_core_api(offers[0])
            return offers[0]
        if name.startswith(OBJECT):
            own = name.removeprefix(OBJECT)
            raise UnknownComponent(
                f"the {kind} {own!r} was given from Python as an object, which cannot be found by its name.",
                remedy=f"From Python, give it again to the function that you call: atropos_core.resume(RUN, {kind}={own}), or "
                f"evaluate(RUN, {kind}={own}). Or put it into a file, where commands find it as ./file.py:{own}.",
            )
        if (offer := self.with_argument(kind, name)) is not None:
            check_core_api(offer)
            return offer
        if is_reference(name):
            self.refuse_misspelled((kind,), name)
            offer = Offer(kind, provider_at(kind, name), name, "your own")
            check_core_api(offer)
            return offer
        for plugin, error in self._broken.items():
            if name in (plugin, plugin.split("_", 1)[-1]):
                raise PluginError(
                    f"plugin {plugin!r}, which should offer {_a(kind)} named {name!r}, does not load: {error}"
                ) from error
        names = sorted(found for (of, found) in self._offers if of == kind)
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(names) or 'none'}."
        hint += self._taking_a_file(kind, name) or " Your own is named ./file.py:Name or pkg.mod:Name."
        raise UnknownComponent(
            f"there is no {kind} named {name!r}. {hint}", remedy="`atropos plugins` lists what is installed."
        )

    def _taking_a_file(self, kind: str, name: str) -> str:
        """Return how to write `name` if it is a file of rows and some component reads those; else ""."""
        if Path(name).suffix not in FILES_OF_ROWS:
            return ""
        offers = [offer.provider for (of, _), offers in self._offers.items() if of == kind for offer in offers]
        from atropos_core.plugins.option_paths import is_path

        taking = [one.name for one in offers if one.argument and is_path(one.options.model_fields[one.argument])]
        return (
            f" A file of rows is named after what reads it: {' or '.join(f'{one}:{name}' for one in taking)}."
            if taking
            else ""
        )

    def refuse_misspelled(self, kinds: Sequence[str], name: str) -> None:
        """Raises UnknownComponent if the NAME of NAME:ARGUMENT is not a module and resembles a provider that takes an argument."""
        before, colon, argument = name.partition(":")
        if not colon or not before.isidentifier() or importlib.util.find_spec(before) is not None:
            return
        offers = [offer for (of, _), offers in self._offers.items() if of in kinds for offer in offers]
        taking = [offer.provider.name for offer in offers if offer.provider.argument]
        if near := difflib.get_close_matches(before.lower(), taking, n=1, cutoff=0.5):
            raise UnknownComponent(
                f"no component or module is named {before!r}. Did you mean {f'{near[0]}:{argument}'!r}?",
                remedy="`atropos plugins` lists what is installed.",
            )

    def with_argument(self, kind: str, name: str) -> Offer | None:
        """Return the offer named before the colon of `NAME:ARGUMENT`, with ARGUMENT as the default of the option that takes it
        (`Provider.argument`). None if the name has no colon, or no such provider takes an argument."""
        before, colon, argument = name.partition(":")
        offers = self._offers.get((kind, before), ()) if colon else ()
        if not any(offer.provider.argument for offer in offers):
            return None
        offer = self.find(kind, before)
        provider = offer.provider
        if not argument:
            raise ConfigError(
                f"{name!r} has nothing after its colon.", remedy=f"Name its {provider.argument}: {before}:..."
            )
        given = copy.copy(provider.options.model_fields[provider.argument])
        given.default, given.validate_default = argument, True
        field: dict[str, Any] = {provider.argument: (given.annotation, given)}
        from pydantic import create_model

        config = create_model(provider.options.__name__, __base__=provider.options, **field)
        return dataclasses.replace(offer, provider=dataclasses.replace(provider, name=name, config=config))


def kind_named(name: str, registry: Registry, among: Sequence[str], purpose: str = "") -> str:
    """Return the kind, one of `among`, that has a component of this name. Raises ConfigError, UnknownComponent."""
    taking = [of for of in among if registry.with_argument(of, name) is not None]
    if taking:
        return taking[0]
    if name.endswith(".toml"):
        raise ConfigError(
            f"{name} is a run file, and this command takes one component.",
            remedy="Name it as the run file does, and its options by --set OPTION=VALUE.",
        )
    if is_reference(name):
        registry.refuse_misspelled(among, name)
        return _kind_of_reference(name)
    kinds = list(dict.fromkeys(offer.kind for offer in registry.offers() if offer.provider.name == name))
    fitting = [kind for kind in kinds if kind in among]
    if len(fitting) > 1:
        raise ConfigError(f"{name!r} is of the kinds {', '.join(fitting)}.", remedy=f"Say which: --kind {fitting[0]}")
    if fitting:
        return fitting[0]
    for kind in among:
        try:
            registry.find(kind, name)  # raises what is wrong with a broken plugin of that name
        except UnknownComponent:
            continue
    names = sorted({offer.provider.name for offer in registry.offers() if offer.kind in among})
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(names)}."
    raise UnknownComponent(
        f"there is no component named {name!r}{purpose}. {hint} Your own is named ./file.py:Name.",
        remedy="`atropos plugins` lists what is installed.",
    )


def _kind_of_reference(reference: str) -> str:
    """Return the kind of the class that a reference names."""
    if ":" not in reference:
        return "environment"
    if (kind := kind_of(load_reference(reference))) is None:
        raise ConfigError(
            f"{reference!r} does not say of which kind it is.", remedy="Say it: --kind reward, for example."
        )
    return kind


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
