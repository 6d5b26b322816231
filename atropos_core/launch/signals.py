"""Signals, watching of children, and an alarm for code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from atropos_core import console
from atropos_core.console.waits import waited_for
from atropos_core.errors import EventLoopBlocked, Interrupted, ProcessDied
from atropos_core.guards.exits import contain_tasks
from atropos_core.launchers import RunWorkers
from atropos_core.processes.child import Child

T = TypeVar("T")

TWICE_S = 0.5  # between two requests to end that are two
_ENDING = ("_exit", "abort", "execv", "execve")  # of `os`; the other forms of exec call the last two
BLOCKED_AFTER_S = float(os.environ.get("ATROPOS_BLOCKED_AFTER_S", "30"))  # of the event loop


async def interruptible(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, a part of start-up, unless the user stops the run first. Then raises Interrupted, which names what was
    waited for."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        waits = "; ".join(waited_for())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise Interrupted("stopped before the first step" + (f", waiting for {waits}" if waits else ""))
    return task.result()


async def watched(work: Coroutine[Any, Any, T], children: Sequence[Child], workers: RunWorkers | None = None) -> T:
    """Await `work`. Raises the error of a child that ends, even between requests, or of `workers`."""
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(child.peer.lost.wait()) for child in children]
    broken = {workers.broken} if workers is not None else set()
    try:
        await asyncio.wait({task, *watches, *broken}, return_when=asyncio.FIRST_COMPLETED)
        for failed in broken:
            if failed.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                failed.result()
        for child in children:
            if child.peer.lost.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise child.peer.error or ProcessDied(f"{child.role} has gone away")
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for watch in watches:
            watch.cancel()


@contextmanager
def signals(stop: asyncio.Event, began: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the run to save and end. The second ends it at once; so does the first if the run
    has not `began`."""
    current = asyncio.current_task()
    assert current is not None, "called from a coroutine"

    def end_requested() -> None:
        if stop.is_set():
            current.cancel()
        else:
            how = (
                "finishing what has begun and saving (once more ends it at once)"
                if began.is_set()
                else "no step has begun"
            )
            console.say(f"\nstopping: {how}")
            stop.set()

    with requests_to_end(end_requested):
        yield


class EndRequests:
    """Requests to end work outside the main thread, where signals do not arrive. A request that comes before anything listens is
    kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliver: Callable[[], object] | None = None
        self._kept = 0

    def request(self) -> None:
        """Request the end. May be called from any thread."""
        with self._lock:
            if self._deliver is None:
                self._kept += 1
            else:
                self._deliver()

    @contextmanager
    def listening(self, arrived: Callable[[], object]) -> Iterator[None]:
        """Call `arrived` on the running loop for each request."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._deliver = lambda: loop.call_soon_threadsafe(arrived)
            kept, self._kept = self._kept, 0
        for _ in range(kept):
            arrived()
        try:
            yield
        finally:
            with self._lock:
                self._deliver = None


FROM_OUTSIDE: ContextVar[EndRequests | None] = ContextVar("requests_to_end", default=None)  # of a thread's work


def in_main_thread() -> bool:
    """True if signals arrive in this thread."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def requests_to_end(requested: Callable[[], object]) -> Iterator[None]:
    """Call `requested` for each Ctrl-C, SIGTERM and SIGHUP. Two within TWICE_S count as one: a shell, `timeout` or a service
    manager sends the same signal to a process and to its group. An ignored SIGHUP (`nohup`) stays ignored. Outside the main
    thread, where signals do not arrive, `requested` is called for each request of FROM_OUTSIDE."""
    loop = asyncio.get_running_loop()
    last = -TWICE_S

    def arrived() -> None:
        nonlocal last
        before, last = last, loop.time()
        if last - before >= TWICE_S:
            requested()

    if not in_main_thread():
        outside = FROM_OUTSIDE.get()
        with outside.listening(arrived) if outside is not None else nullcontext():
            yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, arrived)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _waits_for_events(frame: FrameType | None) -> bool:
    """True if the event loop itself was in `select`, and no component's code was running."""
    caller = frame.f_back if frame is not None else None
    return (
        caller is not None
        and caller.f_code.co_name == "_run_once"
        and caller.f_globals.get("__name__") == "asyncio.base_events"
    )


@contextmanager
def blocked_loop_alarm() -> Iterator[None]:
    """Interrupt code that blocks the event loop by raising an exception inside it, so that an environment that never awaits
    fails only its own rollout.

    After the process was stopped, the alarm goes off at once although nothing blocked, so only a second one counts. If a
    component replaces the handler, it is restored. Outside the main thread no signal arrives, and nothing is interrupted."""
    if not in_main_thread():
        yield
        return
    first_s, second_s = 0.8 * BLOCKED_AFTER_S, 0.2 * BLOCKED_AFTER_S
    rung = False

    def blocked(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        if not rung:
            rung = True
            signal.setitimer(signal.ITIMER_REAL, second_s)
            return
        if _waits_for_events(frame):  # nothing keeps it: the machine has not let this process run
            signal.setitimer(signal.ITIMER_REAL, second_s)
            return
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}()" if frame else "?"
        raise EventLoopBlocked(
            f"{where} blocked the event loop for {BLOCKED_AFTER_S:g} s. Code of an environment must await whatever takes long "
            "(asyncio.to_thread for computations)."
        )

    def put_back() -> None:
        for number, handler in ours.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                console.warn(
                    f"a component replaced the run's handler for {signal.Signals(number).name}, which the run needs: "
                    "it has been restored."
                )

    async def beat() -> None:
        nonlocal rung
        while True:
            rung = False
            put_back()
            signal.setitimer(signal.ITIMER_REAL, first_s)
            await asyncio.sleep(BLOCKED_AFTER_S / 4)

    before: Callable[[int, FrameType | None], object] | int | None = signal.signal(signal.SIGALRM, blocked)
    watching = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours: dict[int, Any] = {number: signal.getsignal(number) for number in watching}
    beating = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beating.cancel()
        put_back()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def own_process(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Keep components from ending the event loop or the process that runs them. `passing`: exceptions that may leave a task
    unchanged."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    contain_tasks(loop, passing)
    try:
        with no_sudden_end():
            yield
    finally:
        loop.set_task_factory(before)


@contextmanager
def no_sudden_end() -> Iterator[None]:
    """Turn calls that end this process at once into SystemExit, raised inside the code that makes them. A process that such code
    forks ends when it returns to our event loop, whose sockets are not its own. This is global, because those calls are."""
    pid, loop = os.getpid(), asyncio.get_running_loop()
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
