"""Start a vLLM server, watch its processes and end them all: `python -m atropos_engine_vllm.guard SCRATCH DESCRIPTOR FLAG...`.

The guard runs between the engine's process and the server, and leads the server's process group. One side is always left
to clean up:

- The engine's process dies: the guard's standard input closes, and the guard ends the group.
- The guard is killed: the engine's process ends the group.
- A vLLM process ends without a request: the guard names it and ends the rest.

It uses only the standard library, so it starts in milliseconds and takes 10 MB.

It reads two commands, one per line: `watch` (the server is up; every process that runs now must stay alive) and `stop`
(shut down in order).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atropos_engine_vllm.orphan import GUARD_VARIABLE

STOP_S = 2.5  # for vLLM to end in order; the supervisor's own patience is 5 s
SAYS = "atropos: "  # prefix of the guard's own lines in vLLM's log
LOST = 3  # exit code: the guard ended everything without a stop command
STUCK_S = 10.0  # to wait for a killed process to disappear; one that is stuck in a driver may never do so
TRACKERS_S = 2.0  # for Python's resource trackers to remove what their processes left
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHARED = re.compile(r"(/dev/shm/\S+?)(?: \(deleted\))?$", re.MULTILINE)


@dataclass(frozen=True)
class Member:
    """One process of the group. Its pid and start time together identify it."""

    pid: int
    started: int
    command: str

    @property
    def is_tracker(self) -> bool:
        """True for Python's resource tracker, which removes shared memory after its processes have ended."""
        return "multiprocessing.resource_tracker" in self.command

    @property
    def is_vllm(self) -> bool:
        return self.is_titled or "atropos_engine_vllm.server_main" in self.command

    @property
    def name(self) -> str:
        title = self.command.partition("\0")[0].removeprefix("VLLM::")
        return {"EngineCore": "engine core", "Worker": "worker"}.get(title, title) if self.is_titled else "server"

    @property
    def is_titled(self) -> bool:
        """True if vLLM has set the process title, as it does for the processes that it starts."""
        return self.command.startswith("VLLM::")


def members(group: int) -> list[Member]:
    """Return the living processes of a group, except the caller."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                command = Path(entry.path, "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if int(stat[2]) == group and stat[0] not in "ZX":
                found.append(Member(int(entry.name), int(stat[19]), command))
    return found


def shared_memory(group: Iterable[Member]) -> dict[str, int]:
    """Return path and inode of the named shared memory that these processes have mapped."""
    found = {}
    for member in group:
        with contextlib.suppress(OSError):
            for path in _SHARED.findall(Path("/proc", str(member.pid), "maps").read_text()):
                with contextlib.suppress(OSError):
                    found[path] = os.stat(path).st_ino
    return found


def end_group(group: int, segments: dict[str, int], scratch: Path) -> None:
    """Kill the remaining processes of the group, then remove its shared memory (`segments`) and the `scratch` folder.

    The group id must not have been reused: the caller leads the group, or has not yet waited for its leader.
    Resource trackers get TRACKERS_S to do their own work first."""
    segments |= shared_memory(members(group))
    until = time.monotonic() + TRACKERS_S
    while living := members(group):
        late = time.monotonic() > until
        if time.monotonic() > until + STUCK_S:
            with contextlib.suppress(OSError):
                stuck = ", ".join(f"{member.name} (pid {member.pid})" for member in living)
                print(f"{SAYS}killed, and still there: {stuck}.", flush=True)  # noqa: T201 - into the log
            break
        for member in living:
            if late or not member.is_tracker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)
    for path, inode in segments.items():
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)
    shutil.rmtree(scratch, ignore_errors=True)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Guard:
    """Start one server, watch it and end it."""

    def __init__(self, scratch: Path, flags: list[str], listener: int) -> None:
        self._scratch = scratch
        self._group = os.getpid()
        self._segments: dict[str, int] = {}
        self._watched: dict[int, Member] = {}  # by pidfd
        guard = os.getpid()

        def end_with_guard() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(3)

        self._server = subprocess.Popen(
            [sys.executable, "-m", "atropos_engine_vllm.server_main", str(listener), *flags],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener],
            env={**os.environ, GUARD_VARIABLE: str(guard)},
            preexec_fn=end_with_guard,  # no other thread runs here
        )
        os.close(listener)
        self._watched[os.pidfd_open(self._server.pid)] = Member(self._server.pid, 0, "atropos_engine_vllm.server_main")

    def run(self) -> int:
        """Run until the server has ended. Returns the exit code: 0 after a stop command, LOST otherwise.

        Any other exit code means that the guard itself failed."""
        rest = b""
        while True:
            ready, _, _ = select.select([0, *self._watched], [], [])
            if lost := [self._watched[descriptor] for descriptor in ready if descriptor]:
                time.sleep(0.2)  # other vLLM processes that noticed may still be writing the reason to the log
                return self._end(f"vLLM's {lost[0].name} (pid {lost[0].pid}) {self._how(lost[0])}", LOST)
            received = os.read(0, 4096)
            if not received:
                return self._end("the engine's process has gone away", LOST)
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if line == b"watch":
                    self._watch()
                elif line == b"stop":
                    self._ask()
                    return self._end("", 0)

    def _watch(self) -> None:
        living = members(self._group)
        self._segments |= shared_memory(living)
        known = {member.pid for member in self._watched.values()}
        for member in living:
            if member.is_vllm and member.pid not in known:
                with contextlib.suppress(ProcessLookupError):  # it is already gone; the processes that need it end too
                    self._watched[os.pidfd_open(member.pid)] = member

    def _how(self, lost: Member) -> str:
        if lost.pid != self._server.pid:
            return "has ended"
        code = self._server.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _ask(self) -> None:
        self._server.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and any(not member.is_tracker for member in members(self._group)):
            _reap()
            time.sleep(0.02)

    def _end(self, reason: str, code: int) -> int:
        if reason:
            with contextlib.suppress(OSError):  # a full disk must not prevent the cleanup
                print(f"{SAYS}{reason}; the rest of the server is ended.", flush=True)  # noqa: T201 - into the log
        end_group(self._group, self._segments, self._scratch)
        return code


def main() -> None:
    scratch, listener, *flags = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned processes become our children to wait for
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the guard ends after the group; not SIG_IGN, which children inherit
    os._exit(Guard(Path(scratch), flags, int(listener)).run())


if __name__ == "__main__":
    main()
