"""HTTP at the least cost: bytes made beforehand, keep-alive, blocking sockets.

For load and for benchmarks: client and server share this machine's cores, and a client library would be what is measured.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.waiting import wait_until

DEADLINE_S = 300.0


class Answer(NamedTuple):
    status: int
    head: bytes
    body: bytes


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of one request; a header's underscores stand for dashes."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Connection:
    """One kept-alive connection. `send` any number, `receive` as many, in order."""

    def __init__(self, port: int, deadline_s: float = DEADLINE_S) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), deadline_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._kept = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Answer:
        head = self._through(b"\r\n\r\n")
        lowered = head.lower()
        status = int(head[9:12])
        if b"\r\ntransfer-encoding: chunked" in lowered:
            body = bytearray()
            while size := int(self._through(b"\r\n").split(b";")[0], 16):
                body += self._exactly(size)
                self._exactly(2)
            self._through(b"\r\n")
            return Answer(status, head, bytes(body))
        _, _, rest = lowered.partition(b"\r\ncontent-length:")
        return Answer(status, head, self._exactly(int(rest.split(b"\r\n", 1)[0]) if rest else 0))

    def call(self, data: bytes) -> Answer:
        self.send(data)
        return self.receive()

    def until_read(self) -> None:
        """Wait until the server, on this machine, has taken what was sent so far from its socket."""
        ours, theirs = (f"0100007F:{port:04X}" for _, port in (self.socket.getsockname(), self.socket.getpeername()))

        def is_read() -> bool:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            waiting = {(row[1], row[2]): row[4] for row in rows}  # tx_queue:rx_queue, by local and remote address
            return waiting.get((ours, theirs), "0:").startswith("00000000:") and waiting.get(
                (theirs, ours), ":0"
            ).endswith(":00000000")

        wait_until(is_read, "the server reads what it was sent")

    def close(self) -> None:
        self.socket.close()

    def _through(self, end: bytes) -> bytes:
        while (at := self._kept.find(end)) < 0:
            self._more()
        return self._take(at + len(end))

    def _exactly(self, size: int) -> bytes:
        while len(self._kept) < size:
            self._more()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection in the middle of an answer")
        self._kept += data


def keep_in_flight(
    port: int, requests: Sequence[bytes], total: int, connections: int, answered: Callable[[Answer], None]
) -> None:
    """Send `total` requests, `requests` over and over, with one in flight on each connection."""
    ends = [Connection(port) for _ in range(min(connections, total))]
    try:
        for i, end in enumerate(ends):
            end.send(requests[i % len(requests)])
        sent = len(ends)
        for received in range(total):
            end = ends[received % len(ends)]
            answered(end.receive())
            if sent < total:
                end.send(requests[sent % len(requests)])
                sent += 1
    finally:
        for end in ends:
            end.close()
