"""Code that blocks the event loop is interrupted where it stands."""

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

from atropos_core.guards.blocked_loop import blocked_loop_alarm

BLOCKING = """
import asyncio, time
from atropos_core.errors import EventLoopBlocked
from atropos_core.guards.blocked_loop import blocked_loop_alarm

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
    main = threading.main_thread().ident
    assert main is not None

    def alarm_twice() -> None:
        for _ in range(2):
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGALRM)
        time.sleep(0.1)  # so that the loop still waits for events when the second one arrives

    with blocked_loop_alarm():
        await asyncio.sleep(0.05)
        await asyncio.to_thread(alarm_twice)
