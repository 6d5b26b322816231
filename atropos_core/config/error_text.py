"""What is said of a wrong key or value in a run file, or of an option of a component."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str], prefix: str = "") -> str:
    """pydantic's complaints in one line each: the key, what was given and by whom, what is wanted, the near miss."""
    lines = []
    for problem in error.errors():
        path = (prefix + ".".join(str(part) for part in problem["loc"])).rstrip(".")
        origin = next((f" (from {origins[key]})" for key in origins if key == path or key.startswith(path + ".")), "")
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(problem["loc"][-1]), _names_at(model, problem["loc"][:-1]), n=1)
            hint = (
                f" Did you mean {near[0]!r}?"
                if near
                else f" There is: {', '.join(_names_at(model, problem['loc'][:-1]))}."
            )
            lines.append(f"unknown key {path!r}{origin}.{hint}")
        elif problem["type"] == "missing":
            lines.append(f"{path!r} is missing{origin}.")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = f", not {problem['input']!r}" if problem["loc"] else ""
            lines.append(f"{path + ': ' if path else ''}{message[0].lower() + message[1:]}{given}{origin}.")
    return "\n".join(lines)


def _names_at(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    at: type[BaseModel] = model
    for part in path:
        annotation = at.model_fields[part].annotation if part in at.model_fields else None
        inner = (one for one in (annotation, *get_args(annotation)) if isinstance(one, type))  # also `Model | None`
        found = next((one for one in inner if issubclass(one, BaseModel)), None)
        if found is None:
            return []
        at = found
    return list(at.model_fields)
