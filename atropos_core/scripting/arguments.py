"""Turn keyword arguments into the equivalent flags. A component that is given as an object gets a name of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atropos_core.cli.options import short_name
from atropos_core.config.run_file import NAMED, SINGLE, flatten, toml_value
from atropos_core.errors import ConfigError
from atropos_core.plugins.manager import GIVEN
from atropos_core.plugins.offers import KINDS, Offer
from atropos_core.plugins.provider import Provider
from atropos_core.plugins.references import OBJECT, place_of, provider_of


class Arguments:
    """The arguments of a call, as flags: `changes` are texts for --set."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.changes: list[str] = []
        self._offers: dict[str, tuple[Any, Offer]] = {}
        for path, value in flatten(settings or {}):
            self._change(path, value)

    def one(self, kind: str, component: Any) -> str | None:
        """Return the component's name for a flag such as --engine."""
        if component is None:
            return None
        name, options = self._read(kind, component)
        for option, value in options.items():
            self._change(f"{kind}.{option}", value)
        return name

    def several(self, kind: str, components: Any) -> list[str] | None:
        """Return the names for a flag such as --env, from one component, a list of them, or a mapping from names."""
        if components is None:
            return None
        names = []
        for given, component in _each(components):
            name, options = self._read(kind, component)
            if given is not None and given != short_name(name):
                raise ConfigError(f"{kind} {given!r}: here its name follows from what it is, {short_name(name)!r}.",
                                  remedy=f'Name it yourself in set={{"{kind}.{given}.use": ...}}.')  # fmt: skip
            names.append(name)
            for option, value in options.items():
                self._change(f"{kind}.{short_name(name)}.{option}", value)
        return names

    def add(self, kind: str, components: Any) -> None:
        """Add --set KIND.NAME.use=... for each component."""
        for given, component in _each(components) if components is not None else ():
            name, options = self._read(kind, component)
            for option, value in {"use": name, **options}.items():
                self._change(f"{kind}.{given or short_name(name)}.{option}", value)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside the block, the objects can be found by the names that the flags use."""
        token = GIVEN.set(tuple(offer for _, offer in self._offers.values()))
        try:
            yield
        finally:
            GIVEN.reset(token)

    def _change(self, path: str, value: Any) -> None:
        section, _, key = path.rpartition(".")
        if key == "use" and not isinstance(value, str):
            value, options = self._read(section.partition(".")[0], value)
            for option, of_it in options.items():
                self._change(f"{section}.{option}", of_it)
        self.changes.append(f"{path}={toml_value(_plain(path, value))}")

    def _read(self, kind: str, component: Any) -> tuple[str, dict[str, Any]]:
        """Return the name of a component, and its options."""
        if isinstance(component, Mapping):
            if "use" not in component:
                raise ConfigError(
                    f"a {kind} was given as {dict(component)!r}, without `use`.", remedy='{"use": ..., options}'
                )
            name, _ = self._read(kind, component["use"])
            return name, {option: value for option, value in component.items() if option != "use"}
        if isinstance(component, str):
            return component, {}
        if isinstance(component, Path):
            return str(component), {}
        return self._name(kind, component), {}

    def _name(self, kind: str, made: Any) -> str:
        """Return a name for the object: its reference if another process can import it, otherwise one for this call."""
        if kind not in KINDS:
            raise ConfigError(f"{made!r} was given for {kind!r}, which is not a kind of component.")
        own = made.name if isinstance(made, Provider) else getattr(made, "__name__", type(made).__name__)
        name = f"{OBJECT}{re.sub(r'[^0-9A-Za-z_]', '_', own).strip('_') or kind}"
        provider = provider_of(kind, made, name)  # raises what is wrong with it, by its name
        if (place := place_of(made)) is not None:
            return place
        first, number = name, 1
        while (key := f"{kind} {name}") in self._offers and self._offers[key][0] is not made:
            number += 1
            name = f"{first}_{number}"
            provider = provider_of(kind, made, name)
        self._offers[key] = made, Offer(kind, provider, "python", "your own")
        return name


def _each(components: Any) -> Sequence[tuple[str | None, Any]]:
    if isinstance(components, Mapping) and "use" not in components:
        return list(components.items())
    if isinstance(components, (list, tuple)):
        return [(None, one) for one in components]
    return [(None, components)]


def _plain(path: str, value: Any) -> Any:
    """Return the value in a form that TOML can hold."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(path, one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(path, one) for key, one in value.items()}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return value.item()
    if inspect.isroutine(value):  # an option that names code, such as score
        if (place := place_of(value)) is None:
            raise ConfigError(
                f"{path} was given {value!r}, which other processes cannot import.",
                remedy=f"Put the function into a file, and give its place: './{path.rpartition('.')[2]}.py:{value.__name__}'.",
            )
        return place
    if not isinstance(value, (str, bool, int, float)):
        what = "an object" if not inspect.isclass(value) else "a class"
        raise ConfigError(
            f"{path} was given {what}, {value!r}; a run file holds texts, numbers, true and false, lists and tables.",
            remedy="A component is given by the keyword of its kind: environment=..., or "
            + ", ".join((*NAMED[1:], *SINGLE))
            + ".",
        )
    return value
