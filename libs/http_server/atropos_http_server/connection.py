"""uvicorn's HTTP connection, with limits on what a client may send before its request has been parsed.

uvicorn's parser gets whole heads, each within limits, and one request at a time. Further data waits as bytes. It is not read on if
there is much of it, and is processed when the answer before it is written and other connections have had their turn. So a head
costs no more than its bytes, and many requests on one connection do not delay another. A connection also gives up on heads that
never end and on answers that are not read, and knows what has arrived.

If the application supports it (`at_once`), a request that arrives whole and without others is answered without a task, a cycle and
messages, which cost more than a short request. All other requests take the ordinary path.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import select
import struct
import termios
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from atropos_http_server.answers import AnswerAtOnce, WholeAnswer, whole_answer
from atropos_http_server.connection_limits import HEAD_BYTES, HEAD_LINES, URL_BYTES, WAITING_BYTES, Client, Gate, Peer

SCOPE_KEY = "atropos.connection"
LEAST_READ = 1 << 16  # bytes of a waiting answer in `head_s`; who reads less is not at it
CHUNKED_BYTES = 1 << 12  # of a chunked body that are looked at before others have a turn
CHUNK_COST = 16  # bytes around its content that a chunked body may have for each of the content
BODY_S = 1.0  # that a request may wait for its body before the application is called, which waits at a greater cost
UNTAKEN_BYTES = 1 << 16  # of answers that a client has not taken: with more, its further requests wait
LOOK_AGAIN_S = 0.005, 0.25  # at what it has taken, at first and at most
LINGER_S, LINGER_BYTES = 1.0, 1 << 24  # what is still read from who was refused, so that no reset takes the answer away
HOST = re.compile(
    rb"(?:[A-Za-z0-9._~%-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?"
)  # a name or address, and a port
_END = b"\r\n\r\n"
_FAILED = whole_answer(
    500,
    b"the server failed on this request. Its output has the traceback.\n",
    [(b"content-type", b"text/plain; charset=utf-8")],
)


class _Ambiguous(Exception):
    """Stops the parser at a head that was refused."""


class OneWrite:
    """A transport that writes the head of an answer together with what follows. uvicorn writes them separately, which makes two packets
    and wakes a client twice. A head without immediate content is sent without it."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self.is_closing = transport.is_closing  # for each request several times
        self._held = b""
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            held = self._taken()
            # Python 3.12 and 3.13 never get rid of an empty one, and write it again and again until the connection ends
            self._transport.writelines([held, data] if data else [held])
        else:
            self._held = data
            self._flushing = self._loop.call_soon(self._flush)

    def write_whole(self, data: bytes) -> None:
        """Write a whole answer, with its head."""
        if self._held:
            self._flush()
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._held)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def _flush(self) -> None:
        if (held := self._taken()) and not self._transport.is_closing():
            self._transport.write(held)

    def _taken(self) -> bytes:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        held, self._held = self._held, b""
        return held


