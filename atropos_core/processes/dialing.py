"""How a child on another machine gets its connection: it dials the supervisor, and both prove that they know the same secret.

The launcher puts the secret into the child's environment. It is never sent: each end sends 32 random bytes, and answers the
other's with an HMAC (RFC 2104, SHA-256) of both. The later traffic is neither encrypted nor signed: like Ray's and
torch.distributed's, it relies on a private network between the machines of a cluster.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from atropos_core.errors import AtroposError, DeadlineExceeded, ProcessDied
from atropos_core.launchers import StartedProcess

SECRET = "ATROPOS_CONNECTION_SECRET"  # environment of a child on another machine: hexadecimal digits
DIAL_DEADLINE_S = 30.0
PROOF_DEADLINE_S = 5.0  # for what a child sends
AT_ONCE = 64  # connections that are being proved; further ones wait in the kernel
SILENT_S = 60  # of a connection to a machine that answers nothing at all, before it is lost
_BYTES = 32


class Listener:
    """Listens for children on other machines."""

    def __init__(self, host: str, port: int = 0) -> None:
        """`host`: the address by which other machines reach this one; port 0 is any free one. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, port), family=family)
        self._sock.setblocking(False)
        self.address = f"{host}:{self._sock.getsockname()[1]}"
        self._pending: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._proving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def expect(self, known: str = "") -> tuple[str, asyncio.Future[socket.socket]]:
        """Return a secret, and a future for the connection of the child that knows it. Cancel the future to stop expecting it.
        `known`: a secret that the child already has, in hexadecimal; otherwise a new one is made."""
        secret = bytes.fromhex(known) or secrets.token_bytes(_BYTES)
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._pending[secret] = future
        future.add_done_callback(lambda _: self._pending.pop(secret, None))
        return secret.hex(), future

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._proving:
            task.cancel()
        for future in list(self._pending.values()):
            future.cancel()
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError:  # the child has hung up, or there are no descriptors left
                self._room.release()
                await asyncio.sleep(0.05)
                continue
            task = loop.create_task(self._prove(connection))
            self._proving.add(task)
            task.add_done_callback(self._proved)

    def _proved(self, task: asyncio.Task[None]) -> None:
        self._proving.discard(task)
        self._room.release()

    async def _prove(self, connection: socket.socket) -> None:
        """Give the connection to the future that expects it, or hang up."""
        loop, ours = asyncio.get_running_loop(), secrets.token_bytes(_BYTES)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(PROOF_DEADLINE_S):
                await loop.sock_sendall(connection, ours)
                theirs, answer = await _receive(connection), await _receive(connection)
                for secret, future in self._pending.items():
                    if hmac.compare_digest(_proof(secret, b"child", ours, theirs), answer):
                        await loop.sock_sendall(connection, _proof(secret, b"supervisor", ours, theirs))
                        _keep(connection)
                        if not future.done():
                            future.set_result(connection)
                            return
                        break
        except (OSError, TimeoutError, EOFError):
            pass  # a stranger, or a child that has ended
        except asyncio.CancelledError:
            connection.close()
            raise
        connection.close()


async def connected(
    process: StartedProcess, dialled: asyncio.Future[socket.socket], role: str, deadline_s: float, log: Path
) -> socket.socket:
    """Wait until a process that a launcher has started connects. If it ends before, or is late, kill it and raise ProcessDied or
    DeadlineExceeded with the last line of its log."""
    until = time.monotonic() + deadline_s
    while not (await asyncio.wait({dialled}, timeout=0.1))[0]:
        how = process.ended()
        if how is not None or time.monotonic() > until:
            process.kill()
            said = f"{role} ({process.named}) {how or f'did not connect within {deadline_s:g} s'}.{_last_line(log)}"
            kind: type[AtroposError] = ProcessDied if how else DeadlineExceeded
            raise kind(said, remedy=f"Its log is {log}")
    return dialled.result()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-1:]
    except OSError:
        return ""
    return "".join(f" {line}" for line in lines)


async def _receive(connection: socket.socket) -> bytes:
    received = b""
    while len(received) < _BYTES:
        more = await asyncio.get_running_loop().sock_recv(connection, _BYTES - len(received))
        if not more:
            raise EOFError
        received += more
    return received


def dial(address: str, known: str = "") -> socket.socket:
    """Connect to the supervisor at HOST:PORT. The secret is `known`, or is removed from this process's environment. Raises
    DeadlineExceeded if nothing answers, and ProcessDied if the other end does not know the secret."""
    secret = bytes.fromhex(known or os.environ.pop(SECRET))
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), DIAL_DEADLINE_S)
    except OSError as error:
        raise DeadlineExceeded(
            f"the supervisor at {address} cannot be reached from this machine ({socket.gethostname()}): {error}.",
            remedy="The supervisor must give an address of its own that the other machines can reach.",
        ) from error
    connection.settimeout(DIAL_DEADLINE_S)  # strangers may be before it
    ours = secrets.token_bytes(_BYTES)
    try:
        theirs = _exactly(connection)
        connection.sendall(ours + _proof(secret, b"child", theirs, ours))
        is_known = hmac.compare_digest(_exactly(connection), _proof(secret, b"supervisor", theirs, ours))
    except (OSError, EOFError):
        is_known = False
    if not is_known:
        connection.close()
        raise ProcessDied(f"what listens at {address} is not the supervisor that started this process.")
    connection.settimeout(None)
    _keep(connection)
    return connection


def _exactly(connection: socket.socket) -> bytes:
    received = b""
    while len(received) < _BYTES:
        more = connection.recv(_BYTES - len(received))
        if not more:
            raise EOFError
        received += more
    return received


def _proof(secret: bytes, who: bytes, supervisors: bytes, childs: bytes) -> bytes:
    return hmac.digest(secret, who + supervisors + childs, "sha256")


def _keep(connection: socket.socket) -> None:
    """Send small messages at once, and notice a machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(AttributeError, OSError):  # other systems than Linux have their own
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
