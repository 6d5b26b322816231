"""Checking JSON against an SDK's own pydantic types, strictly: nothing missing, nothing of another type, nothing unknown."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter


def as_typed(kind: Any, value: Any, *, besides: tuple[str, ...] = ()) -> Any:
    """`besides`: fields that the SDK does not know, and may be there."""
    made = TypeAdapter(kind).validate_python(value)
    assert not unknown(made) - {*besides}, unknown(made)
    return made


def unknown(model: Any) -> set[str]:
    found = set(model.model_extra or ())
    for name in model.model_fields_set:
        value = getattr(model, name, None)
        for one in value if isinstance(value, list) else [value]:
            if hasattr(one, "model_extra"):
                found |= unknown(one)
    return found


def data_of(text: str) -> list[Any]:
    """The data of a stream's events, without the word that ends some streams."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
