"""Limits a server's connections, and records why others were turned away: one gate for all its connections.

There are at most `most` connections. When one more comes, one that waits for its client is closed: the oldest of those that never sent
a request; otherwise the one that has been idle, or whose request has been arriving, for longest. Among these, one of the peer with
the most connections is chosen. A connection whose request is being answered is never closed.
"""

from __future__ import annotations

import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from atropos_core import console
from atropos_core.errors import ApiError, AtroposError, HubClosed
from atropos_http_server.answers import Refusals
from atropos_http_server.peers import Peers, may_call

SAY_AGAIN_S = 60.0
OTHER_DESCRIPTORS = 64  # reserve for the process's other files: journal, libraries, rings
WAITING_BYTES = 16_000_000  # of requests that were sent before the previous one was answered, over all connections
AT_ONCE = 64  # connections that are accepted before any of them is looked at
SPARE = 32  # connections beyond `most` that get an answer, and of those that were refused and may read why
HEAD_BYTES, HEAD_LINES, URL_BYTES = 1 << 16, 200, 1 << 14
Peer = int | str  # a user of this machine, or an address
Waits = Literal["silent", "idle", "arriving"]  # for the first request, for a further one, for the rest of one


class Client(Protocol):
    """A connection, as a gate needs it."""

    peer: Peer
    is_surplus: bool  # it came when all connections were in use, and none could be closed

    def make_way(self) -> None: ...


class Longest(NamedTuple):
    """The connection of a peer to close first; those that never sent a request come before all others."""

    has_spoken: bool
    since: float
    client: Client
    waits: Waits


class Connections:
    """The connections of one peer: their number, and those that wait for their client, the longest first."""

    def __init__(self) -> None:
        self.number = 0
        # the first of a dict of which many first ones were taken is not found at once
        self._waiting: dict[Waits, OrderedDict[Client, float]] = {
            "silent": OrderedDict(), "idle": OrderedDict(), "arriving": OrderedDict(),
        }  # fmt: skip

    def wait(self, client: Client, waits: Waits) -> None:
        for other, waiting in self._waiting.items():
            if other != waits:
                waiting.pop(client, None)
        self._waiting[waits].setdefault(client, time.monotonic())

    def wait_no_more(self, client: Client) -> None:
        for waiting in self._waiting.values():
            waiting.pop(client, None)

    def longest(self, newest: Client) -> Longest | None:
        """Return the longest waiting one except `newest`."""
        firsts = [
            Longest(waits != "silent", since, client, waits)
            for waits, waiting in self._waiting.items()
            for client, since in islice(waiting.items(), 2)
            if client is not newest
        ]
        return min(firsts, key=itemgetter(0, 1), default=None)


