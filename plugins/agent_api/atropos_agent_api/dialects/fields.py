"""The fields that a request may have, and the effect of each. No field is ignored silently.

A field is read, or has no effect on tokens, or is accepted only with some values, or is about sampling, which the session overrules
or refuses. Any other field is refused by name. The tables of docs/agent-api.md are generated from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_agent_api.calls import CallRefused

Wish = Callable[[Any, str], float | str | None]


@dataclass(frozen=True)
class Fields:
    """The fields of one API, or of one object in its requests."""

    read: Mapping[str, str]  # with their meaning
    no_effect: Mapping[str, str] = field(default_factory=dict)  # on tokens, with the reason
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # accepted values, which change nothing
    sampling: Mapping[str, Wish] = field(
        default_factory=dict
    )  # the value for `Call.sampling`; None if the field asks for nothing

    _taken: frozenset[str] = field(init=False, repr=False)  # accepted with any value

    def __post_init__(self) -> None:
        object.__setattr__(self, "_taken", frozenset((*self.read, *self.no_effect, *self.sampling)))

    def check(self, given: Mapping[str, Any], where: str = "") -> None:
        """Raises CallRefused for a field, or a value, that is not supported."""
        if given.keys() <= self._taken:
            return
        for name in given.keys() - self._taken:
            path = f"{where}.{name}" if where else name
            value, taken = given[name], self.only.get(name, (None,))
            if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in taken):
                continue
            if name in self.only:
                said = " or ".join("null" if one is None else repr(one) for one in taken)
                raise unsupported(path, f"{shown(path)} can only be {said} here")
            raise unsupported(path, f"{shown(path)} is not supported")

    def wishes(self, given: Mapping[str, Any]) -> dict[str, float | str]:
        """The values that the client wants for sampling."""
        found = ((name, wish(given[name], name)) for name, wish in self.sampling.items() if name in given)
        return {name: value for name, value in found if value is not None}


def unsupported(path: str, why: str) -> CallRefused:
    return CallRefused(f"{why}: leave it out.", field=path[:200], code="unsupported_parameter")


def shown(path: str) -> str:
    """A name from outside, shortened for a message of one line."""
    return repr(path if len(path) <= 80 else f"{path[:77]}...")
