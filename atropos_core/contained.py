"""Code of a component that would end the process which runs it: an error of that component, and no more.

`SystemExit` and `KeyboardInterrupt` pass through `except Exception`, and asyncio lets them out of a running loop, so
that a play which calls `sys.exit` would end the run under a code that means something else. No Ctrl-C is among them: on
a run's event loop that is a signal handler's business, and raises nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from atropos_core.errors import EndsProcess


@contextmanager
def contained(name: str) -> Iterator[None]:
    """Raises EndsProcess, which names `name` and the line, in place of what is no Exception. Cancellations pass."""
    entered = _current()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        from asyncio import CancelledError

        thrown_away = isinstance(error, GeneratorExit) and _current() is not entered  # a coroutine, unfinished
        if thrown_away or isinstance(error, CancelledError):
            raise
        raise ends_process(name, error) from error


def ends_process(name: str, error: BaseException) -> EndsProcess:
    said = f"({error})" if str(error) else ""
    return EndsProcess(
        f"{name} raised {type(error).__name__}{said}{_where(error.__traceback__)}, which is how a process is ended",
        remedy="Code of a component that cannot go on raises an ordinary exception: then it is data, and the run goes on.",
    )


def _current() -> Any:
    """The task that runs, where there is one: no import of asyncio for whoever has no loop."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio else None
    except RuntimeError:  # no loop runs
        return None


def _where(trace: TracebackType | None) -> str:
    """The innermost line of a component's own: outside the standard library's loop, and outside this."""
    import traceback

    own = (__file__, "/asyncio/", f"{__package__}/guards.py")
    found = [frame for frame in traceback.extract_tb(trace) if not any(part in frame.filename for part in own)]
    return f" in {Path(found[-1].filename).name}:{found[-1].lineno}, {found[-1].name}()" if found else ""
