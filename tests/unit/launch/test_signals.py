"""What surrounds a run: children that go away, signals, code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atropos_core.errors import Interrupted, ProcessDied
from atropos_core.launch.signals import TWICE_S, interruptible, signals, watched
from atropos_core.launchers import RunWorkers
from atropos_core.processes.child import Child
from atropos_core.types import Metrics

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
            await asyncio.wait_for(task, 5)
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
        await asyncio.wait_for(task, 5)
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
                await asyncio.sleep(
                    0.05
                )  # no wait_for: in Python 3.11 one that is done just then swallows a cancellation
            assert stop.is_set()
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


# -- the event loop


BLOCKING = """
import asyncio, time
from atropos_core.errors import EventLoopBlocked
from atropos_core.launch.signals import blocked_loop_alarm

def stuck():
    while True:
        time.sleep(0.01)

async def main():
    with blocked_loop_alarm():
        await asyncio.sleep(1.0)  # longer than the bound, and not blocked
        for _ in range(2):
            started = time.monotonic()
            try:
                stuck()
            except EventLoopBlocked as error:
                print(round(time.monotonic() - started, 1), error)
            await asyncio.sleep(0.01)
    started = time.monotonic()
    while time.monotonic() < started + 0.8:
        pass
    print("free again")

asyncio.run(main())
"""


def test_code_that_holds_the_event_loop_is_interrupted_where_it_stands_every_time(tmp_path):
    (tmp_path / "blocking.py").write_text(BLOCKING)
    ended = subprocess.run(
        [sys.executable, "blocking.py"],
        cwd=tmp_path,
        env={**os.environ, "ATROPOS_BLOCKED_AFTER_S": "0.4", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    first, second, last = ended.stdout.splitlines()
    for line in (first, second):
        seconds, text = line.split(" ", 1)
        assert float(seconds) < 10
        assert re.search(r"blocking.py:[78] in stuck\(\) blocked the event loop for 0.4 s", text)
        assert "asyncio.to_thread" in text
    assert last == "free again", "afterwards nobody is interrupted any more"


def test_the_alarm_gives_back_the_handler_that_was_there():
    from atropos_core.launch.signals import blocked_loop_alarm

    def mine(number, frame):
        raise AssertionError("never")

    async def run() -> None:
        with blocked_loop_alarm():
            assert signal.getsignal(signal.SIGALRM) is not mine

    before = signal.signal(signal.SIGALRM, mine)
    try:
        asyncio.run(run())
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


async def test_a_loop_that_waits_for_events_is_blocked_by_nobody_however_late_it_is_run():
    """As on a machine that has not let the process run: two alarms before the loop could say that it is free."""
    from atropos_core.launch.signals import blocked_loop_alarm

    main = threading.main_thread().ident
    assert main is not None

    def alarm_twice() -> None:
        for _ in range(2):
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGALRM)

    with blocked_loop_alarm():
        await asyncio.sleep(0.05)
        alarms = threading.Thread(target=alarm_twice)
        alarms.start()
        await asyncio.sleep(0.5)
        alarms.join()
