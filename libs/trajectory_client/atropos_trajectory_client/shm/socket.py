"""The Unix socket of a ring: numbers and descriptors as datagrams, in order, and the end of file when a process ends.

A datagram is one byte that gives its type, followed by fixed-size numbers. Only the first one (the greeting) and a refusal carry
JSON.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atropos_core import errors
from atropos_core.console import quoted
from atropos_core.errors import AccessRefused, AtroposError, DataError, DeadlineExceeded, ProcessDied

HELLO = b"H"  # producer: JSON, with the descriptor of the slots
BELL = b"B"  # producer: u32 slots, in the order of their messages' numbers; answer soon, since the producer waits
IDLE_BELL = b"b"  # the same; answers may wait until there are many: one less system call for each message at both ends
APART = b"S"  # producer: u64 bytes of a segment for a single message, with its descriptor
WELCOME = struct.Struct("<xQ")  # consumer: the largest message that it takes
ANSWERS = b"A"  # consumer: ANSWERs
ANSWER = struct.Struct("<QQ")  # number of a message, value
REFUSED = b"R"  # consumer: u64 number, JSON of the error

NUMBERS = 1024  # in one datagram
FULL_S = 0.001  # before trying again: a full socket holds hundreds of datagrams that the other end has to read first
_DATAGRAM_BYTES = 1 + NUMBERS * ANSWER.size
_PEER = struct.Struct("3i")  # pid, user, group
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)
_ERROR_BYTES = 4000


class RingSocket:
    """One end. Only `wait` blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._mask = 0
        self.ended = False  # nothing more will come

    @classmethod
    def connect(cls, path: Path) -> RingSocket:
        """Connect. Raises ProcessDied if there is no listener, AccessRefused if it is another user's, DeadlineExceeded if its queue is
        full."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            with short(path) as address:
                sock.connect(address)
            end = cls(sock)
            if end.peer()[1] != os.geteuid():
                raise AccessRefused(f"the process that listens at {path} belongs to another user")
            return end
        except BlockingIOError:
            sock.close()
            raise DeadlineExceeded(f"{path} takes no connection now: too many wait there already") from None
        except OSError as error:
            sock.close()
            raise ProcessDied(f"no server listens at {path}: {error.strerror or error}") from None
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer(self) -> tuple[int, int]:
        """Return process and user at the other end, as the kernel knows them."""
        pid, user, _ = _PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return pid, user

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send a datagram. Return False if the socket is full, or the other end has gone, which `receive` then shows."""
        try:
            if descriptors:
                socket.send_fds(self._socket, [data], descriptors)
            else:
                self._socket.send(data)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.EPIPE, errno.ECONNRESET):
                return False
            raise
        return True

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return the next datagram and its descriptors, which the caller owns. None if nothing waits."""
        while not self.ended:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _DATAGRAM_BYTES, _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the other end went without reading all: reported once, ahead of what it had sent, which still comes
            if data:
                return data, _descriptors(ancillary) if ancillary else []
            self.ended = True
        return None

    def wait(self, timeout_s: float, *, writing: bool = False) -> bool:
        """Wait until there is something to read (or room to write). Return True if there is."""
        mask = select.POLLIN | (select.POLLOUT if writing else 0)
        if mask != self._mask:
            self._poll.register(self._socket, mask)
            self._mask = mask
        return bool(self._poll.poll(max(timeout_s, 0.0) * 1000))

    def close(self) -> None:
        self.ended = True
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    given = array.array("i")
    for _, _, raw in ancillary:
        given.frombytes(raw[: len(raw) - len(raw) % given.itemsize])
    return given.tolist()


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Yield an address for `path`, which may be longer than the 107 bytes of a Unix socket's address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path, backlog: int) -> socket.socket:
    """Return a listening socket in a private directory of this user. A socket file that a dead process left is replaced; one with a
    listener is not."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise AccessRefused(
            f"{path.parent} is open to other users: a socket there could be replaced",
            remedy=f"chmod 700 {quoted(path.parent)}",
        )
    if path.exists():
        if _is_listened_at(path):
            raise DataError(f"another process listens at {path}", remedy="End it, or give this one another directory.")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short(path) as address:
            sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


def _is_listened_at(path: Path) -> bool:
    try:
        RingSocket.connect(path).close()
    except DeadlineExceeded:  # by one that is behind
        return True
    except ProcessDied:
        return False
    return True


def wait_for(sock: socket.socket, timeout_s: float) -> bool:
    """Wait until a listening socket has a connection. Return True if it has."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1000))


def hello(fields: Mapping[str, Any]) -> bytes:
    return HELLO + json.dumps(dict(fields)).encode()


def refusal(number: int, error: Exception) -> bytes:
    """Encode an error for the other end, which raises it again with the same class if that is one of ours."""
    text = str(error.args[0]) if error.args else type(error).__name__
    fields = {"kind": type(error).__name__, "message": text[:_ERROR_BYTES], "remedy": getattr(error, "remedy", None)}
    return REFUSED + number.to_bytes(8, "little") + json.dumps(fields).encode()


def rebuilt(data: bytes) -> AtroposError:
    fields = json.loads(data[9:])
    kind = getattr(errors, fields["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, AtroposError)):
        return errors.RemoteError(f"the consumer of this ring raised {fields['kind']}: {fields['message']}")
    return kind(fields["message"], remedy=fields["remedy"])
