"""The connections between the processes of one trainer on several machines, one process each: the first makes calls, the others answer.

A launcher has started each of them, and the supervisor ends each. So a connection that is gone has a reason that the supervisor names
better: whoever is left waits a moment for it.
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

REASON_FIRST_S = 2.0  # for the supervisor, to find out how another process ended


class Connected(StartedProcess):
    """One of the others, seen from the first: its connection is all that there is of it here."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.named = f"on {connection.getpeername()[0]}"

    def ended(self) -> str | None:
        """It ends with its connection."""
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
    """The first machine's end."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._listener = Listener(host)
        self._expected: list[asyncio.Future[socket.socket]] = []

    def expect(self) -> str:
        """What one more of the others is to `follow`."""
        secret, connection = self._listener.expect()
        self._expected.append(connection)
        return f"{self._listener.address} {secret}"

    async def connected(self, logs: Path, patience: Patience) -> list[Child]:
        """All of them, in the order in which they were expected. Raises DeadlineExceeded."""
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
    """Answer the calls of whoever leads, on this trainer and what `more` has. Returns once it is connected, with the task that ends this
    process when the other one is gone, unless the trainer was closed before. Raises DeadlineExceeded, ProcessDied."""
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
    """This process, whatever its other threads do: they may be inside a collective that nobody else is in."""
    print(why, file=sys.stderr, flush=True)  # noqa: T201 - into this process's log
    os._exit(1)
