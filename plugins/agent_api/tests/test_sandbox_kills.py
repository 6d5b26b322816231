"""`kill -9` of the supervisor or of a monitor, at whatever moment: no process and no directory of a program is left."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atropos_agent_api.sandboxes.monitored import ROLE
from atropos_core.errors import SandboxError
from atropos_core.storage.tempdirs import sweep
from plugins.agent_api.tests.sandboxes import marked, opened, program

WITHIN_S = 60.0


def wait_until(holds) -> bool:
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["process", "bubblewrap", "docker"])
async def test_a_supervisor_that_is_killed_leaves_no_process_and_no_file(name, seed, tmp_path):
    async with opened(name):
        pass  # or skipped
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "plugins.agent_api.tests.sandbox_supervisor", name, str(tmp_path), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as supervisor:
        folder = Path(supervisor.stdout.readline().strip())
        await asyncio.sleep(random.Random(f"{name} {seed}").uniform(0, 0.8))
        supervisor.kill()
    assert wait_until(lambda: not marked(mark) and not list(folder.glob("*"))), (marked(mark), list(folder.glob("*")))

    def is_removed() -> bool:
        sweep(ROLE)  # as the next one does; a monitor that was only starting may have put its directory there again
        return not folder.exists()

    assert wait_until(is_removed)


async def test_the_last_monitor_of_a_supervisor_that_was_killed_removes_its_folder(tmp_path):
    command = [sys.executable, "-m", "plugins.agent_api.tests.sandbox_supervisor", "process", str(tmp_path), "last"]
    own = {**os.environ, "TMPDIR": str(tmp_path)}  # a folder in which no other run looks for left files
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=own) as supervisor:
        folder = Path(supervisor.stdout.readline().strip())
        assert wait_until(lambda: len(list(folder.glob("*/work/left"))) == 3)
        supervisor.kill()
    assert wait_until(lambda: not folder.exists())


@pytest.mark.parametrize(("name", "network"), [("process", "host"), ("bubblewrap", "none")])
async def test_a_monitor_that_is_killed_takes_its_program_along_and_is_an_error(name, network, tmp_path):
    mark = secrets.token_hex(8)
    async with opened(name) as sandbox:
        text = "setsid sh -c 'setsid sleep 60 & sleep 60' & echo up; sleep 60"
        running = await sandbox.start(
            program(tmp_path, ["sh", "-c", text], network=network, environment={"MARK": mark})
        )
        while "up" not in (tmp_path / "one.stdout").read_text() or len(marked(mark)) < 3:
            await asyncio.sleep(0.01)
        [monitor] = [one for one in psutil.Process().children() if "one" in one.cmdline()]
        monitor.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError, match="monitor of a program was killed"):
            await running.wait()
        assert wait_until(lambda: not marked(mark))
        await running.close()
        assert not os.listdir(sandbox.folder())


@pytest.mark.parametrize(("name", "network"), [("process", "host"), ("bubblewrap", "none")])
async def test_a_monitor_that_is_told_to_end_by_the_system_cleans_up(name, network, tmp_path):
    mark = secrets.token_hex(8)
    async with opened(name) as sandbox:
        running = await sandbox.start(program(tmp_path, ["sleep", "60"], network=network, environment={"MARK": mark}))
        [monitor] = [one for one in psutil.Process().children() if "one" in one.cmdline()]
        monitor.terminate()
        assert (await running.wait()).stopped
        assert wait_until(lambda: not marked(mark))
        await running.close()
        assert sandbox.folder().exists(), "it belongs to the supervisor, which continues"
