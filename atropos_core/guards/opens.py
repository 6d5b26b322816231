"""Opening a component: said while it is waited for, bounded, and an error of its code is one line that names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atropos_core import console
from atropos_core.errors import AtroposError, PluginError
from atropos_core.guards.deadlines import within
from atropos_core.guards.exits import file_and_line

OPEN_DEADLINE_S = 600.0  # a data set may have to be fetched
MODEL_DEADLINE_S = 1800.0  # model loading and compilation


async def opened(named: str, component: object, deadline_s: float = OPEN_DEADLINE_S) -> Any:
    """What `component.open()` gives; None where it has none. `named`: as a reader knows it, like "reward 'exact'". Raises
    DeadlineExceeded, PluginError for what is no error of ours, and MemoryError as it is."""
    if (start := getattr(component, "open", None)) is None:
        return None
    with console.waiting(f"{named} to open"), in_one_line(f"{named} could not open"):
        opening = start()
        if not inspect.isawaitable(opening):
            raise PluginError(
                f"{named} could not open: its open() is no coroutine.", remedy="Begin it with `async def`."
            )
        return await within(opening, deadline_s, f"{named}: open()")


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """What a component's code raises inside becomes a PluginError that says `what`, and the line of that code."""
    try:
        yield
    except (AtroposError, MemoryError):
        raise
    except Exception as error:
        message = next(iter(str(error).splitlines()), "")
        raise PluginError(
            f"{what}: {type(error).__name__}: {message}{file_and_line(error.__traceback__)}",
            remedy="Mend that line, or what it needs; `atropos check` tries a component without a run.",
        ) from error
