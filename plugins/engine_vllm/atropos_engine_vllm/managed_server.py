"""Start, watch and end a vLLM server through its guard (`guard.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from atropos_core.errors import ProcessDied
from atropos_core.plugins.provider import RunContext
from atropos_engine_vllm import command, guard
from atropos_engine_vllm.config import VLLMOptions

LOG_LINES = 7  # of the server's log, in an error
LINE = 300  # characters of each
_NOISE = re.compile(rf"^{guard.SAYS}|resource_tracker|warnings\.warn\(")  # reported above; trackers at their work
_RAISED = re.compile(r"ERROR .*\] \S*(Error|Exception)\b: \S")
STOP_S = guard.STOP_S + guard.TRACKERS_S


class ManagedServer:
    """One vLLM server in its own process group. Only this object and the guard end it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, key: str, log: Path, scratch: Path) -> None:
        self.url = url
        self.key = key
        self.log = log
        self.ended = asyncio.Event()
        self._process = process  # the guard, which leads the group
        self._scratch = scratch
        self._segments: dict[str, int] = {}
        self._watched: set[guard.Member] = set()
        self._began = log.stat().st_size
        self._on_lost: Callable[[ProcessDied], None] | None = None
        self._pidfd: int | None = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._guard_ended)

    @classmethod
    def start(cls, options: VLLMOptions, context: RunContext, dtype: str) -> ManagedServer:
        """Start a server on a free loopback port. It answers once it has loaded the model."""
        log = _log_beside_ours(context.directory)
        key = secrets.token_urlsafe(32)
        scratch = Path(tempfile.mkdtemp(prefix="atropos-vllm-"))  # a short path: Unix sockets allow 107 characters
        try:
            flags = command.flags(options, context, dtype)
            environment = command.environment(options, context, scratch, key)
            with socket.socket() as listener, log.open("ab") as output:
                listener.bind(("127.0.0.1", 0))  # the server inherits it, so no other process can take the port
                process = subprocess.Popen(
                    [sys.executable, "-m", "atropos_engine_vllm.guard", str(scratch), str(listener.fileno()), *flags],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        except BaseException:
            scratch.rmdir()
            raise
        return cls(process, url, key, log, scratch)

    @property
    def pid(self) -> int:
        """The guard's pid, which is also the process group's id."""
        return self._process.pid

    def watch(self, on_lost: Callable[[ProcessDied], None]) -> None:
        """Tell the guard that the server is up. From now on, if any of its processes is lost, the guard reports it and ends the server."""
        members = guard.members(self.pid)
        self._segments = guard.shared_memory(members)  # in case the guard cannot remove it
        self._watched = {member for member in members if member.is_vllm}
        self._on_lost = on_lost
        self._say(b"watch\n")

    def is_dying(self) -> bool:
        """True if a process that the server had when it came up is gone."""
        living = {(member.pid, member.started) for member in guard.members(self.pid)}
        return any((member.pid, member.started) not in living for member in self._watched)

    def explain(self) -> ProcessDied:
        """Return an error that says why the server ended, from its log."""
        return ProcessDied(f"the vLLM server has ended.\n{self.tail()}".rstrip(), remedy=f"Its log is {self.log}")

    def tail(self) -> str:
        """Return parts of the server's log: the guard's reason, the first error (others follow from it), and the end."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            written = log.read().decode(errors="replace").splitlines()
        reason = [line for line in written if line.startswith(guard.SAYS)]
        lines = [line for line in written if not _NOISE.search(line)]
        last = lines[-LOG_LINES:]
        first = next((line for line in lines if _RAISED.search(line)), None)
        if first is not None and first not in last:
            last = [first, "...", *last]
        return "".join(f"  | {line[:LINE]}\n" for line in [*reason, *last])

    async def close(self) -> None:
        """Terminate the server, then kill what is still running. May be called twice."""
        if self._pidfd is None:
            return
        self._on_lost = None
        self._say(b"stop\n")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), STOP_S + 1)
        self._release()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # the guard has ended, which is reported elsewhere
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _guard_ended(self) -> None:
        on_lost, self._on_lost = self._on_lost, None
        self._release()
        self.ended.set()
        if on_lost is not None:
            on_lost(self.explain())

    def _release(self) -> None:
        """Release the guard, and end the group if the guard did not. Until `wait`, the group's id cannot be reused."""
        if self._pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        killed = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if killed is None or killed.si_code != os.CLD_EXITED or killed.si_status not in (0, guard.LOST):
            if killed is not None and killed.si_code != os.CLD_EXITED:
                with self.log.open("a") as log:
                    log.write(
                        f"{guard.SAYS}the server's guard was killed by {signal.Signals(killed.si_status).name}.\n"
                    )
            guard.end_group(self.pid, self._segments, self._scratch)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _log_beside_ours(directory: Path) -> Path:
    """Return the path of vLLM's log: `engine.vllm.log`, next to this process's `engine.log`.

    With separate files, the last lines of each come from one process."""
    ours = Path(os.readlink("/proc/self/fd/1"))
    if ours.suffix == ".log" and ours.is_file():
        return ours.with_suffix(".vllm.log")
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"vllm-{os.getpid()}.log"
