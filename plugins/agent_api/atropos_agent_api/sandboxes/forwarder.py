"""Forward connections from a listening socket to an address: how a program without network reaches the API.

The listener was made inside the program's network namespace and passed out, so connections accepted here come from inside. Only the
standard library.
"""

from __future__ import annotations

import selectors
import socket

PIECE = 1 << 16
CONNECTIONS = 256  # of one program at once; more wait in the listener's queue
CONNECT_S = 5.0


class Forwarder:
    """`on_ready` of each socket is what the selector's owner calls with the events."""

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket, target: tuple[str, int]) -> None:
        self._selector = selector
        self._listener = listener
        self._target = target
        self._open: set[_End] = set()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for end in list(self._open):
            self._drop(end)
        if self._listener.fileno() >= 0:
            if self._listener in self._selector.get_map():
                self._selector.unregister(self._listener)
            self._listener.close()

    def _accept(self, events: int) -> None:
        try:
            theirs, _ = self._listener.accept()
        except OSError:
            return
        try:
            ours = socket.create_connection(self._target, CONNECT_S)
        except OSError:
            theirs.close()  # the program sees a reset connection, as it would without a forwarder
            return
        near, far = _End(theirs), _End(ours)
        near.other, far.other = far, near
        for end in (near, far):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(end)
            self._watch(end)
        if len(self._open) >= 2 * CONNECTIONS:
            self._selector.unregister(self._listener)

    def _ready(self, end: _End, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(end)
            if events & selectors.EVENT_WRITE:
                self._write(end)
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            self._drop(end.other)
            return
        for one in (end, end.other):
            self._watch(one)

    def _read(self, end: _End) -> None:
        piece = end.socket.recv(PIECE)
        end.other.pending += piece
        if not piece:
            end.has_ended = True
        self._write(end.other)

    def _write(self, end: _End) -> None:
        if end.pending:
            try:
                del end.pending[: end.socket.send(end.pending)]
            except BlockingIOError:
                return
        if not end.pending and end.other.has_ended and not end.is_shut:
            end.is_shut = True
            end.socket.shutdown(socket.SHUT_WR)

    def _watch(self, end: _End) -> None:
        """Read only while the other end takes what was read: no more than one piece is held."""
        if end not in self._open:
            return
        if end.is_shut and end.has_ended:
            self._drop(end)
            self._drop(end.other)
            return
        wanted = 0 if end.has_ended or end.other.pending else selectors.EVENT_READ
        wanted |= selectors.EVENT_WRITE if end.pending else 0
        if wanted == end.watched:
            return
        if not end.watched:
            self._selector.register(end.socket, wanted, lambda events: self._ready(end, events))
        elif wanted:
            self._selector.modify(end.socket, wanted, self._selector.get_key(end.socket).data)
        else:
            self._selector.unregister(end.socket)
        end.watched = wanted

    def _drop(self, end: _End) -> None:
        if end in self._open:
            self._open.remove(end)
            if end.watched:
                self._selector.unregister(end.socket)
            end.socket.close()
            if len(self._open) < 2 * CONNECTIONS and self._listener not in self._selector.get_map():
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)


class _End:
    """One of the two sockets of a forwarded connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.other: _End = self
        self.pending = bytearray()  # for this socket to send
        self.has_ended = False  # nothing more is read from it
        self.is_shut = False  # nothing more is written to it
        self.watched = 0
