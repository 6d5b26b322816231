"""A function that is imported once: each program is a fork of that process, held as any other of sandbox `process`."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atropos_agent_api.sandboxes.preloaded import PreloadedSandbox
from atropos_core.errors import ConfigError, SandboxError
from atropos_core.sandboxes import Exit, Limits, Program

FUNCTIONS = Path(__file__).with_name("preloaded_functions.py")
TASK = json.dumps({"id": "1", "prompt": "two and two", "messages": []}).encode()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="functions are forked only on Linux")


@asynccontextmanager
async def sandbox(name: str, folder: Path) -> AsyncIterator[PreloadedSandbox]:
    made = PreloadedSandbox(str(FUNCTIONS), name, folder, folder / "function.log")
    try:
        await made.open()
        yield made
    finally:
        await made.close()


def program(made: PreloadedSandbox, folder: Path, name: str = "one", **limits: float) -> Program:
    inside = made.inside(name, "http://127.0.0.1:1/", "host")
    environment = {"ATROPOS_TASK_FILE": f"{inside.home}/task.json"}
    return Program(
        name, ["function"], folder / f"{name}.out", folder / f"{name}.err", environment,
        home_files={"task.json": TASK}, network="host", limits=replace(Limits(), **limits),
    )  # fmt: skip


async def ended(made: PreloadedSandbox, wanted: Program) -> Exit:
    running = await made.start(wanted)
    try:
        return await running.wait()
    finally:
        await running.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_each_call_begins_with_the_state_of_the_import_and_has_all_of_its_own(tmp_path: Path) -> None:
    os.environ["SECRET_OF_OURS"] = "hidden"
    async with sandbox("tells", tmp_path) as made:
        for name in ("one", "two"):
            assert (await ended(made, program(made, tmp_path, name))).code == 0
    first, second = [(tmp_path / f"{name}.out").read_text().split(maxsplit=6) for name in ("one", "two")]
    assert first[0] == second[0], "imported once"
    assert len({first[0], first[1], second[1]}) == 3
    assert (first[2], second[2]) == ("1", "1")
    assert first[3].endswith("one/work") and second[4].endswith("two/home")
    assert first[5:] == ["None", "two and two\n"]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("is_a_coroutine", 0, "awaited"), ("exits", 3, ""), ("raises", 1, "ValueError: there is no such thing")],
)
async def test_how_a_function_ends_is_how_its_program_ends(tmp_path: Path, name: str, code: int, said: str) -> None:
    async with sandbox(name, tmp_path) as made:
        assert (await ended(made, program(made, tmp_path))).code == code
    assert said in (tmp_path / "one.out").read_text() + (tmp_path / "one.err").read_text()


async def test_limits_hold_and_whatever_was_forked_is_ended(tmp_path: Path) -> None:
    async with sandbox("forks_and_stays", tmp_path) as made:
        late = await ended(made, program(made, tmp_path, wall_time_s=4.0))
        assert (late.limit, late.left_running) == ("wall_time", 2)
        await until(
            lambda: not [one for one in psutil.Process().children(recursive=True) if "sleep" in one.name()],
            "the end of what was forked",
        )
    async with sandbox("prints_for_ever", tmp_path) as made:
        assert (await ended(made, program(made, tmp_path, output_bytes=10_000))).limit == "output"
    assert (tmp_path / "one.out").stat().st_size <= 10_000


@pytest.mark.parametrize("reads", [True, False], ids=["that reads", "that has not read what it was sent"])
async def test_a_monitor_that_is_killed_leaves_nothing_of_what_was_forked(tmp_path: Path, reads: bool) -> None:
    async with sandbox("forks_and_stays", tmp_path) as made:
        running = await made.start(program(made, tmp_path))
        await until(lambda: "up" in (tmp_path / "one.out").read_text(), "it does not begin")
        [preloader] = [
            one for one in psutil.Process().children() if "atropos_agent_api.sandboxes.preloader" in one.cmdline()
        ]
        [monitor] = preloader.children()
        below = monitor.children(recursive=True)
        assert len(below) >= 3
        if not reads:  # its end then resets the connection
            [monitor] = monitor.children()  # the one of its two processes that reads
            monitor.send_signal(signal.SIGSTOP)
            await until(lambda: monitor.status() == psutil.STATUS_STOPPED, "it does not stop")
            running._writer.write(b"stop\n")
        monitor.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError, match="monitor of a program was killed"):
            await running.wait()
        await until(lambda: not any(one.is_running() and one.status() != "zombie" for one in below), f"left: {below}")
        await running.close()


async def test_while_a_program_runs_its_monitors_connection_waits_for_nothing_but_news(tmp_path: Path) -> None:
    """A separate, empty standard input would be sent again and again by asyncio of Python 3.12 and 3.13."""
    async with sandbox("forks_and_stays", tmp_path) as made:
        running = await made.start(program(made, tmp_path))
        connection = running._writer.get_extra_info("socket").fileno()
        assert asyncio.get_running_loop()._selector.get_key(connection).events == selectors.EVENT_READ
        await running.close()


async def test_a_preloader_that_is_killed_is_begun_anew(tmp_path: Path) -> None:
    async with sandbox("tells", tmp_path) as made:
        assert (await ended(made, program(made, tmp_path))).code == 0
        [preloader] = [
            one for one in psutil.Process().children() if "atropos_agent_api.sandboxes.preloader" in one.cmdline()
        ]
        preloader.kill()
        preloader.wait(10)
        assert (await ended(made, program(made, tmp_path, "two"))).code == 0
    assert not [one for one in psutil.Process().children() if "atropos_agent_api.sandboxes.preloader" in one.cmdline()]


async def test_many_at_once(tmp_path: Path) -> None:
    async with sandbox("tells", tmp_path) as made:
        found = await asyncio.gather(*(ended(made, program(made, tmp_path, f"p{number}")) for number in range(16)))
    assert all(one.code == 0 for one in found)


async def test_a_function_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be imported: AttributeError"):
        async with sandbox("absent", tmp_path):
            pass


async def test_threads_that_an_import_starts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "threads.py"
    module.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], name='keeps-alive', daemon=True).start()\n"
        "def main(task):\n    print(threading.active_count())\n"
    )
    made = PreloadedSandbox(str(module), "main", tmp_path, tmp_path / "function.log")
    try:
        await made.open()
        assert "started threads (keeps-alive), which a fork does not have" in " ".join(capsys.readouterr().err.split())
        assert (await ended(made, program(made, tmp_path))).code == 0
    finally:
        await made.close()
    async with sandbox("tells", tmp_path):
        assert "threads" not in capsys.readouterr().err
