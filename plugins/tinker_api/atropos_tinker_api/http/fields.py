"""The fields of a JSON body. Each access checks, and raises DataError that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atropos_core.errors import DataError

MOST_CHARACTERS = 4096  # of a text: a path is the longest
MOST_ENTRIES = 1000  # of metadata
MOST_METADATA = 65_536  # characters of it
LARGEST = (1 << 63) - 1  # of a number: 63 bits, as seeds have


class Fields:
    """A JSON object. `at`: its path in the body."""

    def __init__(self, value: Any, at: str = "") -> None:
        if not isinstance(value, dict):
            raise DataError(f"{at.rstrip('.') or 'the body'} must be a JSON object.")
        self._value: Mapping[str, Any] = value
        self._at = at

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def only(self, *names: str) -> None:
        """Raises DataError for a field that is not one of `names`."""
        if unknown := [name for name in self._value if name not in names]:
            raise DataError(f"{self._at}{unknown[0][:50]} is not known here.", remedy=f"Known: {', '.join(names)}.")

    def text(self, name: str, default: str | None = None, most: int = MOST_CHARACTERS) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise DataError(f"{self._at}{name} must be a text of at most {most} characters.")
        return value

    def text_or_none(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def integer(self, name: str, default: int | None = None, *, least: int = -LARGEST, most: int = LARGEST) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bounds = f" from {least} to {most}" if least > -LARGEST or most < LARGEST else ""
            raise DataError(f"{self._at}{name} must be a whole number{bounds}.")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e300:
            raise DataError(f"{self._at}{name} must be a number.")
        return float(value)

    def truth(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise DataError(f"{self._at}{name} must be true or false.")
        return value

    def fields(self, name: str) -> Fields:
        return Fields(self._get(name, None), f"{self._at}{name}.")

    def items(self, name: str, default: Sequence[Any] | None = None) -> Sequence[Any]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple):
            raise DataError(f"{self._at}{name} must be a list.")
        return value

    def value(self, name: str) -> Any:
        return self._value.get(name)

    def metadata(self, name: str) -> Mapping[str, Any] | None:
        """Return a small object of a client's own."""
        if not self.has(name):
            return None
        value = self._value[name]
        if not isinstance(value, dict) or len(value) > MOST_ENTRIES or len(str(value)) > MOST_METADATA:
            raise DataError(f"{self._at}{name} must be an object of at most {MOST_METADATA} characters.")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._value.get(name)
        if value is None:
            if default is None:
                raise DataError(f"{self._at}{name} is missing.")
            return default
        return value
