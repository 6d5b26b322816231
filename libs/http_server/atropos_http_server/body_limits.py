"""Limits on what one request, and all of them together, may cost: size before and after decompression, time, memory.

A body is read whole, then passed on as one message. The first 64 kB of each request are free. What is above that counts against one
budget until the request has been answered; JSON counts eight times until it has been parsed. If the budget is used up, requests
wait before reading on. One request at a time may exceed it, because otherwise half-read requests could wait for one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from isal import isal_zlib
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, HubClosed, HubFull, TooLarge
from atropos_http_server.answers import Refusals, header
from atropos_http_server.connection import SCOPE_KEY, Connection

FREE = 1 << 16
SHARE_KEY = "atropos.share"  # in a scope
JSON_COST = (
    8  # times its bytes that a body of JSON takes while it is read: measured 3.5 for ids of four digits, 7.4 for one
)
DISCARD_S = 10.0  # what is too long is read on for so long
GIVE_BACK_S = 0.5
LARGE = 1 << 20  # what a request takes after which memory is given back
_GROWN = 1 << 23
_STEP = 1 << 18  # decompressed at a time
_PLAIN, _GZIP = (b"", b"identity"), (b"gzip", b"x-gzip")


class GoneAway(Exception):
    """The client closed the connection before its request was complete."""


class Budget:
    """Bytes that bodies in flight may hold together."""

    def __init__(self, size_bytes: int, option: str = "") -> None:
        """`option`: the command-line option that raises the limit, for messages."""
        self.size_bytes = size_bytes
        self._option = option
        self.held = 0
        self.is_ending = False
        self._beyond: Share | None = None  # who may go beyond it
        self._waiting: deque[tuple[Share, int, asyncio.Future[None]]] = deque()

    def share(self) -> Share:
        return Share(self)

    async def take(self, share: Share, size: int, deadline_s: float) -> None:
        """Raises HubFull at the deadline, HubClosed if the server ends before there is room."""
        if not self._waiting and self._fits(share, size):
            self._give(share, size)
            return
        if self.is_ending:
            raise _ending()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (share, size, ready)
        self._waiting.append(place)
        self.serve()
        try:
            async with asyncio.timeout(deadline_s):
                await ready
        except TimeoutError:
            raise HubFull(
                f"what is being read or waits for room is reckoned at {self.held / 1e6:.0f} MB (JSON at {JSON_COST} times its "
                "bytes while it is read), and no more is taken.",
                remedy=_and_raise("Send it again later", self._option),
            ) from None
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
                self.serve()

    def stop(self) -> None:
        """The server is ending: fail all waiting requests now, and let no more wait."""
        self.is_ending = True
        for _, _, ready in self._waiting:
            if not ready.done():
                ready.set_exception(_ending())

    def has_room(self, size: int) -> bool:
        """True if `take` would not wait."""
        return not self._waiting and self.held + size <= self.size_bytes

    def serve(self) -> None:
        """Let waiting requests continue if they fit, the oldest first; the favoured one in any position."""
        for place in list(self._waiting):
            share, size, ready = place
            if not self._fits(share, size):
                if self._beyond is None:
                    self._beyond = share
                elif self._beyond is not share:
                    continue
            self._waiting.remove(place)
            if not ready.done():
                self._give(share, size)
                ready.set_result(None)

    def end(self, share: Share) -> None:
        self.held -= share.held
        share.held = 0
        if self._beyond is share:
            self._beyond = None
        self.serve()

    def lower(self, share: Share, size: int) -> None:
        """Reduce what a request holds to `size`."""
        if (freed := share.held - size) > 0:
            share.held -= freed
            self.held -= freed
            self.serve()

    def _fits(self, share: Share, size: int) -> bool:
        return self._beyond is share or self.held + size <= self.size_bytes

    def _give(self, share: Share, size: int) -> None:
        share.held += size
        self.held += size


class Share:
    """One request's part of the budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0
        self.most = 0  # its maximum so far
        self._free = FREE

    async def take(self, size: int, cost: int, deadline_s: float) -> None:
        """Take room for `size` bytes, each of which counts `cost` times."""
        free = min(size, self._free)
        self._free -= free
        if size > free:
            await self._budget.take(self, (size - free) * cost, deadline_s)
            self.most = max(self.most, self.held)

    def read(self) -> None:
        """Free what parsing the body as JSON took; the body itself still counts."""
        self._budget.lower(self, self.held // JSON_COST)

    def end(self) -> None:
        if self.held or self._budget._beyond is self:
            self._budget.end(self)


class Limits:
    """ASGI middleware: the application gets its body whole, decompressed and within bounds, or is not called."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        body_bytes: int,
        in_flight_bytes: int,
        request_s: float,
        hold_s: float,
        cost: Callable[[Scope], int] = lambda scope: JSON_COST,
        refusals: Refusals = Refusals(),  # noqa: B008 - frozen
    ) -> None:
        """`cost`: how often each byte of a body counts while it is parsed."""
        self._app = app
        self._cost = cost
        self._refusals = refusals
        self._body_bytes = body_bytes
        self._request_s = request_s
        self._hold_s = hold_s
        self.budget = Budget(in_flight_bytes, refusals.in_flight)
        self._arriving: set[asyncio.Timeout] = set()  # deadlines of requests whose bodies are still to come
        self._giving_back: asyncio.TimerHandle | None = None
        self._returnable = returnable_bytes()  # the least since memory was last given back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = scope[SHARE_KEY] = self.budget.share()
        try:
            await self._bounded(scope, receive, send, share)
        finally:
            if share.most > LARGE:
                self._give_back_soon()
            share.end()

    def stop(self) -> None:
        """The server is ending: requests that wait for room, or for the rest of their body, get 503 now."""
        self.budget.stop()
        for deadline in self._arriving:
            deadline.reschedule(0.0)

    def short(self, scope: Scope, body: bytes) -> bytes | None:
        """Return the decoded body if it has fully arrived and is within the free size; None for any other, which then goes through the
        ordinary path, where it is refused or waits."""
        most = min(FREE, self._body_bytes)
        coding = _coding(scope)
        if coding in _PLAIN:
            return body if len(body) <= most else None
        if coding not in _GZIP:
            return None
        inflate = isal_zlib.decompressobj(wbits=31)
        try:
            whole = inflate.decompress(body, most + 1)
        except isal_zlib.error:  # type: ignore[misc] # its stub takes the class for one of its errors
            return None
        return whole if inflate.eof and len(whole) <= most and not inflate.unused_data else None

    def _give_back_soon(self) -> None:
        if self._giving_back is None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_back)

    def release_memory(self) -> None:
        """Called once a second: many small requests may also have used memory that is free by now."""
        now = returnable_bytes()
        if now > self._returnable + _GROWN:
            self._give_back()
            self._returnable = returnable_bytes()  # no less: what was given back is still the library's to use again
        self._returnable = min(self._returnable, now)

    def _give_back(self) -> None:
        """Return the memory of large bodies to the system; the C library would keep it."""
        self._giving_back = None
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        refuse = self._refusals.answer
        closing = [(b"connection", b"close")]  # the rest of the body will not be read
        try:
            body = await self._read(scope, receive, share)
        except GoneAway:
            return
        except TooLarge as error:
            connection: Connection | None = scope.get(SCOPE_KEY)
            if connection is None or not connection.has_body:
                await self._discard(receive)  # a client that sends reads no answer, and a reset would take that from it
            await refuse(scope, send, 413, error, closing)
            return
        except DataError as error:
            await refuse(scope, send, 400, error, closing)
            return
        except DeadlineExceeded as error:
            await refuse(scope, send, 408, error, closing)
            return
        except (HubFull, HubClosed) as error:
            await refuse(scope, send, 503, error, [*closing, (b"retry-after", b"5")])
            return
        given = False

        async def whole() -> Message:
            nonlocal given, body
            if given:
                return await receive()
            given, handed, body = True, body, b""
            return {"type": "http.request", "body": handed, "more_body": False}

        await self._app(scope, whole, send)

    async def _read(self, scope: Scope, receive: Receive, share: Share) -> bytes:
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._body_bytes:
            raise self._too_large(f"{int(declared) / 1e6:.1f} MB")
        coding = _coding(scope)
        if coding not in (*_PLAIN, *_GZIP):
            raise DataError(f"the body is encoded as {coding[:40]!r}.", remedy="Send it plain, or with gzip.")
        inflate = isal_zlib.decompressobj(wbits=31) if coding in _GZIP else None
        connection: Connection | None = scope.get(SCOPE_KEY)
        whole = io.BytesIO()  # gives its own buffer: pieces that are joined are there twice
        size, received, spent_s = 0, 0, 0.0
        cost = self._cost(scope)

        async def keep(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size > self._body_bytes:
                raise self._too_large(f"more than {self._body_bytes / 1e6:g} MB")
            await share.take(len(piece), cost, self._hold_s)
            whole.write(piece)

        while True:
            if connection is not None and connection.has_body:
                message = await receive()
            else:
                since = time.monotonic()
                message = await self._timely(receive, self._request_s - spent_s)
                spent_s += time.monotonic() - since
            if message["type"] == "http.disconnect":
                raise GoneAway
            rest = message.get("body", b"")
            received += len(rest)
            while rest:
                piece, rest = (rest, b"") if inflate is None else _inflated(inflate, rest)
                await keep(piece)
            if not message.get("more_body", False):
                break
        if inflate is not None and received:
            while not inflate.eof and (piece := inflate.decompress(b"", _STEP)):
                await keep(piece)
            if not inflate.eof:
                raise DataError("the gzip data in the body ends too early.")
        return whole.getvalue()

    async def _discard(self, receive: Receive) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._request_s, DISCARD_S)):
                while (await receive()).get("more_body", False):
                    pass

    async def _timely(self, receive: Receive, left_s: float) -> Message:
        deadline = asyncio.timeout(0.0 if self.budget.is_ending else max(left_s, 0.001))
        self._arriving.add(deadline)
        try:
            async with deadline:
                return await receive()
        except TimeoutError:
            if self.budget.is_ending:
                raise _ending() from None
            raise DeadlineExceeded(
                f"the request was not whole after {self._request_s:g} s.",
                remedy=_and_raise("Send less at once, or faster", self._refusals.request_s),
            ) from None
        finally:
            self._arriving.discard(deadline)

    def _too_large(self, size: str) -> TooLarge:
        return TooLarge(
            f"the body has {size} after decompression, and the limit is {self._body_bytes / 1e6:g} MB.",
            remedy=_and_raise("Send less at once", self._refusals.body),
        )


def _ending() -> AtroposError:
    return HubClosed("the server is ending.", remedy="Send it again: it may be back in a moment.")


def _coding(scope: Scope) -> bytes:
    return (header(scope, b"content-encoding") or b"").strip().lower()


def _and_raise(remedy: str, option: str) -> str:
    return f"{remedy}; {option} sets the bound." if option else f"{remedy}."


def _inflated(inflate: isal_zlib.Decompress, data: bytes) -> tuple[bytes, bytes]:
    """Inflate a part of the data. Return the result and the data that is left."""
    if inflate.eof:
        raise DataError("there is something after the end of the gzip data in the body.")
    try:
        piece = inflate.decompress(data, _STEP)
    except isal_zlib.error as error:  # type: ignore[misc] # its stub takes the class for one of its errors
        raise DataError(f"the body says gzip and is not: {error}.") from error
    return piece, inflate.unconsumed_tail or inflate.unused_data


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "free",
            "keepcost",
        )
    ]


def returnable_bytes() -> int:
    """Return the bytes that are free in the C library. If it does not report them (before glibc 2.33), return all memory of this
    process, so that growth is returned while it lasts."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return resident_bytes()
    mallinfo.restype = _Mallinfo
    return int(mallinfo().free)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
