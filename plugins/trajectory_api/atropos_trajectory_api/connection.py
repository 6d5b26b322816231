"""A connection of the server: uvicorn's, which also gives up on heads that never end and knows what has arrived."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SCOPE_KEY = "atropos.connection"


class Connection(HttpToolsProtocol):
    """One client's connection; `scope["atropos.connection"]`."""

    head_s = 60.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    async def arrived(self, deadline_s: float) -> bool:
        """Whether the client's machine has all that was written, once it has it or at the deadline."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        pause_s = 0.0005
        while not self.is_gone:
            if not self.transport.get_write_buffer_size() and not self._unacknowledged():
                await asyncio.sleep(0)  # a reset that came with the last acknowledgement is seen first
                return not self.is_gone
            if loop.time() > until:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return False

    def _unacknowledged(self) -> int:
        """Bytes that the kernel holds for this client."""
        handle: Any = self.transport.get_extra_info("socket")
        (held,) = struct.unpack("i", fcntl.ioctl(handle.fileno(), termios.TIOCOUTQ, b"\0" * 4))
        return int(held)

    def _await_head(self) -> None:
        self._head_is_there()
        self._late = self.loop.call_later(self.head_s, self.transport.close)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def connections(head_s: float) -> type[Connection]:
    """The class of connections that give up on a head after so long."""
    return type("Connection", (Connection,), {"head_s": head_s})
