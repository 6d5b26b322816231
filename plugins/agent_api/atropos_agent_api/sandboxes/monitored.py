"""A program under a monitor, as its supervisor sees it. `process` and `bubblewrap` share this code.

`monitor.py` is the other half. The directories of programs are in one folder of this process. If the supervisor ends, each monitor
removes its program's directory. The next supervisor of this role removes the folder itself (`atropos_core.storage.tempdirs`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import urlsplit

from atropos_agent_api.sandboxes.cgroups import CONTROLLERS, Groups, parents
from atropos_agent_api.sandboxes.cgroups import sweep as sweep_groups
from atropos_agent_api.sandboxes.monitor import CLOSE
from atropos_agent_api.sandboxes.monitor import CONTROL as CONTROL
from atropos_agent_api.sandboxes.trees import remove_tree
from atropos_core import console
from atropos_core.errors import ConfigError, SandboxError
from atropos_core.sandboxes import Exit, Inside, Network, Program, RunningProgram, Sandbox
from atropos_core.storage.tempdirs import owned_prefix, sweep, was_left

ROLE = "sandbox"
PACKAGES = Path(__file__).parent.parent.parent
BOOT = "import sys; sys.path.insert(0, {!r}); from atropos_agent_api.sandboxes.monitor import main; main()"
START_DEADLINE_S = 60.0  # for a monitor and its program, on a machine that starts hundreds at once
GUARD_S = 3.0  # for the process above a killed monitor to end what that left
END_DEADLINE_S = 30.0  # after its wall time, for a monitor to have ended its program
OWN = ("HOME", "TMPDIR", "ATROPOS_SANDBOX")  # variables that a sandbox sets
NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


class MonitorProcess(Protocol):
    """The part of subprocess.Popen that is used."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


