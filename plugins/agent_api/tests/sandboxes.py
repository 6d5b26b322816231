"""The sandboxes of this machine, for tests: each is open, or its tests are skipped with the reason; and what programs left."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_agent_api.sandboxes.bubblewrap import BubblewrapSandbox
from atropos_agent_api.sandboxes.docker import DockerSandbox
from atropos_agent_api.sandboxes.installations import needed_by
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_core.errors import FitError
from atropos_core.sandboxes import Exit, Limits, Network, Program, Sandbox
from plugins.agent_api.tests.docker_image import make_image

IMAGE = os.environ.get(
    "ATROPOS_TEST_IMAGE", f"atropos-sandbox-test-{os.getpid()}"
)  # a process that a test starts has it from there
NETWORK: dict[str, Network] = {
    "process": "host",
    "bubblewrap": "none",
    "docker": "none",
}  # the least that each can hold to


@cache
def image() -> str:
    """Made once and removed at the end. Nothing without a daemon, which `open` then reports."""
    is_made = "ATROPOS_TEST_IMAGE" in os.environ
    if (
        not is_made
        and shutil.which("docker")
        and not subprocess.run(["docker", "version"], capture_output=True, timeout=60).returncode
    ):
        make_image(IMAGE)
        os.environ["ATROPOS_TEST_IMAGE"] = IMAGE
        atexit.register(subprocess.run, ["docker", "rmi", "--force", IMAGE], capture_output=True, timeout=60)
    return IMAGE


MADE = {"process": ProcessSandbox, "bubblewrap": BubblewrapSandbox, "docker": lambda: DockerSandbox(image())}


@asynccontextmanager
async def opened(name: str, **options: Any) -> AsyncIterator[Sandbox]:
    sandbox = MADE[name](**options)
    try:
        try:
            await sandbox.open()
        except FitError as error:
            pytest.skip(f"sandbox {name} is not permitted here: {error}")
        yield sandbox
    finally:
        await sandbox.close()


def python(name: str) -> str:
    return "python3" if name == "docker" else sys.executable


def program(
    folder: Path, argv: Sequence[str], *, name: str = "one", limits: dict[str, Any] | None = None, **more: Any
) -> Program:
    """A program without network, if the sandbox allows that, which sees the files that its command names. `more` overrides both."""
    bounded = Limits(**{"wall_time_s": 30.0, **(limits or {})})
    more["shown"] = [*needed_by(argv, os.environ["PATH"]), *more.get("shown", ())]
    return Program(name, list(argv), folder / f"{name}.stdout", folder / f"{name}.stderr", limits=bounded, **more)


async def run(sandbox: Sandbox, wanted: Program) -> tuple[Exit, str]:
    """How it ended, and what it printed."""
    running = await sandbox.start(wanted)
    try:
        return await running.wait(), wanted.stdout.read_text(errors="replace")
    finally:
        await running.close()


def marked(mark: str) -> list[int]:
    """Processes with this word among their arguments or in their environment."""
    found = []
    for one in psutil.process_iter():
        try:
            if mark in one.cmdline() or any(mark in value for value in one.environ().values()):
                found.append(one.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [pid for pid in found if pid != os.getpid()]