class Flow(FlowControl):
    """uvicorn's flow control, but nothing is read while more than enough data waits to be processed."""

    enough = False

    def resume_reading(self) -> None:
        if not self.enough:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One client's connection; `scope["atropos.connection"]`."""

    gate: Gate
    at_once: Mapping[tuple[bytes, bytes], AnswerAtOnce] = {}  # by method and URL
    peer: Peer = ""
    may_call = True  # its user may call, if there is no token
    is_surplus = False
    handshake: Client | None = None  # the TLS handshake that held this connection's place before
    _flow: Flow
    _rest: bytes | bytearray = b""  # not processed yet
    _searched = 0  # the end of a head is not before this position in it
    _left = 0  # bytes of the arriving body, if its length is known
    _chunked = False
    _around = 0  # bytes of a chunked body that are not content, less CHUNK_COST for each that is
    _in_head = True
    _refused = False
    _discarded = 0
    _after_head = 0  # bytes that had arrived behind the head when it was looked at
    _answer: AnswerAtOnce | None = None  # for the request that is being looked at, which is all there
    _body = b""  # of that
    _held: tuple[RequestResponseCycle, Any] | None = None  # a request that the application was not called for yet
    _asking: asyncio.TimerHandle | None = None
    _pause_s = LOOK_AGAIN_S[0]
    _untaken = 0  # bytes of answers, when some were taken last
    _unread_since: float | None = None
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _hang_up: Any = None  # a poll object
    _had_all = False  # when the connection ended, the client's machine had acknowledged all that was written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))
        self.flow = self._flow = Flow(transport)
        self.peer, self.may_call = self.gate.peer(self.client, self.server)
        if self.handshake is not None:
            self.gate.leave(self.handshake)
        if not self.gate.enter(self):
            self.gate.count("full")
            self.transport.abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._rest:
            self._wait_as(bytearray(self._rest) if isinstance(self._rest, bytes) else self._rest, data)
        else:
            self._wait_as(data)
        self._look_at_rest()

    def eof_received(self) -> None:
        """The client has closed its end. It has read everything that it acknowledged, or it would have reset the connection."""
        self._had_all = self.has_all()

    def shutdown(self) -> None:
        self._had_all = self.has_all()
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        if self.is_gone or self.has_all():
            self._had_all = True
            super().timeout_keep_alive_handler()
        else:  # it is still reading the answer, so it is not idle
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._had_all = self._had_all and exc is None
        self.gate.leave(self)
        self._wait_as(b"")
        self._head_is_there()
        self._is_read()
        self._forget_held()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn leaves the timer, and the timer knows this connection
        # each knows this connection, and only Python's collector would find such circles, late; who asks for them is_gone
        self.parser = self.cycle = self.scope = cast(Any, None)
        self.pipeline.clear()

    def make_way(self) -> None:
        """Close, to make room for another connection: this one waits for its client."""
        if self._in_head:
            self.transport.close()
        else:
            self._refuse(503, None, "others wait for a connection, and this request took long to arrive")

    # -- what arrives

    def _wait_as(self, rest: bytes | bytearray, more: bytes = b"") -> None:
        """`rest`: data that is still to be processed."""
        before = len(self._rest)
        if more:
            assert isinstance(rest, bytearray)
            rest += more
        self._rest = rest
        self.gate.waiting_bytes += len(rest) - before

    def _look_at_rest(self) -> None:
        """Process waiting data as far as allowed now."""
        while self._rest and not self.is_gone and not self._refused:
            if not self._in_head:
                if self._chunked and self._body_part(CHUNKED_BYTES):
                    self._flow.enough = True
                    self.flow.pause_reading()
                    self.loop.call_soon(self._go_on)
                    return
                if not self._chunked:
                    self._body_part(self._left)
            elif self._is_served:
                if len(self._rest) > HEAD_BYTES:
                    self._flow.enough = True
                    self.flow.pause_reading()
                    if self.gate.waiting_bytes > WAITING_BYTES:
                        self.gate.count("pipelined")
                        self.transport.abort()
                return
            elif not self._head():
                return

    def _go_on(self) -> None:
        if self.is_gone or self._refused:
            return
        self._flow.enough = False
        self._look_at_rest()
        if not self._flow.enough and not (self._is_served and len(self.cycle.body) > HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _go_on_when_taken(self) -> None:
        """Make no more answers for a client that does not read the earlier ones."""
        if self.is_gone or self._refused or self._is_served:
            return
        untaken = self._unacknowledged()
        if untaken <= UNTAKEN_BYTES:
            self._unread_since = None
            self._go_on()
            return
        now = self.loop.time()
        if self._unread_since is None or untaken < self._untaken:
            self._unread_since, self._untaken = now, untaken
        if now - self._unread_since > self.gate.head_s:
            self.gate.count("unread")
            self.transport.abort()
            return
        if self._has_reset():
            self.transport.abort()
            return
        self.loop.call_later(self._pause_s, self._go_on_when_taken)
        self._pause_s = min(2 * self._pause_s, LOOK_AGAIN_S[1])

    def _head(self) -> bool:
        """Feed the next head to the parser. Return True if it has arrived and is within limits."""
        rest = self._rest
        if rest[0] in b"\r\n":  # of no meaning before a request
            self._wait_as(rest.lstrip(b"\r\n"))
            if not self._rest and self._late is None:
                self._await_head()
            return bool(self._rest)
        if not self._searched:
            self.gate.await_head(self)
        at = rest.find(_END, max(self._searched - 3, 0), HEAD_BYTES)
        self._searched = len(rest)
        first = rest.find(b"\r\n", 0, URL_BYTES)
        if first < 0 and len(rest) >= URL_BYTES:
            self._refuse(414, "url", f"the address has more than {URL_BYTES} bytes")
        elif at < 0 and len(rest) >= HEAD_BYTES:
            self._refuse(431, "head_bytes", f"the head of the request has more than {HEAD_BYTES} bytes")
        elif first >= 0 and not rest.endswith((b" HTTP/1.1", b" HTTP/1.0"), 0, first):
            self._refuse(400, "malformed", "this is not an HTTP/1.1 request")
        elif at >= 0 and rest.count(b"\n", 0, at) > HEAD_LINES:
            self._refuse(431, "head_lines", f"the head of the request has more than {HEAD_LINES} lines")
        elif at >= 0:
            self._searched, self._left, self._chunked, self._around = 0, 0, False, 0
            self._after_head = len(rest) - at - len(_END)
            self._fed(at + len(_END))
            return True
        elif self._late is None:
            self._await_head()
        return False

    def _body_part(self, most: int) -> bool:
        """Feed a part of a body. Return True if that was all that may be fed now, and there is more."""
        size = min(len(self._rest), most)
        self._left -= size
        self._around = max(self._around + size, size - HEAD_BYTES) if self._chunked else 0
        self._fed(size)
        if self._around > HEAD_BYTES and not self._refused:
            self._refuse(431, "chunks", "the chunked body has more around its content than is read")
        return self._chunked and bool(self._rest) and not self._in_head

    def _fed(self, size: int) -> None:
        """Give the parser `size` bytes of the waiting data."""
        rest = self._rest
        whole = size == len(rest)
        part = rest if whole else memoryview(rest)[:size]
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:  # to something that is not spoken here: it gets its answer, and that is all
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "malformed", "this is not an HTTP/1.1 request")
            return
        if isinstance(part, memoryview):
            part.release()
        self._wait_as(b"" if whole else rest[size:])
        if self._held is not None and self._asking is None:
            self._asking = self.loop.call_later(BODY_S, self._ask)

    @property
    def _is_served(self) -> bool:
        """A request of this connection is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, cause: str | None, why: str) -> None:
        """Stop processing this client. It gets the reason, unless an answer has begun. `cause`: for the gate."""
        if cause is not None:
            self.gate.count(cause)
        self._refused = True
        may_linger = self.gate.linger(self)
        self._head_is_there()
        self._wait_as(b"")
        self._forget_held()
        begun = self._is_served and self.cycle.response_started
        if self._is_served:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.transport.abort()
            return
        text = f"{why}.\n".encode()
        retry = b"retry-after: 5\r\n" if status == 503 else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (status, HTTPStatus(status).phrase.encode(), len(text), retry, text)
        )
        if not may_linger:
            self.transport.close()
            return
        self._flow.enough = False
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_S, self.transport.close)

    # -- the application is called once the body is there, or much of it, or after a moment: one that never comes costs no task

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.waiting_for_100_continue:
            super()._start_asgi_task(cycle, app)
        else:
            self._held = (cycle, app)

    def _ask(self) -> None:
        held = self._held
        self._forget_held()
        if held is not None and not self.is_gone:
            super()._start_asgi_task(*held)

    def _forget_held(self) -> None:
        self._held = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self
        self._hosts: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: not used here, and not a header of the request
        name = name.lower()
        if name == b"content-length":
            self._left = int(value)
        elif name == b"host":
            self._hosts.append(value)
        elif name == b"transfer-encoding":
            self._chunked = True
        elif name == b"expect":
            super().on_header(name, value)
            return
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_is_there()
        if self._is_ambiguous():
            self._refuse(
                400, "malformed", "the request does not name one host: give one Host header, and a path as address"
            )
            raise _Ambiguous
        self._in_head = False
        if (answer := self.at_once.get((self.parser.get_method(), self.url))) is not None and self._is_plain:
            self._answer, self._body = answer, b""
        else:
            self._begin()

    def _is_ambiguous(self) -> bool:
        """Return True if a proxy, our checks and the application could disagree on the request's host (RFC 9112, 3.2) or on the end of
        its body (6.3)."""
        hosts = self._hosts
        if len(hosts) != 1:
            return bool(hosts) or self.parser.get_http_version() != "1.0"
        is_path = self.url.startswith(b"/") or (self.url == b"*" and self.parser.get_method() == b"OPTIONS")
        both_ends = self._chunked and any(name == b"content-length" for name, _ in self.headers)
        return not is_path or both_ends or HOST.fullmatch(hosts[0]) is None

    def _begin(self) -> None:
        """Take the ordinary path: a cycle, and a call of the application."""
        self.gate.await_body(self)
        if self.is_surplus and self.gate.is_full:
            self.app = self.gate.busy
            self.gate.count("full")
        super().on_headers_complete()

    @property
    def _is_plain(self) -> bool:
        """True if the request whose head was just read has fully arrived, without another one, and can be answered now."""
        return (
            self._left == self._after_head
            and not (self._chunked or self.expect_100_continue or self.flow.write_paused)
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and not (self.is_surplus and self.gate.is_full)
        )

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._body = self._body + body if self._body else body
            return
        self._around -= (CHUNK_COST + 1) * len(body) if self._chunked else 0
        super().on_body(body)
        if self._held is not None and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._ask()

    def on_message_complete(self) -> None:
        if self._answer is not None:
            answer, body = self._answer, self._body
            self._answer, self._body = None, b""
            if self._is_answered(answer, body):
                return
            self._begin()
            super().on_body(body)
        self._in_head = True
        self.gate.serve(self)
        super().on_message_complete()
        self._ask()
        if not self._is_served:
            self.gate.rest(self)

    def _is_answered(self, answer: AnswerAtOnce, body: bytes) -> bool:
        scope = cast(dict[str, Any], self.scope)
        scope["method"], scope["path"] = self.parser.get_method().decode(), self.url.decode()
        try:
            given = answer(scope, body)
        except Exception as error:  # as uvicorn does around the application
            self.logger.error("Exception in ASGI application\n", exc_info=error)
            given = _FAILED
        if given is None:
            return False
        self._in_head = True
        self._write(given)
        super().on_response_complete()
        self.gate.rest(self)
        return True

    def _write(self, given: WholeAnswer) -> None:
        parts = [STATUS_LINE[given.status]]
        for name, value in (*self.server_state.default_headers, *given.headers):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n", given.body)
        cast(OneWrite, self.transport).write_whole(b"".join(parts))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head:
            self.gate.rest(self)
        if self._rest and not self.is_gone:
            self._unset_keepalive_if_required()
            self._pause_s = LOOK_AGAIN_S[0]
            self.loop.call_soon(self._go_on_when_taken)

    # -- what leaves

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    @property
    def has_body(self) -> bool:
        """The body of the current request has fully arrived."""
        return self.cycle is None or (not self.pipeline and not self.cycle.more_body)

    @property
    def has_begun(self) -> bool:
        """Some of the current answer has been sent."""
        return self.cycle is None or self.cycle.response_started

    @property
    def keeps_alive(self) -> bool:
        """The connection will not be closed after the answer."""
        return not self.is_gone and bool(self.cycle.keep_alive)

    async def arrived(self, deadline_s: float) -> bool:
        """Wait until the client's machine has acknowledged everything that was written. Return False at the deadline."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        pause_s = 0.0005
        while not self.is_gone:
            if self.has_all():
                await asyncio.sleep(0)  # a reset that came with the last acknowledgement is seen first
                return not self.is_gone or self._had_all
            if loop.time() > until:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return self._had_all

    def has_all(self) -> bool:
        """The client's machine has acknowledged everything that was written."""
        return not self.is_gone and not self.transport.get_write_buffer_size() and not self._unacknowledged()

    def _unacknowledged(self) -> int:
        """Return how many bytes the kernel holds for this client."""
        handle: Any = self.transport.get_extra_info("socket")
        (held,) = struct.unpack("i", fcntl.ioctl(handle.fileno(), termios.TIOCOUTQ, b"\0" * 4))
        return int(held)

    def _has_reset(self) -> bool:
        """True if the client has gone without reading. The loop does not notice while it neither reads nor writes."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))

    def has_hung_up(self) -> bool:
        """True if the client has closed its end, even if the loop has not noticed. If the system does not tell (macOS), what the loop
        knows."""
        if self.is_gone or not hasattr(select, "POLLRDHUP"):
            return self.is_gone
        if self._hang_up is None:
            self._hang_up = select.poll()
            self._hang_up.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(self._hang_up.poll(0))

    def _await_reading(self) -> None:
        self._is_read()
        self._unread = self.loop.call_later(self.gate.head_s, self._look, self.transport.get_write_buffer_size())

    def _look(self, before: int) -> None:
        """Check that some of the answer leaves: large answers are written at once."""
        if before - self.transport.get_write_buffer_size() >= LEAST_READ:
            self._await_reading()
        else:
            self.gate.count("unread")
            self.transport.abort()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        self._head_is_there()
        self._late = self.loop.call_later(self.gate.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self.gate.count("head_time")
        self.transport.close()

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def connections(gate: Gate, app: Any) -> type[Connection]:
    """Return the class of the connections of one server."""
    return type("Connection", (Connection,), {"gate": gate, "at_once": getattr(app, "at_once", {})})