class MonitoredSandbox(Sandbox):
    """The folder with the programs' directories, and the programs in it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._running: set[MonitoredProgram] = set()
        self._group_parents: dict[str, str] | None = None  # set when the first program starts
        self._finding_groups = asyncio.Lock()  # programs that start at once look for them only once

    def folder(self) -> Path:
        if self._folder is None:
            sweep(ROLE)
            self._folder = Path(tempfile.mkdtemp(prefix=owned_prefix(ROLE))).resolve()
        return self._folder

    def directory(self, name: str) -> Path:
        if NAME.fullmatch(name) is None:
            raise ConfigError(f"a program in a sandbox cannot be named {name!r}: use only letters, digits, - and _.")
        return self.folder() / name

    def inside_directory(self, name: str, api_url: str) -> Inside:
        """The paths of a program that sees this machine's disk."""
        directory = self.directory(name)
        return Inside(str(directory / "work"), str(directory / "home"), api_url, str(directory / "inputs"))

    async def start_monitored(
        self,
        program: Program,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str,
        remedy: str = "",
        kind: str = "process",
        **more: Any,
    ) -> MonitoredProgram:
        """Start a monitor that starts `argv`, for a program that `check_program` accepts. `more` is added to the monitor's job.
        Raises as `Sandbox.start`."""
        directory = self.directory(program.name)
        if directory.exists():
            raise ConfigError(f"there is a program named {program.name!r} in this sandbox already.")
        async with self._finding_groups:
            if self._group_parents is None:
                self._group_parents = await asyncio.to_thread(found_groups)
        parents = self._group_parents.values() if kind != "container" else ()
        job = {
            "directory": str(directory),
            "groups": [os.path.join(parent, f"{self.folder().name}.{program.name}") for parent in set(parents)],
            "argv": list(argv),
            "environment": {**environment, "ATROPOS_SANDBOX": secrets.token_hex(16)},
            "cwd": cwd,
            "stdout": str(program.stdout.absolute()),
            "stderr": str(program.stderr.absolute()),
            "limits": asdict(program.limits),
            "inputs": None if program.inputs is None else str(program.inputs.absolute()),
            "files": [*(f"work/{name}" for name in program.files), *(f"home/{name}" for name in program.home_files)],
            "api": address(program.api_url) if program.network == "api" else None,
            "kind": kind,
            "before": [],
            "after": [],
            "memory_killed": None,
        } | more
        running = MonitoredProgram(program.argv[0], directory, job, self._running.discard, self.start_monitor, remedy)
        self._running.add(running)
        try:
            await running.start([*program.files.values(), *program.home_files.values(), program.stdin])
        except BaseException:
            await running.close()
            raise
        return running

    async def start_monitor(self, theirs: socket.socket, name: str) -> MonitorProcess:
        """Start a process that leads its own group and obeys this socket. `name`: shown in process lists."""
        return subprocess.Popen(  # noqa: ASYNC220 - as for other children: a fork takes a millisecond
            [sys.executable, "-I", "-S", "-c", BOOT.format(str(PACKAGES)), str(theirs.fileno()), name],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )  # fmt: skip

    async def close(self) -> None:
        await asyncio.gather(*(running.close() for running in list(self._running)))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class MonitoredProgram(RunningProgram):
    """One monitor and its reports."""

    def __init__(
        self,
        label: str,
        directory: Path,
        job: dict[str, Any],
        forget: Callable[[MonitoredProgram], None],
        start_monitor: Callable[[socket.socket, str], Awaitable[MonitorProcess]],
        remedy: str,
    ) -> None:
        self._label = label
        self._remedy = remedy
        self._directory = directory
        self._job = job
        self._forget = forget
        self._start_monitor = start_monitor
        self._monitor: MonitorProcess | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        for future in (self._started, self._ended):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited

    async def start(self, contents: Sequence[bytes]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._monitor = await self._start_monitor(theirs, self._directory.name)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen(reader))
        job = json.dumps({**self._job, "sizes": [len(content) for content in contents]}).encode()
        self._writer.write(b"".join([len(job).to_bytes(8, "big"), job, *contents]))
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._started
        except TimeoutError:
            raise SandboxError(
                f"{self._label} did not start within {START_DEADLINE_S:.0f} s.",
                remedy="Start fewer programs at once.",
            ) from None

    async def wait(self) -> Exit:
        bound_s = self._job["limits"]["wall_time_s"] + START_DEADLINE_S + END_DEADLINE_S
        try:
            async with asyncio.timeout(bound_s):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            await self._end_monitor()
            raise SandboxError(
                f"the monitor of a program did not end it within {bound_s:.0f} s, and was killed.",
                remedy="The program may have stopped it: use a sandbox with namespaces (bubblewrap, docker).",
            ) from None

    async def stop(self) -> None:
        if not self._ended.done() and self._writer is not None:
            self._writer.write(b"stop\n")
            await self.wait()

    async def work(self) -> Path:
        await self.wait()
        return self._directory / "work"

    async def close(self) -> None:
        for future in (self._started, self._ended):
            if not future.done():
                future.set_exception(SandboxError("the sandbox was closed while a program ran in it."))
        if self._writer is not None:
            self._writer.write(CLOSE)
            self._writer.close()  # the monitor ends its program, removes the directory, and exits
        if self._monitor is not None and self._monitor.returncode is None and not await self._has_gone(END_DEADLINE_S):
            await self._end_monitor()
        if self._listening is not None:
            self._listening.cancel()
        await asyncio.to_thread(remove_tree, str(self._directory))  # left if the monitor was killed
        self._forget(self)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            async for line in reader:
                self._take(json.loads(line))
        except (OSError, ValueError):  # a killed monitor resets the connection, or leaves half a line
            pass
        for future in (self._started, self._ended):
            if not future.done():
                await self._end_monitor()
                future.set_exception(SandboxError("the monitor of a program was killed, and its program with it."))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            self._started.set_result(None)
        elif event["event"] == "not_started":
            self._started.set_exception(
                SandboxError(f"{self._label} could not be started: {event['why']}.", remedy=self._remedy)
            )
        elif event["event"] == "ended" and event["is_whole"]:
            self._ended.set_result(_exit(event))
        else:
            why = event.get("why", f"processes of it could not be killed within {END_DEADLINE_S:.0f} s")
            self._ended.set_exception(SandboxError(f"a sandbox was lost: {why}."))

    async def _end_monitor(self) -> None:
        """End the monitor. If it is gone without having ended its program, also end processes with the program's mark."""
        if self._monitor is not None and not await self._has_gone(GUARD_S):
            os.killpg(self._monitor.pid, signal.SIGKILL)
            await self._has_gone(END_DEADLINE_S)
        await asyncio.to_thread(Groups(self._job["groups"]).remove)
        await asyncio.to_thread(end_marked, self._job["environment"]["ATROPOS_SANDBOX"])

    async def _has_gone(self, within_s: float) -> bool:
        assert self._monitor is not None
        until = asyncio.get_running_loop().time() + within_s
        while self._monitor.poll() is None:
            if asyncio.get_running_loop().time() > until:
                return False
            await asyncio.sleep(0.002)
        return True


