"""Messages between `chat_template.py`, which requests a rendering, and `template_process.py`, which answers."""

from __future__ import annotations

import socket

CPU_S = 1.0  # of one call. A conversation of 1,000 messages and 4 MB takes the template of Qwen3 0.06 s
MEMORY_BYTES = 1 << 30  # beyond what the process has when it starts
# In what looks like a control token in a message, after its first character. A rare character, and printable: a template that shows
# a dict as Python does would escape any other, and lose the mark. Where a message has it, there are two.
MARK = "\u303f"
HEAD = 8  # bytes that say how long the rest is
RENDERED, REFUSED, UNREADABLE, TOO_MUCH = range(4)  # the first byte of an answer; the rest is text


def send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(len(body).to_bytes(HEAD, "little") + body)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message, or None if the other end is closed."""
    head = _read(connection, HEAD)
    return None if head is None else _read(connection, int.from_bytes(head, "little"))


def _read(connection: socket.socket, size: int) -> bytes | None:
    body = bytearray(size)
    left = memoryview(body)
    while left:
        if not (count := connection.recv_into(left)):
            return None
        left = left[count:]
    return bytes(body)