class Gate:
    """`head_s`: time limit for a head to arrive, and for some of an answer to be read. `check_users`: only this user (and root) may call.
    `refused` is called with the cause, one word, of each connection that is turned away."""

    def __init__(
        self,
        head_s: float,
        most: int,
        *,
        check_users: bool = False,
        refused: Callable[[str], None] = lambda cause: None,
        refusals: Refusals = Refusals(),  # noqa: B008 - frozen
    ) -> None:
        self.head_s = head_s
        self._refusals = refusals
        self.most = _possible(most)
        self.waiting_bytes = 0
        self._refused = refused
        self._peers = _peers() if check_users else None
        self._open: set[Client] = set()
        self._of: dict[Peer, Connections] = {}
        self._lingering: set[Client] = set()
        self._warned: dict[str, tuple[float, int]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._open) > self.most

    def peer(self, theirs: tuple[str, int] | None, ours: tuple[str, int | None] | None) -> tuple[Peer, bool]:
        """Return the peer, and True if it may call."""
        if self._peers is None or theirs is None or ours is None or ours[1] is None:
            return (theirs[0] if theirs else "", True)
        uid = self._peers.owner(theirs, ours)
        return (-1 if uid is None else uid, may_call(uid))

    def enter(self, client: Client) -> bool:
        """Add a connection. Return True if it may stay."""
        self._open.add(client)
        of = self._of.setdefault(client.peer, Connections())
        of.number += 1
        of.wait(client, "silent")
        if not self.is_full:
            return True
        if (longest := self._next_to_go(client)) is not None:
            self.leave(longest.client)
            self.count(f"made_way_{longest.waits}")
            longest.client.make_way()
        else:
            client.is_surplus = True
        return len(self._open) <= self.most + SPARE

    def linger(self, client: Client) -> bool:
        """Return True if a refused connection may stay until it has read the reason."""
        self.leave(client)
        if len(self._lingering) >= SPARE:
            return False
        self._lingering.add(client)
        return True

    def leave(self, client: Client) -> None:
        self._lingering.discard(client)
        if client in self._open:
            self._open.remove(client)
            of = self._of[client.peer]
            of.number -= 1
            of.wait_no_more(client)
            if not of.number:
                del self._of[client.peer]

    def await_head(self, client: Client) -> None:
        """Record that a head has begun to arrive."""
        self._wait(client, "silent")

    def await_body(self, client: Client) -> None:
        self._wait(client, "arriving")

    def rest(self, client: Client) -> None:
        """Record that its request is answered."""
        self._wait(client, "idle")

    def serve(self, client: Client) -> None:
        """Record that its request has arrived and waits for us."""
        if client in self._open:
            self._of[client.peer].wait_no_more(client)

    def _wait(self, client: Client, waits: Waits) -> None:
        if client in self._open:
            self._of[client.peer].wait(client, waits)

    def count(self, cause: str) -> None:
        """Count a connection that was turned away. Prints at most one line per minute and cause."""
        self._refused(cause)
        at, n = self._warned.get(cause, (-SAY_AGAIN_S, 0))
        if time.monotonic() - at < SAY_AGAIN_S:
            self._warned[cause] = (at, n + 1)
            return
        self._warned[cause] = (time.monotonic(), 0)
        console.warn(f"connections are turned away ({n + 1} since the last such line): {self._said_of(cause)}.")

    async def busy(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer a connection that came when all were in use."""
        error = ApiError("too many connections are open.", remedy="Try again in a moment.")
        await self._refusals.answer(scope, send, 503, error, [(b"retry-after", b"5"), (b"connection", b"close")])

    async def ending(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer a request that is not finished when the server ends."""
        error = HubClosed("the server is ending.", remedy="Send it again: it may be back in a moment.")
        await self._refusals.answer(scope, send, 503, error, [(b"retry-after", b"5"), (b"connection", b"close")])

    async def failed(self, scope: Scope, send: Send, raised: Exception) -> None:
        """Answer a request whose application raised an error that it does not handle."""
        error = AtroposError(
            f"the server failed on this request: {type(raised).__name__}.",
            remedy="This is a fault of the server. Its output has the traceback: send that along with a report.",
        )
        await self._refusals.answer(scope, send, 500, error, [(b"connection", b"close")])

    def _said_of(self, cause: str) -> str:
        text, option = CAUSES[cause]
        name = getattr(self._refusals, option) if option else ""
        return f"{text} ({name})" if name else text

    def _next_to_go(self, newest: Client) -> Longest | None:
        """Return a connection of the peer with the most, or else of any peer."""
        most = max(self._of.values(), key=attrgetter("number"))
        if (longest := most.longest(newest)) is not None:
            return longest
        found = [longest for of in self._of.values() if (longest := of.longest(newest)) is not None]
        return min(found, key=itemgetter(0, 1), default=None)


CAUSES = {  # and which option of a server raises the bound
    "head_bytes": (f"a request's head has more than {HEAD_BYTES} bytes", ""),
    "head_lines": (f"a request's head has more than {HEAD_LINES} lines", ""),
    "url": (f"an address has more than {URL_BYTES} bytes", ""),
    "head_time": ("a request's head did not end in time", "request_s"),
    "handshake": ("a TLS handshake did not end in time", "request_s"),
    "accept": ("this process has no descriptors left for them (ulimit -n)", ""),
    "malformed": ("what was sent is not HTTP/1.1", ""),
    "chunks": ("a chunked body has more extensions, trailers or small chunks than content", ""),
    "pipelined": ("more requests were sent ahead than are kept", ""),
    "unread": ("an answer was not read", "request_s"),
    "user": ("they are of another user of this machine, and there is no token (--token-file)", ""),
    "full": ("all connections are in use", "connections"),
    "made_way_silent": (
        "others came, and all were in use: the oldest that had sent no request made way",
        "connections",
    ),
    "made_way_idle": ("others came, and all were in use: the one idle for longest made way", "connections"),
    "made_way_arriving": ("others came, and all were in use: the request that took longest made way", "connections"),
}


def _possible(most: int) -> int:
    """Return how many connections this process can open, at most `most`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    try:
        taken = len(os.listdir("/dev/fd"))
    except OSError:
        taken = OTHER_DESCRIPTORS
    return max(min(most, descriptors - taken - OTHER_DESCRIPTORS - 2 * SPARE - AT_ONCE), 1)


def _peers() -> Peers | None:
    try:
        return Peers()
    except OSError as error:
        console.warn(
            f"this system does not tell whose a connection is ({error}): any user of this machine may call. "
            "Give --token-file FILE if there are others."
        )
        return None
