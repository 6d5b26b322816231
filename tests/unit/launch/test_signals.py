"""What surrounds a run: children that go away, signals, code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from atropos_core.errors import Interrupted, ProcessDied
from atropos_core.launch.signals import TWICE_S, interruptible, signals, watched
from atropos_core.launchers import RunWorkers
from atropos_core.processes.child import Child
from atropos_core.types import Metrics
from tests.waiting import until

SLEEP = {"kind": "function", "name": "time:sleep"}


class Work:
    """A coroutine that goes on until it is let go, and remembers how it ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended = ""

    async def run(self) -> str:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        self.ended = "done"
        return "result"


# -- interruptible


async def test_work_that_nobody_stops_gives_its_result():
    work = Work()
    work.go.set()
    assert await interruptible(asyncio.Event(), work.run()) == "result"


async def test_work_that_is_stopped_is_cancelled_before_anything_else_happens():
    stop, work = asyncio.Event(), Work()
    task = asyncio.ensure_future(interruptible(stop, work.run()))
    await asyncio.sleep(0.01)
    stop.set()
    with pytest.raises(Interrupted):
        await task
    assert work.ended == "cancelled"


async def test_an_error_of_the_work_is_its_own():
    async def raises() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await interruptible(asyncio.Event(), raises())


# -- watched


async def test_work_is_watched_to_its_end_and_its_error_passes():
    async def raises() -> None:
        raise KeyError("mine")

    work = Work()
    work.go.set()
    await watched(work.run(), [])  # type: ignore[arg-type]
    assert work.ended == "done"
    with pytest.raises(KeyError, match="mine"):
        await watched(raises(), [])


async def test_a_child_that_is_killed_without_a_request_ends_the_work_by_name(tmp_path):
    children = [await Child.start(role, SLEEP, tmp_path / role, threads=1) for role in ("engine", "trainer")]
    try:
        work = Work()
        task = asyncio.ensure_future(watched(work.run(), children))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert not task.done()
        os.kill(children[1].process.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match=r"trainer \(pid \d+\) was killed by SIGKILL"):
            await asyncio.wait_for(task, 30)
        assert work.ended == "cancelled"
    finally:
        await asyncio.gather(*(child.kill() for child in children))


class Workers(RunWorkers):
    def __init__(self) -> None:
        self.broken = asyncio.get_running_loop().create_future()

    def step_ended(self, metrics: Metrics) -> Metrics:
        return {}


async def test_workers_that_break_end_the_work_by_their_own_error():
    work, workers = Work(), Workers()
    task = asyncio.ensure_future(watched(work.run(), [], workers))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert not task.done()
    workers.broken.set_exception(ProcessDied("the server has ended"))
    with pytest.raises(ProcessDied, match="the server has ended"):
        await asyncio.wait_for(task, 30)
    assert work.ended == "cancelled"


async def test_work_that_is_watched_is_cancelled_with_its_watcher():
    work = Work()
    task = asyncio.ensure_future(watched(work.run(), []))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended == "cancelled"


# -- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_asks_and_the_second_ends(number, capfd):
    stop, began, went_on = asyncio.Event(), asyncio.Event(), False
    began.set()

    async def run() -> None:
        nonlocal went_on
        with signals(stop, began):
            for _ in range(2):  # to the process, and to its group: one
                os.kill(os.getpid(), number)
                for _ in range(5):  # turns of the loop, not a time: two that are further apart than TWICE_S are two
                    await asyncio.sleep(0)
            await until(stop.is_set, "the first signal")
            await asyncio.sleep(TWICE_S + 0.1)
            went_on = True
            os.kill(os.getpid(), number)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert went_on, "one of each pair ended nothing"
    assert "once more ends it at once" in "".join(capfd.readouterr())


async def test_signals_are_as_before_afterwards():
    with signals(asyncio.Event(), asyncio.Event()):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
