"""A Python function that a process imports once and runs in a fork of itself each time.

A call costs milliseconds, whatever the function imports. It starts from the state after the import, and can be ended separately. The
code is that of the process's start: later changes of files on disk have no effect.
Only `ForkedFunction` starts `python -m atropos_agent_api.forks DESCRIPTOR ROLE`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from atropos_core.errors import ConfigError, DeadlineExceeded, RemoteError
from atropos_core.guards.deadlines import within
from atropos_core.processes.child import Child
from atropos_core.processes.child_main import Host, main

MOST_BYTES = 1 << 20  # of a function's result, as JSON
_PR_SET_PDEATHSIG = 1
_SPARE_S = 5.0  # how far a call's answer may exceed its own deadline


class ForkedFunction:
    """The supervisor's half. `reference` is "pkg.mod:name" or "./file.py:name". `adapter`, "pkg.mod:name", wraps that function
    there, so that it takes a JSON value and returns one."""

    def __init__(self, reference: str, adapter: str, log: Path, role: str) -> None:
        self._reference = reference
        self._adapter = adapter
        self._log = log
        self._role = role
        self._child: Child | None = None

    async def open(self) -> None:
        """Import the function. Raises what the import raises."""
        build = {"name": self._reference, "adapter": self._adapter}
        self._child = await Child.start(self._role, build, self._log, threads=1, program="atropos_agent_api.forks")

    async def call(self, argument: Any, deadline_s: float) -> Any:
        """Raises DeadlineExceeded; RemoteError with the function's own error; ProcessDied if the process was ended."""
        assert self._child is not None, "it is opened before it is called"
        found = await self._child.peer.call("call", json.dumps(argument), deadline_s, deadline_s=deadline_s + _SPARE_S)
        if found is None:
            raise DeadlineExceeded(f"{self._reference} gave no answer within {deadline_s:g} s")
        answer = json.loads(found)
        if "error" in answer:
            raise RemoteError(f"{self._reference}: {answer['error']}\n{answer['trace']}".rstrip())
        return answer["value"]

    async def close(self) -> None:
        """May be called twice."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()


class ForkHost(Host):
    """The process that forks."""

    async def build(self, wanted: dict[str, Any]) -> None:
        from atropos_core.plugins.references import load_reference

        function = load_reference(wanted["name"])
        if not callable(function):
            raise ConfigError(f"{wanted['name']!r} is not a function, but {function!r:.100}.")
        self._function: Callable[[Any], Any] = load_reference(wanted["adapter"])(function)
        self.peer.handlers["call"] = self.call

    async def call(self, argument: str, deadline_s: float) -> str | None:
        """The answer as JSON; None if it did not come in time."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run(self._function, argument, writer)
        os.close(writer)
        try:
            return (await within(_read(reader), deadline_s, "the function")).decode()
        except DeadlineExceeded:
            return None
        finally:
            os.close(reader)
            _end(pid)


async def _read(reader: int) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    os.set_blocking(reader, False)
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(reader, readable.set_result, None)
        try:
            await readable
        finally:
            loop.remove_reader(reader)
        if not (piece := os.read(reader, 1 << 16)):
            break
        found += piece
        if len(found) > MOST_BYTES:
            return _error(f"it returned more than {MOST_BYTES:,} bytes of JSON")
    return bytes(found) or _error("it ended its process without an answer")


def _end(pid: int) -> None:
    """End the fork and everything in its group. The fork is not waited for yet, so the number is still its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _run(function: Callable[[Any], Any], argument: str, writer: int) -> NoReturn:
    """Run the function in the fork; never returns."""
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
        answer = json.dumps({"value": function(json.loads(argument))}).encode()
    except BaseException as error:  # noqa: BLE001 - the plugin boundary: whatever ends the function is its answer
        answer = _error(f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


def _error(text: str, trace: str = "") -> bytes:
    return json.dumps({"error": text[:2000], "trace": trace[-4000:]}).encode()


if __name__ == "__main__":
    main(ForkHost)