def found_groups() -> dict[str, str]:
    """Return `cgroups.parents`, print how limits are enforced, and remove what killed runs left there."""
    found = parents()
    sweep_groups(list(set(found.values())), lambda name: was_left(name, ROLE))
    held = " and ".join({"memory": "memory", "pids": "processes"}[one] for one in CONTROLLERS if one in found)
    looked = " and ".join({"memory": "memory", "pids": "processes"}[one] for one in CONTROLLERS if one not in found)
    by_kernel = f"{held} by the kernel (cgroups)" if held else ""
    by_looks = f"{looked} by looks ten times a second" if looked else ""
    say_once(f"limits of programs in sandboxes: {', '.join(filter(None, (by_kernel, by_looks)))}; the disk by looks")
    return found


@cache
def say_once(line: str) -> None:
    """A run may have several sandboxes in one process; the line is the same for all."""
    console.say(line)


def end_marked(mark: str) -> None:
    """Kill every process whose initial environment has this mark: programs whose monitor was killed."""
    wanted = f"ATROPOS_SANDBOX={mark}".encode()
    while True:
        found = [
            int(name)
            for name in (os.listdir("/proc") if os.path.isdir("/proc/self") else ())
            if name.isdecimal() and wanted in _environment(name)
        ]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def check_program(program: Program, networks: frozenset[Network]) -> None:
    """Raises ConfigError for a program that no sandbox starts."""
    if program.network not in networks:
        raise ConfigError(
            f'network = "{program.network}" is not possible here: this sandbox gives '
            f"{' or '.join(sorted(networks)) or 'nothing before it is open'}.",
            remedy='Use a sandbox with namespaces (bubblewrap, docker), or set network = "host": the program can then reach '
            "everything that this machine reaches.",
        )
    if program.network == "api":
        address(program.api_url)
    if not program.argv:
        raise ConfigError("the program's command is empty.")
    for name in (*program.files, *program.home_files):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ConfigError(
                f"the file {name!r} would not be in the program's own directory.", remedy="Give a relative path."
            )
    if own := [name for name in OWN if name in program.environment]:
        raise ConfigError(
            f"{own[0]} of a program is set by the sandbox itself.", remedy=f"Remove {own[0]} from its environment."
        )


def address(url: str) -> tuple[str, int]:
    """Host and port of an http URL. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"the API's URL must be http://HOST:PORT/..., not {url!r}.")
    return parts.hostname, parts.port or 80


def basic_environment(program: Program, home: str, temporary: str) -> dict[str, str]:
    """The whole environment of a program: from this process's own it has only PATH and the time zone."""
    taken = {name: os.environ[name] for name in ("PATH", "TZ") if name in os.environ}
    return {"PATH": os.defpath, **taken, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": temporary, **program.environment}


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _exit(event: Mapping[str, Any]) -> Exit:
    status = event["status"]
    return Exit(
        code=status if status >= 0 else None, signal=-status if status < 0 else None, limit=event["limit"],
        stopped=event["stopped"], left_running=event["left_running"], seconds=event["seconds"],
    )  # fmt: skip
