"""The program in the pod of an engine or trainer: `python -m atropos_launcher_kubernetes.holder ROLE HOST:PORT RUN_DIRECTORY`.

It connects to the pod of the run, starts what it is told to, passes on the output, and reports how it ended. If the run's pod is gone,
it ends everything that it started and connects to the next pod, until the run is over."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.errors import AtroposError
from atropos_core.processes.dialing import SECRET, dial
from atropos_core.processes.rpc import Handler, Peer
from atropos_launcher_kubernetes.config import ENDED

READ_BYTES = 1 << 16
AGAIN_S = 1.0
SAY_DEADLINE_S = 60.0


class Holder:
    """The processes of one connection, each in a separate process group."""

    def __init__(self, role: str, address: str) -> None:
        self.peer: Peer
        self._role = role
        self._address = address
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def describe(self) -> dict[str, Any]:
        return {"name": socket.gethostname(), "cpus": len(os.sched_getaffinity(0))}

    async def start(self, number: int, program: str, role: str, environment: Mapping[str, str]) -> int:
        """Start a process, and return its id. It ends with this process: `child_main` has the kernel see to that."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", program, self._address, role,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **environment},
        )  # fmt: skip
        self._processes[number] = process
        watch = asyncio.create_task(self._watch(number, process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return process.pid

    async def send(self, number: int, signal_number: int) -> None:
        """Send a signal to its process group, if any process is left."""
        if (process := self._processes.get(number)) is not None:
            _signal_group(process, signal_number)

    async def _watch(self, number: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        ended = asyncio.ensure_future(process.wait())
        while True:
            reading = asyncio.ensure_future(process.stdout.read(READ_BYTES))
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():  # a process that it started may still hold its streams
                _signal_group(process, signal.SIGTERM)
                await asyncio.wait({reading}, timeout=1.0)
                _signal_group(process, signal.SIGKILL)
            if not (chunk := await reading):
                break
            sys.stdout.buffer.write(chunk)  # for `kubectl logs`
            sys.stdout.flush()
            await self.peer.call("output", number, chunk.decode(errors="replace"), deadline_s=SAY_DEADLINE_S)
        code = await ended
        _signal_group(process, signal.SIGKILL)
        await self.peer.call("ended", number, code, deadline_s=SAY_DEADLINE_S)

    async def close(self) -> None:
        for process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(
            *(process.wait() for process in self._processes.values()), *self._watches, return_exceptions=True
        )


async def hold(role: str, address: str, directory: Path, wait_s: float) -> int:
    """The exit code: 0 once the run is over."""
    secret, before = os.environ.pop(SECRET), ended(directory)
    until, said = time.monotonic() + wait_s, ""
    while (now := ended(directory)) in ("", before):
        if time.monotonic() > until:
            console.say(f"found no run at {address} for {wait_s:g} s. {said}")
            return 1
        try:
            connection = await asyncio.to_thread(dial, address, secret)
        except AtroposError as error:
            if str(error) != said:
                said = str(error)
                console.say(said)
            await asyncio.sleep(AGAIN_S)
            continue
        await _serve(connection, Holder(role, address))
        until = time.monotonic() + wait_s
        await asyncio.sleep(AGAIN_S)
    console.say(f"the run is over: {now}")
    return 0


async def _serve(connection: socket.socket, holder: Holder) -> None:
    handlers: dict[str, Handler] = {"describe": holder.describe, "start": holder.start, "send": holder.send}
    holder.peer = Peer(connection, "the run", handlers)
    console.say("connected to the run")
    await holder.peer.lost.wait()
    await holder.close()


def ended(directory: Path) -> str:
    """The run's last note, written when it is over; empty until then."""
    try:
        return (directory / ENDED).read_text()
    except OSError:
        return ""


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role")
    parser.add_argument("address")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wait-s", type=float, default=1800.0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = asyncio.run(hold(given.role, given.address, given.directory, given.wait_s))
    sys.exit(code)


if __name__ == "__main__":
    main()
