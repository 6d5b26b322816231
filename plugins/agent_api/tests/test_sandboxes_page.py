"""docs/agent-sandboxes.md says what each sandbox holds: each program of its table is run in each, and does what the table says."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from plugins.agent_api.tests.poisoned import POISONED
from plugins.agent_api.tests.sandboxes import NETWORK, marked, opened, program, python, run
from tests.conftest import REPOSITORY
from tests.waiting import has_ended, until

PAGE = (REPOSITORY / "docs/agent-sandboxes.md").read_text()
READ = """
import sys
try:
    print("reached" if open(sys.argv[1], "rb").read() else "")
except OSError:
    pass
"""
WRITE = READ.replace(
    'print("reached" if open(sys.argv[1], "rb").read() else "")', 'open(sys.argv[1], "w").write("reached")'
)
SIGNAL = """
import os, sys
try:
    os.kill(int(sys.argv[1]), 15)
    print("reached")
except OSError:
    pass
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
    print("reached")
except OSError:
    pass
"""


def table() -> dict[str, list[str]]:
    """A row's program -> its result in each sandbox."""
    found = re.search(r"^\| a program that \|.*?(?=^$)", PAGE, re.M | re.S)
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[0].splitlines()]
    assert head[1:] == list(NETWORK)
    return {row[0]: row[1:] for row in rows}


async def printed(sandbox, name, folder, text, *arguments):
    """Told by its standard input's first line, as an argument that names a file is shown to a program."""
    told = text.replace("sys.argv[1]", "sys.stdin.readline().strip()")
    wanted = program(
        folder, [python(name), "-S", "-c", told], network=NETWORK[name], stdin="\n".join(arguments).encode() + b"\n"
    )
    return (await run(sandbox, wanted))[1].strip()


async def reads_another_episode(sandbox, name, folder):
    other = await sandbox.start(
        program(folder, ["sh", "-c", "echo secret > answer; sleep 60"], name="other", network=NETWORK[name])
    )
    answer = sandbox.folder() / "other" / "work" / "answer"
    while not (answer.exists() and answer.read_text()):
        await asyncio.sleep(0.01)
    try:
        return await printed(sandbox, name, folder, READ, str(answer)) == "reached"
    finally:
        await other.close()


async def reads_files(sandbox, name, folder):
    (folder / "tasks.jsonl").write_text("answers")
    return await printed(sandbox, name, folder, READ, str(folder / "tasks.jsonl")) == "reached"


async def writes_outside(sandbox, name, folder):
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "plugins/agent_api/tests") as outside:
        for target in (folder / "written", Path(outside) / "written"):
            await printed(sandbox, name, folder, WRITE, str(target))
        return (folder / "written").exists() or bool(os.listdir(outside))


async def reads_environment(sandbox, name, folder):
    return await printed(sandbox, name, folder, READ, f"/proc/{os.getpid()}/environ") == "reached"


async def signals_another(sandbox, name, folder):
    with subprocess.Popen(["sleep", "60"]) as other:
        if await printed(sandbox, name, folder, SIGNAL, str(other.pid)) == "reached":
            await until(lambda: has_ended(other.pid), "the end of the process that had a signal")
        ended = other.poll()
        other.kill()
    return ended == -signal.SIGTERM


async def reaches_a_server(sandbox, name, folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        return await printed(sandbox, name, folder, CONNECT, str(server.getsockname()[1])) == "reached"


REACHES = {
    "reads another episode's directory": reads_another_episode,
    "reads your files": reads_files,
    "writes outside its directories": writes_outside,
    "reads the environment variables of your run": reads_environment,
    "signals a process that it did not start": signals_another,
    "reaches another server of this machine": reaches_a_server,
}


@pytest.mark.parametrize("name", list(NETWORK))
@pytest.mark.parametrize("row", list(table()))
async def test_the_page_says_what_becomes_of_a_program(row, name, tmp_path):
    says = table()[row][list(NETWORK).index(name)]
    async with opened(name) as sandbox:
        if row in REACHES:
            is_held = not await REACHES[row](sandbox, name, tmp_path)
        else:
            poison, mark = POISONED[row], secrets.token_hex(8)
            limits = {"wall_time_s": 4.0, **poison.limits}
            wanted = program(
                tmp_path,
                poison.argv(mark, python(name)),
                limits=limits,
                network=NETWORK[name],
                environment={"MARK": mark},
            )
            ended, _ = await run(sandbox, wanted)
            assert not marked(mark), "whatever it is ended for, nothing is left"
            is_held = ended.limit == poison.limit
        assert {True: "held", False: "not held"}[is_held] == says


def test_the_page_has_every_program_and_the_tests_have_every_row():
    assert set(table()) == set(POISONED) | set(REACHES)
