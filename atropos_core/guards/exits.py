"""Turn `sys.exit` in the code of an environment or a reward into an error of that component.

`SystemExit` and `KeyboardInterrupt` pass through `except Exception`, and asyncio lets them out of a running loop. A rollout that
calls `sys.exit` would then end the run with a misleading exit code. Ctrl-C is not affected: on a run's event loop, a signal
handler takes it, and nothing is raised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from atropos_core.errors import EndsProcess

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from traceback import FrameSummary


_ENDING = ("_exit", "abort", "execv", "execve")  # of `os`; the other forms of exec call the last two


@contextmanager
def contained(name: str, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Raise EndsProcess, with `name` and the line, instead of anything that is not an Exception. Cancellations and the exceptions in
    `passing` are let through."""
    entered = _current()
    ordinary: tuple[type[BaseException], ...] = (Exception, *passing)
    try:
        yield
    except ordinary:
        raise
    except BaseException as error:
        asyncio = sys.modules.get("asyncio")  # not imported: there may be no loop, or Python may be shutting down
        cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
        thrown_away = isinstance(error, GeneratorExit) and _current() is not entered  # a coroutine, unfinished
        if cancelled or thrown_away:
            raise
        raise ends_process(name, error) from error


def contain_tasks(loop: AbstractEventLoop, passing: tuple[type[BaseException], ...] = ()) -> None:
    """Make every task on `loop`, also those that a component starts, end with EndsProcess instead of ending the loop."""
    from asyncio import Task

    async def contain(work: Awaitable[Any]) -> Any:
        with contained(f"{getattr(work, '__qualname__', 'a task')}()", passing):
            return await work

    def begin(loop: AbstractEventLoop, work: Any, **keywords: Any) -> Task[Any]:
        task: Task[Any] = Task(contain(work), loop=loop, **keywords)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    loop.set_task_factory(begin)


@contextmanager
def own_process(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Keep components from ending the event loop or the process that runs them. `passing`: exceptions that may leave a task
    unchanged."""
    from asyncio import get_running_loop

    loop = get_running_loop()
    before = loop.get_task_factory()
    contain_tasks(loop, passing)
    try:
        with _no_sudden_end():
            yield
    finally:
        loop.set_task_factory(before)


@contextmanager
def _no_sudden_end() -> Iterator[None]:
    """Turn calls that end this process at once into SystemExit, raised inside the code that makes them. A process that such code
    forks ends when it returns to our event loop, whose sockets are not its own. This is global, because those calls are."""
    from asyncio import get_running_loop

    pid, loop = os.getpid(), get_running_loop()
    before = {name: getattr(os, name) for name in _ENDING}

    def refused(name: str) -> Callable[..., NoReturn]:
        def ending(*arguments: Any) -> NoReturn:
            if os.getpid() != pid:
                before[name](*arguments)
            raise SystemExit(f"os.{name}({', '.join(map(repr, arguments))[:80]})")

        return ending

    def in_fork() -> None:
        if getattr(os, "_exit") is not before["_exit"] and not loop.is_closed():  # noqa: B009
            with suppress(RuntimeError):
                loop.call_soon(before["_exit"], 70)

    os.register_at_fork(after_in_child=in_fork)
    for name in _ENDING:
        setattr(os, name, refused(name))
    try:
        yield
    finally:
        for name, real in before.items():
            setattr(os, name, real)


def ends_process(name: str, error: BaseException) -> EndsProcess:
    detail = f"({error})" if str(error) else ""
    return EndsProcess(
        f"{name} raised {type(error).__name__}{detail}{innermost_line(error.__traceback__)}, which is how a process is ended",
        remedy="A component that cannot continue should raise an ordinary exception: that is recorded, and the run continues.",
    )


def _current() -> Any:
    """Return the running task, if any. asyncio is not imported if there is no loop."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio else None
    except RuntimeError:  # no loop runs
        return None


def innermost_line(trace: TracebackType | None) -> str:
    """Return the innermost line of a component's code, as " in FILE:LINE, FUNCTION()", or an empty string."""
    found = _own_line(trace)
    return f" in {Path(found.filename).name}:{found.lineno}, {found.name}()" if found else ""


def file_and_line(trace: TracebackType | None) -> str:
    """Return the same line, as " (FILE:LINE)"."""
    found = _own_line(trace)
    return f" ({Path(found.filename).name}:{found.lineno})" if found else ""


def line_of_component(trace: TracebackType | None) -> str:
    """Return the innermost line of a component's code, as FILE:LINE, or an empty string if it is a line of this package."""
    found = _own_line(trace)
    ours = f"{Path(__file__).parents[1]}/"
    return f"{Path(found.filename).name}:{found.lineno}" if found and not found.filename.startswith(ours) else ""


_callers: list[str] = []  # folders outside core whose code calls components, and so is never the component's own line


def calls_components(folder: Path) -> None:
    """Mark a folder whose code calls components, so that its lines are never shown as the line where a component failed."""
    _callers.append(f"{folder}/")


def _own_line(trace: TracebackType | None) -> FrameSummary | None:
    """Return the innermost line outside the standard library, installed packages and this package. If there is none, return the
    line that entered an installed package, or the innermost line of this package."""
    import sysconfig
    import traceback

    library, ours = f"{sysconfig.get_path('stdlib')}/", f"{Path(__file__).parents[1]}/"
    callers = tuple(f"{ours}{part}" for part in ("guards/", "processes/")) + tuple(_callers)
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(("<frozen", *callers))
        and (not frame.filename.startswith(library) or "-packages/" in frame.filename)
    ]
    others = [frame for frame in frames if not frame.filename.startswith(ours)]
    own = [frame for frame in others if "-packages/" not in frame.filename]
    return own[-1] if own else others[0] if others else frames[-1] if frames else None
