"""Reject true and false where an option is a number."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class NoBooleanIsANumber(BaseModel):
    """pydantic would take True as 1, but `--set sampling.max_tokens=true` has no clear meaning."""

    model_config = ConfigDict(defer_build=True)  # a model built at once would search all of site-packages for pydantic's plugins

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else [value])):
            wanted = set(_types_in(cls.model_fields[str(info.field_name)].annotation))
            if wanted & {int, float} and bool not in wanted:
                raise ValueError("Input should be a number")
        return value


def _types_in(annotation: Any) -> list[Any]:
    parts = get_args(annotation)
    return [one for part in parts for one in _types_in(part)] if parts else [annotation]
