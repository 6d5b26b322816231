"""Calls in both directions between a process and its child, over a Unix socket pair. If a launcher has put the child on another
machine, they use a TCP connection, which cannot carry file descriptors.

All calls made in one turn of the event loop travel in one frame and are started together, in order, at the other end, so that
an engine always sees the same whole batch. File descriptors travel with the call that names them. When the other end goes
away, every waiting call ends at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from atropos_core import errors
from atropos_core.codec import PREFIX_BYTES, decode, encode_bytes, frame_size
from atropos_core.errors import (
    AtroposError,
    DataError,
    DeadlineExceeded,
    FitError,
    OutOfMemory,
    ProcessDied,
    RemoteError,
)
from atropos_core.guards.exits import contained
from atropos_core.guards.patience import Owed

Handler = Callable[..., Awaitable[Any]]

_READ_BYTES = 1 << 20
_MAX_DESCRIPTORS = 32


class Reply:
    """A handler's result with descriptors. They are closed here once sent."""

    def __init__(self, value: Any, descriptors: Sequence[int]) -> None:
        self.value = value
        self.descriptors = list(descriptors)


class Peer:
    """One end of the connection. `handlers` answers the other end's calls: `await handlers[method](*arguments)`. A handler named in
    `takes_descriptors` also gets `descriptors=[...]`, and owns them."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        handlers: Mapping[str, Handler],
        *,
        takes_descriptors: frozenset[str] = frozenset(),
        on_lost: Callable[[], AtroposError] | None = None,
        state: Callable[[], str] | None = None,
    ) -> None:
        self.name = name  # of the other end, for messages
        self.handlers = dict(handlers)
        self.lost = asyncio.Event()
        self._sock = sock
        self._takes = takes_descriptors
        self._on_lost = on_lost
        self._state = state  # what there is to say of the other end when a call is late
        self.owed = Owed()
        self.error: AtroposError | None = None  # why the other end is lost
        self._waiting: dict[int, tuple[str, asyncio.Future[tuple[Any, list[int]]]]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._next = 0
        self._outbox: list[tuple[dict[str, Any], Sequence[int], bool]] = []  # message, descriptors, close them after
        self._frames: deque[tuple[bytes, list[int], list[int]]] = deque()  # bytes, descriptors, of which to close
        self._writer: asyncio.Task[None] | None = None
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float | None = None
    ) -> Any:
        """Call the other end's handler and return its value. Raises what it raised (RemoteError for foreign classes),
        DeadlineExceeded, or ProcessDied. Cancelling the call cancels the handler."""
        value, given = await self.call_with_descriptors(
            method, *arguments, descriptors=descriptors, deadline_s=deadline_s
        )
        for descriptor in given:
            os.close(descriptor)
        return value

    async def call_with_descriptors(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float | None = None
    ) -> tuple[Any, list[int]]:
        if self.error is not None:
            raise self.error
        if descriptors and self.is_remote:
            raise FitError(f"{self.name} is on another machine, and {method}() would share memory with it.")
        self._next += 1
        number = self._next
        future: asyncio.Future[tuple[Any, list[int]]] = self._loop.create_future()
        self._waiting[number] = (method, future)
        kind = f"{method} {arguments[0]}" if method == "call_extension" and arguments else method
        self.owed.begin(number, kind, self._loop.time())
        self._post({"call": number, "method": method, "arguments": list(arguments)}, descriptors)
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            self._forget(number, late=True)
            state = self._state() if self._state else ""
            raise DeadlineExceeded(f"{self.name}: {method}() gave no answer within {deadline_s:g} s{state}") from None
        except asyncio.CancelledError:
            self._forget(number, late=False)
            raise

    @property
    def is_remote(self) -> bool:
        """True if the other end may be on another machine."""
        return self._sock.family != socket.AF_UNIX

    @property
    def own_host(self) -> str:
        """This machine's address on the way to the other end; "" if that is a process of this machine."""
        return str(self._sock.getsockname()[0]) if self.is_remote else ""

    @property
    def other_host(self) -> str:
        """The address of the other end's machine; "" if that is this one."""
        return str(self._sock.getpeername()[0]) if self.is_remote else ""

    @property
    def is_called(self) -> bool:
        """True if the other end waits for an answer."""
        return bool(self._running)

    def lose(self, error: AtroposError) -> None:
        """Hang up; waiting calls end with `error`."""
        self._lose(error)

    def close(self) -> None:
        """Hang up: waiting calls end with ProcessDied, running handlers are cancelled."""
        self._lose(None)

    # -- sending

    def _forget(self, number: int, *, late: bool) -> None:
        self.owed.given_up(number, self._loop.time(), late=late)
        if self._waiting.pop(number, None) is not None and self.error is None:
            self._post({"cancel": number}, ())

    def _post(self, message: dict[str, Any], descriptors: Sequence[int], *, close: bool = False) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append((message, descriptors, close))

    def _flush(self) -> None:
        if self.error is not None:
            return
        outbox, self._outbox = self._outbox, []
        try:
            frame = _frame(outbox)
        except DataError:
            outbox = [entry for entry in outbox if self._encodable(entry[0])]
            frame = _frame(outbox)
        held = [descriptor for _, descriptors, _ in outbox for descriptor in descriptors]
        owned = [descriptor for _, descriptors, close in outbox if close for descriptor in descriptors]
        self._frames.append((frame, held, owned))
        if self._writer is None or self._writer.done():
            self._writer = self._loop.create_task(self._write())

    def _encodable(self, message: dict[str, Any]) -> bool:
        try:
            encode_bytes(message)
        except DataError as error:
            if "reply" in message:
                self._post({"reply": message["reply"], "error": _describe(error)}, ())
            elif waiting := self._waiting.pop(message["call"], None):
                self.owed.given_up(message["call"], self._loop.time(), late=False)
                waiting[1].set_exception(error)
            return False
        return True

    async def _write(self) -> None:
        try:
            while self._frames:
                frame, descriptors, owned = self._frames.popleft()
                view = memoryview(frame)
                if descriptors:
                    sent = await self._send_descriptors(view[:1], descriptors)
                    view = view[sent:]
                await self._loop.sock_sendall(self._sock, view)
                for descriptor in owned:
                    os.close(descriptor)
        except OSError:
            self._lose(self._lost_error())

    async def _send_descriptors(self, first: memoryview, descriptors: list[int]) -> int:
        while True:
            try:
                return socket.send_fds(self._sock, [first], descriptors)
            except BlockingIOError:
                await asyncio.sleep(0.001)

    # -- receiving

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            self._lose(self._lost_error())
            return
        self._inbox += data
        try:
            self._take_frames()
        except DataError as error:
            self._lose(ProcessDied(f"{self.name} sent an invalid message: {error}"))

    def _take_frames(self) -> None:
        while len(self._inbox) >= PREFIX_BYTES:
            end = PREFIX_BYTES + frame_size(self._inbox)
            if len(self._inbox) < end:
                return
            self.owed.end_silence(self._loop.time())
            frame = bytes(memoryview(self._inbox)[:end])
            del self._inbox[:end]
            for message in decode(frame):
                given = [self._descriptors.popleft() for _ in range(message["descriptors"])]
                self._receive(message, given)

    def _receive(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "call" in message:
            task = self._loop.create_task(self._answer(message, descriptors))
            self._running[message["call"]] = task
            task.add_done_callback(lambda _: self._running.pop(message["call"], None))
        elif "cancel" in message:
            if running := self._running.get(message["cancel"]):
                running.cancel()
        else:
            self.owed.answered(message["reply"], self._loop.time())
            _, future = self._waiting.pop(message["reply"], ("", None))
            if future is None or future.done():
                for descriptor in descriptors:
                    os.close(descriptor)
            elif "error" in message:
                future.set_exception(_rebuild(self.name, **message["error"]))
            else:
                future.set_result((message["value"], descriptors))

    async def _answer(self, message: dict[str, Any], descriptors: list[int]) -> None:
        number, method = message["call"], message["method"]
        keywords = {"descriptors": descriptors} if method in self._takes else {}
        try:
            with contained(f"{method}()"):
                value = await self.handlers[method](*message["arguments"], **keywords)
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - the process boundary: the caller gets it, whatever it is
            self._post({"reply": number, "error": _describe(error)}, ())
        else:
            given = value if isinstance(value, Reply) else Reply(value, ())
            self._post({"reply": number, "value": given.value}, given.descriptors, close=True)

    # -- the end

    def _lost_error(self) -> AtroposError:
        return self._on_lost() if self._on_lost else ProcessDied(f"{self.name} has gone away")

    def _lose(self, error: AtroposError | None) -> None:
        if self.error is not None:
            return
        self.error = error or ProcessDied(f"{self.name} was closed")
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)  # a frame may be half sent; the number of this socket will be used again
        if self._writer is not None and self._writer is not asyncio.current_task(self._loop):
            self._writer.cancel()
        self._sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # seen: a caller that was cancelled meanwhile never asks
        self._waiting.clear()
        for task in list(self._running.values()):
            task.cancel()
        self.lost.set()


def as_received(name: str, error: BaseException) -> Exception:
    """Return the exception for a caller when `error` was raised at the other end, which is called `name`."""
    return _rebuild(name, **_describe(error))


def _rebuild(name: str, kind: str, message: str, remedy: str | None, trace: str) -> Exception:
    if kind == "NotImplementedError":  # an answer that interfaces allow: callers do without
        return NotImplementedError(message)
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, AtroposError):
        made: AtroposError = known(message, remedy=remedy)
    # Python's, torch's for GPUs and for CPUs.
    elif kind in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in message:
        made = OutOfMemory(f"{name} was refused memory: {kind}: {message}\n{trace.rstrip()}")
    else:
        made = RemoteError(f"{name} raised {kind}: {message}\n{trace.rstrip()}")
    return made


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, OSError) else str(error.args[0]) if error.args else "",
        "remedy": getattr(error, "remedy", None),
        "trace": "".join(traceback.format_exception(error)),
    }


def _frame(outbox: Sequence[tuple[dict[str, Any], Sequence[int], bool]]) -> bytes:
    return encode_bytes([message | {"descriptors": len(given)} for message, given, _ in outbox])
