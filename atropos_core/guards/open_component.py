"""Open a component: show the wait, limit it, and turn an error of its code into one line that names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atropos_core.console.waits import waiting
from atropos_core.errors import AtroposError, PluginError
from atropos_core.guards.deadlines import within
from atropos_core.guards.exits import file_and_line

OPEN_DEADLINE_S = 600.0  # a data set may have to be fetched
MODEL_DEADLINE_S = 1800.0  # model loading and compilation


async def opened(named: str, component: object, deadline_s: float = OPEN_DEADLINE_S) -> Any:
    """Return the result of `component.open()`, or None if it has no such method. `named`: its name for the user, like "reward
    'exact'". Raises DeadlineExceeded, PluginError for any error that is not our own, and MemoryError unchanged."""
    if (start := getattr(component, "open", None)) is None:
        return None
    with waiting(f"{named} to open"), in_one_line(f"{named} could not open"):
        opening = start()
        if not inspect.isawaitable(opening):
            raise PluginError(
                f"{named} could not open: its open() is not a coroutine.", remedy="Begin it with `async def`."
            )
        return await within(opening, deadline_s, f"{named}: open()")


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn an exception of a component's code into a PluginError with `what` and the line of that code."""
    try:
        yield
    except (AtroposError, MemoryError):
        raise
    except Exception as error:
        message = next(iter(str(error).splitlines()), "")
        raise PluginError(
            f"{what}: {type(error).__name__}: {message}{file_and_line(error.__traceback__)}",
            remedy="Fix that line or what it needs. `atropos check` tests a component without a run.",
        ) from error
