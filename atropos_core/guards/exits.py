"""Code of a component that would end the process which runs it: an error of that component, and no more.

`SystemExit` and `KeyboardInterrupt` pass through `except Exception`, and asyncio lets them out of a running loop, so
that a rollout which calls `sys.exit` would end the run under a code that means something else. No Ctrl-C is among them: on
a run's event loop that is a signal handler's business, and raises nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from atropos_core.errors import EndsProcess

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from traceback import FrameSummary


@contextmanager
def contained(name: str, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Raises EndsProcess, which names `name` and the line, in place of what is no Exception. Cancellations pass, and what
    is named."""
    entered = _current()
    ordinary: tuple[type[BaseException], ...] = (Exception, *passing)
    try:
        yield
    except ordinary:
        raise
    except BaseException as error:
        asyncio = sys.modules.get("asyncio")  # no import of it for whoever has no loop, nor while Python shuts down
        cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
        thrown_away = isinstance(error, GeneratorExit) and _current() is not entered  # a coroutine, unfinished
        if cancelled or thrown_away:
            raise
        raise ends_process(name, error) from error


def contain_tasks(loop: AbstractEventLoop, passing: tuple[type[BaseException], ...] = ()) -> None:
    """Every task on `loop`, also one that a component starts for itself, ends with EndsProcess in place of what would end
    the loop."""
    from asyncio import Task

    async def contain(work: Awaitable[Any]) -> Any:
        with contained(f"{getattr(work, '__qualname__', 'a task')}()", passing):
            return await work

    def begin(loop: AbstractEventLoop, work: Any, **keywords: Any) -> Task[Any]:
        task: Task[Any] = Task(contain(work), loop=loop, **keywords)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    loop.set_task_factory(begin)


def ends_process(name: str, error: BaseException) -> EndsProcess:
    detail = f"({error})" if str(error) else ""
    return EndsProcess(
        f"{name} raised {type(error).__name__}{detail}{innermost_line(error.__traceback__)}, which is how a process is ended",
        remedy="Code of a component that cannot go on raises an ordinary exception: then it is data, and the run goes on.",
    )


def _current() -> Any:
    """The task that runs, where there is one: no import of asyncio for whoever has no loop."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio else None
    except RuntimeError:  # no loop runs
        return None


def innermost_line(trace: TracebackType | None) -> str:
    """The innermost line of a component's own, as " in FILE:LINE, FUNCTION()"; empty where there is none."""
    found = _own_line(trace)
    return f" in {Path(found.filename).name}:{found.lineno}, {found.name}()" if found else ""


def file_and_line(trace: TracebackType | None) -> str:
    """The same, as " (FILE:LINE)"."""
    found = _own_line(trace)
    return f" ({Path(found.filename).name}:{found.lineno})" if found else ""


_callers: list[str] = []  # folders outside core whose code calls components, and so is never the component's own line


def calls_components(folder: Path) -> None:
    """Say that the code in this folder calls components: no line of it is shown as the place where a component failed."""
    _callers.append(f"{folder}/")


def _own_line(trace: TracebackType | None) -> FrameSummary | None:
    """The innermost line outside the standard library, installed packages and this one; where there is none, the line
    by which an installed package was entered, or the innermost of this one."""
    import sysconfig
    import traceback

    library, ours = f"{sysconfig.get_path('stdlib')}/", f"{Path(__file__).parents[1]}/"
    callers = tuple(f"{ours}{part}" for part in ("guards/", "launch/signals.py", "processes/")) + tuple(_callers)
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(("<frozen", *callers))
        and (not frame.filename.startswith(library) or "-packages/" in frame.filename)
    ]
    others = [frame for frame in frames if not frame.filename.startswith(ours)]
    own = [frame for frame in others if "-packages/" not in frame.filename]
    return own[-1] if own else others[0] if others else frames[-1] if frames else None
