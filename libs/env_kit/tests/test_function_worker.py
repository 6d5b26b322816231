"""A function in a process of its own: real child processes, real deadlines, real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from atropos_core.errors import DataError, DeadlineExceeded, RemoteError, WorkerLost
from atropos_env_kit.function_worker import Worker
from tests.waiting import has_ended, until

FUNCTIONS = """
import os, sys, time
from pathlib import Path
import numpy as np

def pid():
    return os.getpid()

def double(values):
    return values * 2

def either(what):
    if what == "raise":
        raise KeyError("mine")
    if what == "exit":
        print("last words", flush=True)
        os._exit(3)
    if what == "hang":
        while True:
            pass
    if what == "object":
        return object()
    return os.getpid()

def slowly(note, number):
    path = Path(note)
    path.write_text(path.read_text() + f"start {number}\\n" if path.exists() else f"start {number}\\n")
    time.sleep(0.1)
    path.write_text(path.read_text() + f"end {number}\\n")
"""


@pytest.fixture
async def functions(tmp_path, monkeypatch):
    """Workers of the functions above; all are closed at the end."""
    (tmp_path / "functions_of_the_worker_test.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workers: list[Worker] = []

    def make(name: str, log: Path = Path("/dev/null")) -> Worker:
        workers.append(Worker(f"functions_of_the_worker_test:{name}", log))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


def ours() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "atropos_core.processes.child_main" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


async def test_arrays_go_there_and_come_back(functions):
    made = await functions("double").call(np.array([[1.5, 2.5]], np.float32), deadline_s=30)
    assert made.tolist() == [[3.0, 5.0]]
    assert made.dtype == np.float32


async def test_one_process_starts_with_the_first_call_and_answers_all_of_them(functions):
    worker = functions("pid")
    assert ours() == []
    pids = [await worker.call(deadline_s=30) for _ in range(3)]
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()
    assert [child.pid for child in ours()] == pids[:1]


async def test_calls_take_turns(functions, tmp_path):
    worker = functions("slowly")
    await asyncio.gather(*(worker.call(str(tmp_path / "note"), number, deadline_s=30) for number in range(3)))
    assert (tmp_path / "note").read_text() == "".join(f"start {number}\nend {number}\n" for number in range(3))


async def test_a_call_that_waits_its_turn_does_not_spend_its_deadline(functions, tmp_path):
    worker = functions("slowly")
    await worker.call(str(tmp_path / "note"), 0, deadline_s=30)
    await asyncio.gather(*(worker.call(str(tmp_path / "note"), number, deadline_s=2.5) for number in range(27)))


async def test_what_the_function_raises_arrives_and_the_process_lives_on(functions):
    worker = functions("either")
    before = await worker.call("pid", deadline_s=30)
    with pytest.raises(RemoteError, match="raised KeyError: mine") as caught:
        await worker.call("raise", deadline_s=30)
    assert "functions_of_the_worker_test.py" in str(caught.value)
    assert await worker.call("pid", deadline_s=30) == before


async def test_a_result_or_an_argument_that_cannot_travel_is_named_and_the_process_lives_on(functions):
    worker = functions("either")
    before = await worker.call("pid", deadline_s=30)
    with pytest.raises(DataError, match="builtins.object has no encoding"):
        await worker.call("object", deadline_s=30)
    with pytest.raises(DataError, match="set has no encoding"):
        await worker.call({1}, deadline_s=30)
    assert await worker.call("pid", deadline_s=30) == before


async def test_a_call_past_its_deadline_ends_the_process_and_the_next_gets_a_new_one(functions):
    worker = functions("either")
    before = await worker.call("pid", deadline_s=30)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="within 0.3 s"):
        await worker.call("hang", deadline_s=0.3)
    assert time.monotonic() - start < 20
    assert not psutil.pid_exists(before), "it does not compute on for nobody"
    after = await worker.call("pid", deadline_s=30)
    assert after != before
    assert [child.pid for child in ours()] == [after]


async def test_a_call_that_is_cancelled_does_not_leave_its_work_to_the_next_one(functions):
    worker = functions("either")
    before = await worker.call("pid", deadline_s=30)
    call = asyncio.ensure_future(worker.call("hang", deadline_s=60))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await worker.call("pid", deadline_s=30) != before
    assert not psutil.pid_exists(before)


async def test_a_call_cancelled_while_it_waits_its_turn_disturbs_nobody(functions, tmp_path):
    worker = functions("slowly")
    first = asyncio.ensure_future(worker.call(str(tmp_path / "note"), 0, deadline_s=30))
    second = asyncio.ensure_future(worker.call(str(tmp_path / "note"), 1, deadline_s=30))
    for _ in range(5):  # turns of the loop: it waits for the first
        await asyncio.sleep(0)
    second.cancel()
    await first
    assert (tmp_path / "note").read_text() == "start 0\nend 0\n"


async def test_kill_9_ends_the_call_by_name_and_the_next_gets_a_new_process(functions):
    worker = functions("either")
    before = await worker.call("pid", deadline_s=30)
    call = asyncio.ensure_future(worker.call("hang", deadline_s=60))
    await asyncio.sleep(0.05)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="worker of functions_of_the_worker_test:either .* was killed by SIGKILL"):
        await call
    assert await worker.call("pid", deadline_s=30) != before


async def test_a_process_that_was_killed_between_calls_is_replaced(functions):
    worker = functions("pid")
    before = await worker.call(deadline_s=30)
    os.kill(before, signal.SIGKILL)
    await until(lambda: has_ended(before), "the end of the process")
    await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
    assert await worker.call(deadline_s=30) != before


async def test_a_function_that_ends_its_process_is_named_with_its_last_words(functions, tmp_path):
    worker = functions("either", tmp_path / "log")
    with pytest.raises(WorkerLost) as caught:
        await worker.call("exit", deadline_s=30)
    assert "exit code 3" in str(caught.value)
    assert "last words" in str(caught.value)


async def test_a_function_that_is_not_there_is_named_and_leaves_no_process(functions):
    worker = functions("nothing")
    with pytest.raises(Exception, match="there is no 'nothing' in it"):
        await worker.call(deadline_s=30)
    assert ours() == []


async def test_close_ends_the_process_may_be_called_twice_and_before_any_call(functions):
    worker = functions("pid")
    await worker.close()
    await worker.call(deadline_s=30)
    await worker.close()
    assert ours() == []
    await worker.close()


async def test_closing_ends_a_call_that_is_still_waiting(functions):
    worker = functions("either")
    await worker.call("pid", deadline_s=30)
    call = asyncio.ensure_future(worker.call("hang", deadline_s=60))
    await asyncio.sleep(0.05)
    await worker.close()
    with pytest.raises(WorkerLost):
        await call
    assert ours() == []
