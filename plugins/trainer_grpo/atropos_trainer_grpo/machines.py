"""The connections between the processes of one trainer on several machines, one process each. The first makes calls, the others answer.

A launcher started each process, and the supervisor ends each. If a connection is lost, the supervisor knows the reason better, so the
remaining processes wait a moment for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import DeadlineExceeded
from atropos_core.guards.patience import Patience
from atropos_core.launchers import StartedProcess
from atropos_core.processes.child import Child
from atropos_core.processes.child_main import Host
from atropos_core.processes.dialing import DIAL_DEADLINE_S, Listener, dial
from atropos_core.processes.rpc import Handler, Peer

REASON_FIRST_S = 2.0  # for the supervisor to find out how another process ended


class Connected(StartedProcess):
    """Another process of the trainer, seen from the first, which has only the connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.named = f"on {connection.getpeername()[0]}"

    def ended(self) -> str | None:
        """Return the reason if its connection has ended."""
        try:
            is_open = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            is_open = True
        except OSError:  # reset, or hung up here
            is_open = False
        return None if is_open else "closed its connection"

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.connection.close()


class Leader:
    """The first machine's side of the connections."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._listener = Listener(host)
        self._expected: list[asyncio.Future[socket.socket]] = []

    def expect(self) -> str:
        """Expect one more process, and return the address that it is to `follow`."""
        secret, connection = self._listener.expect()
        self._expected.append(connection)
        return f"{self._listener.address} {secret}"

    async def connected(self, logs: Path, patience: Patience) -> list[Child]:
        """All expected processes, in that order. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                connections = await asyncio.gather(*self._expected)
        except TimeoutError:
            raise DeadlineExceeded(
                f"not all of {len(self._expected)} machines connected to {self._listener.address}"
            ) from None
        finally:
            self._listener.close()
        children = []
        for number, connection in enumerate(connections, 2):
            connection.setblocking(False)
            role = f"trainer-{number}"
            children.append(Child.of(role, Connected(connection), logs / f"{role}.log", patience))
        return children


async def follow(leader: str, trainer: Any, more: Mapping[str, Handler]) -> asyncio.Task[None]:
    """Answer the leader's calls with this trainer and with `more`. Returns once connected, with the task that ends this process when
    the leader is gone, unless the trainer was closed before. Raises DeadlineExceeded, ProcessDied."""
    address, secret = leader.split()
    host = Host()
    host.peer = Peer(await asyncio.to_thread(dial, address, secret), "the trainer's first process", host.handlers())
    host.offer("trainer", trainer)
    host.peer.handlers |= more
    return asyncio.get_running_loop().create_task(_end_with(host, address))


async def _end_with(host: Host, address: str) -> None:
    await host.peer.lost.wait()
    if not host.ended.is_set():
        await asyncio.sleep(REASON_FIRST_S)
        end(f"the trainer's first process, at {address}, is gone")


def end(why: object) -> None:
    """End this process at once, even if its other threads are inside a collective that no other process has joined."""
    print(why, file=sys.stderr, flush=True)  # noqa: T201 - into this process's log
    os._exit(1)
