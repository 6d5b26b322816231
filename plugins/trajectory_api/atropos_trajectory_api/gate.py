"""Who may be connected to a server, and why others were turned away: one for all its connections.

There are at most `most` connections. Where one more comes, one that waits for its client makes way: the oldest of those
that never sent a request, else the one that has been idle, or whose request has been arriving, for longest, and of these
one of the peer that has the most. Nobody makes way whose request is being answered.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import chain
from operator import itemgetter
from typing import Protocol

from atropos_core import console
from atropos_trajectory_api.peers import Peers, may_call

SAY_AGAIN_S = 60.0
OTHER_DESCRIPTORS = 64  # that the process may open beside those it has: journal, libraries, rings
WAITING_BYTES = (
    16_000_000  # of requests that were sent before the one ahead of them was answered, all connections together
)
AT_ONCE = 64  # connections that are accepted before any of them is looked at
SPARE = 32  # connections beyond `most` that are told so, and of those that were refused and may read why
HEAD_BYTES, HEAD_LINES, URL_BYTES = 1 << 16, 200, 1 << 14
Peer = int | str  # a user of this machine, or an address


class Client(Protocol):
    """What a gate asks of a connection."""

    peer: Peer
    is_surplus: bool  # it came when all connections were in use, and nobody could make way

    def make_way(self) -> None: ...


class Gate:
    """`head_s`: in which a head must be there, and some of an answer be read. `check_users`: only this user (and root) may
    call. `refused` is told the cause of each connection that is turned away, a word."""

    def __init__(
        self,
        head_s: float,
        most: int,
        *,
        check_users: bool = False,
        refused: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self.head_s = head_s
        self.most = _possible(most)
        self.waiting_bytes = 0
        self._refused = refused
        self._peers = _peers() if check_users else None
        self._open: dict[Client, None] = {}
        self._of = Counter[Peer]()
        self._lingering: set[Client] = set()
        # those that wait for their client, the longest first
        self._silent: dict[Client, None] = {}
        self._idle: dict[Client, float] = {}  # since when
        self._arriving: dict[Client, float] = {}
        self._said: dict[str, tuple[float, int]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._open) > self.most

    def peer(self, theirs: tuple[str, int] | None, ours: tuple[str, int | None] | None) -> tuple[Peer, bool]:
        """Who is at the other end, and whether they may call."""
        if self._peers is None or theirs is None or ours is None or ours[1] is None:
            return (theirs[0] if theirs else "", True)
        uid = self._peers.owner(theirs, ours)
        return (-1 if uid is None else uid, may_call(uid))

    def enter(self, client: Client) -> bool:
        """Whether it may stay."""
        self._open[client] = None
        self._of[client.peer] += 1
        self._silent[client] = None
        if not self.is_full:
            return True
        if (other := self._next_to_go(client)) is not None:
            cause = "silent" if other in self._silent else "idle" if other in self._idle else "arriving"
            self.leave(other)
            self.count(f"made_way_{cause}")
            other.make_way()
        else:
            client.is_surplus = True
        return len(self._open) <= self.most + SPARE

    def linger(self, client: Client) -> bool:
        """Whether one that is refused may stay until it has read why."""
        self.leave(client)
        if len(self._lingering) >= SPARE:
            return False
        self._lingering.add(client)
        return True

    def leave(self, client: Client) -> None:
        self._lingering.discard(client)
        if client in self._open:
            del self._open[client]
            self._of[client.peer] -= 1
            if not self._of[client.peer]:
                del self._of[client.peer]
            self.serve(client)

    def await_head(self, client: Client) -> None:
        """A head has begun to arrive."""
        self._idle.pop(client, None)
        if client in self._open:
            self._silent[client] = None

    def await_body(self, client: Client) -> None:
        self.serve(client)
        if client in self._open:
            self._arriving[client] = time.monotonic()

    def serve(self, client: Client) -> None:
        """Its request is there: it waits for us."""
        self._silent.pop(client, None)
        self._arriving.pop(client, None)
        self._idle.pop(client, None)

    def rest(self, client: Client) -> None:
        """Its request is answered."""
        if client in self._open:
            self._idle[client] = time.monotonic()

    def count(self, cause: str) -> None:
        """A connection was turned away. One line a minute says so of each cause."""
        self._refused(cause)
        at, n = self._said.get(cause, (-SAY_AGAIN_S, 0))
        if time.monotonic() - at < SAY_AGAIN_S:
            self._said[cause] = (at, n + 1)
            return
        self._said[cause] = (time.monotonic(), 0)
        console.warn(f"connections are turned away ({n + 1} since the last such line): {CAUSES[cause]}.")

    def _next_to_go(self, newest: Client) -> Client | None:
        [(most, _)] = self._of.most_common(1)
        first: Client | None = None
        for client in chain(self._silent, self._longest()):
            if client is newest:
                continue
            if client.peer == most:
                return client
            first = first or client
        return first

    def _longest(self) -> Iterator[Client]:
        """Those that have spoken, the one that has waited for longest first."""
        spoken = merge(self._idle.items(), self._arriving.items(), key=itemgetter(1))
        return (client for client, _ in spoken)


CAUSES = {
    "head_bytes": f"a request's head has more than {HEAD_BYTES} bytes",
    "head_lines": f"a request's head has more than {HEAD_LINES} lines",
    "url": f"an address has more than {URL_BYTES} bytes",
    "head_time": "a request's head did not end in time (`atropos serve --request-s`)",
    "handshake": "a TLS handshake did not end in time (`atropos serve --request-s`)",
    "accept": "this process has no descriptors left for them (ulimit -n)",
    "malformed": "what was sent is not HTTP/1.1",
    "chunks": "a chunked body has more extensions, trailers or small chunks than content",
    "pipelined": "more requests were sent ahead than are kept",
    "unread": "an answer was not read (`atropos serve --request-s`)",
    "user": "they are of another user of this machine, and there is no token (--token-file)",
    "full": "all connections are in use (`atropos serve --connections`)",
    "made_way_silent": "others came, and all were in use (`atropos serve --connections`): the oldest that had sent no request made way",
    "made_way_idle": "others came, and all were in use (`atropos serve --connections`): the one idle for longest made way",
    "made_way_arriving": "others came, and all were in use (`atropos serve --connections`): the request that took longest made way",
}


def _possible(most: int) -> int:
    """As far as this process may open them."""
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
            "Give --token-file FILE where there are others."
        )
        return None
