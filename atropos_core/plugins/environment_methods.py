"""Check that a class of environments has the methods that it must define, before it is used."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence

from atropos_core.errors import ConfigError
from atropos_core.interfaces import Environment

# By method: the parameters that tell it under another name, and what to write.
REQUIRED: Mapping[str, tuple[Sequence[str], str]] = {
    "tasks": (("split",), "Write `def tasks(self, split)`, which returns a list of Task."),
    "score": (
        ("task", "reply"),
        "Write `async def score(self, task, reply)`, which returns a number; or, for several turns, "
        "`async def rollout(self, task, policy, *, seed)`, which returns an Episode.",
    ),
}
INSTEAD = ("rollout", "rollout_group")  # of `score`


def check_methods(cls: type[Environment], name: str, made: Environment | None = None) -> None:
    """Raise ConfigError for a class without `tasks`, or without `score` and anything instead of it. `made`: an instance, which may
    have the method as an attribute."""
    own = getattr(made, "__dict__", {})
    lacking = [
        method
        for method, instead in (("tasks", ()), ("score", INSTEAD))
        if all(getattr(cls, one, None) is getattr(Environment, one) and one not in own for one in (method, *instead))
    ]
    if not lacking:
        return
    method = lacking[0]
    parameters, remedy = REQUIRED[method]
    other = _under_another_name(cls, method, parameters)
    file = _file_of(cls)
    place = f" in {file}" if file and file not in name else ""
    besides = "which every environment has" if method == "tasks" else "and no rollout() replaces it"
    raise ConfigError(
        f"{name!r}: the class {cls.__qualname__}{place} lacks {method}(), {besides}."
        + (f" It has {other}(), which is never called." if other else ""),
        remedy=f"Rename {other} to {method}. {remedy}" if other else remedy,
    )


def _under_another_name(cls: type, method: str, parameters: Sequence[str]) -> str | None:
    """Return the name of a method that was meant to be this one, by its name or by its parameters."""
    bases = cls.__mro__[: cls.__mro__.index(Environment)]
    own = {name: one for base in bases for name, one in vars(base).items() if inspect.isfunction(one)}
    own = {name: one for name, one in own.items() if not hasattr(Environment, name)}
    near = difflib.get_close_matches(method, own)
    taking = [name for name, one in own.items() if list(inspect.signature(one).parameters)[1:] == list(parameters)]
    return next(iter([*near, *taking]), None)


def _file_of(cls: type) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except (TypeError, OSError):  # of a class that was made by a call, or in an interactive session
        return None
