"""TLS handshakes: they count among a server's connections, and have a deadline like heads of requests."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atropos_core.errors import ConfigError
from atropos_http_server.connection import Connection
from atropos_http_server.connection_limits import Gate, Peer

PAUSE_S = 0.2  # after an accept for which this process had no descriptor or memory left


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (certificate, key):  # OpenSSL does not say which of them is not there
            path.open("rb").close()
        context.load_cert_chain(certificate, key, password="")  # no prompt for one
    except OSError as error:
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used: {error}.",
            remedy="Both are PEM files, the key is that of the certificate and has no passphrase.",
        ) from error
    return context


class TlsListener:
    """Accepts connections of `listening`, which is bound and does not block. `protocol` makes the object that serves a connection after
    its handshake. Until then it counts as waiting for its client, like one that has sent no request."""

    def __init__(
        self, listening: socket.socket, context: ssl.SSLContext, gate: Gate, protocol: Callable[[], Connection]
    ) -> None:
        self._listening = listening
        self._context = context
        self._gate = gate
        self._protocol = protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more, and end handshakes in progress."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError:
                self._gate.count("accept")
                await asyncio.sleep(PAUSE_S)
                continue
            task = asyncio.create_task(self._handshake(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, accepted: socket.socket) -> None:
        waiting = Handshake(accepted, self._gate)
        try:
            if not self._gate.enter(waiting):
                self._gate.count("full")
                accepted.close()
                return

            def protocol() -> Connection:
                connection = self._protocol()
                connection.handshake = waiting
                return connection

            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._gate.head_s
            )
        except ConnectionAbortedError:
            self._gate.count("handshake")
        except OSError:  # the client has gone, does not trust the certificate, or speaks no TLS
            pass
        finally:
            self._gate.leave(waiting)


class Handshake:
    """A connection as the gate sees it until its handshake is done. Made in the task that waits for it."""

    is_surplus = False

    def __init__(self, accepted: socket.socket, gate: Gate) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in a task"
        self._task = task
        self.peer: Peer = ""
        with suppress(OSError):  # it has gone already
            self.peer, _ = gate.peer(accepted.getpeername()[:2], accepted.getsockname()[:2])

    def make_way(self) -> None:
        self._task.cancel()
