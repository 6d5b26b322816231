"""A connection of the server: uvicorn's, which also gives up on heads that never end and on answers that nobody reads,
knows what has arrived, and where there are too many says when to come back."""

from __future__ import annotations

import asyncio
import fcntl
import resource
import struct
import termios
import time
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atropos_core import console
from atropos_trajectory_api.answers import plain_error

SCOPE_KEY = "atropos.connection"
SAY_AGAIN_S = 60.0
LEAST_READ = 1 << 16  # bytes of a waiting answer in `head_s`; who reads less is not at it
OTHER_DESCRIPTORS = 128  # journal, libraries, rings


class OneWrite:
    """A transport that writes the head of an answer together with what follows it: uvicorn gives it one after the other,
    which makes two packets and wakes a client twice. A head that nothing follows at once goes out by itself."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            held = self._taken()
            self._transport.writelines([held, data])
        else:
            self._held = data
            self._flushing = self._loop.call_soon(self._flush)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._held)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if (held := self._taken()) and not self._transport.is_closing():
            self._transport.write(held)

    def _taken(self) -> bytes:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        held, self._held = self._held, b""
        return held


class Connection(HttpToolsProtocol):
    """One client's connection; `scope["atropos.connection"]`."""

    head_s = 60.0
    most: int | None = None  # beyond so many they are told to come back
    most_open: int | None = None  # beyond so many they are closed unheard
    _said_at = -SAY_AGAIN_S
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _had_all = False  # when the connection ended, the client's machine had acknowledged all that was written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))
        if self.most_open is not None and len(self.connections) > self.most_open:
            self.transport.abort()
            self._say_too_many()
            return
        self._await_head()

    def eof_received(self) -> None:
        """The client has closed its end. It has read all that it acknowledged, or it would have reset the connection."""
        self._had_all = self._has_all()

    def shutdown(self) -> None:
        self._had_all = self._has_all()
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        if self.is_gone or self._has_all():
            self._had_all = True
            super().timeout_keep_alive_handler()
        else:  # it is still at the answer, and not idle
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._had_all = self._had_all and exc is None
        self._head_is_there()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        if self.most is not None and len(self.connections) > self.most:
            self.app = _busy
            self._say_too_many()
        super().on_headers_complete()

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    @property
    def has_body(self) -> bool:
        """The body of the request that is answered now is all there."""
        return not self.pipeline and not self.cycle.more_body

    @property
    def keeps_alive(self) -> bool:
        """It will not be closed as soon as the answer is sent."""
        return bool(self.cycle.keep_alive)

    async def arrived(self, deadline_s: float) -> bool:
        """Whether the client's machine has all that was written, once it has it or at the deadline."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        pause_s = 0.0005
        while not self.is_gone:
            if self._has_all():
                await asyncio.sleep(0)  # a reset that came with the last acknowledgement is seen first
                return not self.is_gone or self._had_all
            if loop.time() > until:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return self._had_all

    def _has_all(self) -> bool:
        return not self.is_gone and not self.transport.get_write_buffer_size() and not self._unacknowledged()

    def _unacknowledged(self) -> int:
        """Bytes that the kernel holds for this client."""
        handle: Any = self.transport.get_extra_info("socket")
        (held,) = struct.unpack("i", fcntl.ioctl(handle.fileno(), termios.TIOCOUTQ, b"\0" * 4))
        return int(held)

    @classmethod
    def _say_too_many(cls) -> None:
        if time.monotonic() - Connection._said_at > SAY_AGAIN_S:
            Connection._said_at = time.monotonic()
            console.warn(f"more than {cls.most} connections (--connections): some are turned away.")

    def _await_reading(self) -> None:
        self._is_read()
        self._unread = self.loop.call_later(self.head_s, self._look, self.transport.get_write_buffer_size())

    def _look(self, before: int) -> None:
        """Large answers are written in one go: what counts is that some of it leaves."""
        if before - self.transport.get_write_buffer_size() >= LEAST_READ:
            self._await_reading()
        else:
            self.transport.abort()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        self._head_is_there()
        self._late = self.loop.call_later(self.head_s, self.transport.close)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    await plain_error(
        scope, send, 503, "ApiError", "too many connections are open.", "Try again in a moment.",
        [(b"retry-after", b"5"), (b"connection", b"close")],
    )  # fmt: skip


def connections(head_s: float, most: int | None = None) -> type[Connection]:
    """The class of connections that give up after so long on a head that does not end and on an answer that is not read.
    Where there are more than `most`, they are answered with 503 and closed; of those that have not said a word there may
    be as many again, as far as this process may open them."""
    most_open = None
    if most is not None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_open = 2 * most
        if descriptors != resource.RLIM_INFINITY:
            most_open = max(min(most_open, descriptors - OTHER_DESCRIPTORS), 1)
        most = min(most, most_open)
    return type("Connection", (Connection,), {"head_s": head_s, "most": most, "most_open": most_open})
