"""GET /batch: the internal session through which old trainers take groups.

The old protocol has no acknowledgement, so a batch counts as trained when all of it has reached the client's machine. A
client that was gone before that gets the same groups again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.types import Scope, Send

from atropos_core import console
from atropos_core.codec import decode
from atropos_core.errors import DeadlineExceeded, HubFull, LeaseLost, StoreFull
from atropos_core.hub import Entry, Session, Want
from atropos_trajectory_api.answers import PIECE, answer, encoded, start
from atropos_trajectory_api.config import ServeOptions
from atropos_trajectory_api.connection import SCOPE_KEY, Connection
from atropos_trajectory_api.service import Service
from atropos_trajectory_api.wire import dumps, to_wire

HOLDER = "old"
SAY_AGAIN_S = 60.0
MOST_AT_ONCE = 1000


class OldTrainer:
    """All old trainers together: whoever asks gets the next batch."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        self._service = service
        self._old = service.old
        self._deadline_s = options.request_s
        self._session: Session[bytes] | None = None
        self._delivered: list[int] = []  # and not settled yet
        self._said, self._said_at = "", 0.0

    def native_holder(self) -> str | None:
        """Who holds the session of the native protocol, if anyone."""
        trainer = self._service.trainer
        return trainer.holder if trainer is not None else None

    def renew(self) -> None:
        if self._session is not None:
            try:
                self._session.renew()
                if self._delivered:
                    self._settle(self._session)
            except LeaseLost:
                self._session = None

    async def serve(self, scope: Scope, send: Send) -> bool:
        """Answer with a batch; False where there is none to be had now, and nothing was answered."""
        registration = self._old.registration
        if registration is None:
            await self._error(scope, send, "Trainer not registered. Call /register first.")
            return True
        if (holder := self.native_holder()) is not None:
            await self._error(scope, send, f"Trainer {holder} of the native protocol takes the groups of this server.")
            return True
        self._old.start()
        session, entries = await self._lease(registration.batch_size)
        if session is None:
            return False
        ids = [entry.id for entry in entries]
        delivered = False
        try:
            body, more = await encoded(scope, dumps({"batch": [to_wire(decode(entry.payload)) for entry in entries]}))
            delivered = await self._deliver(scope, send, body, more)
        finally:
            if delivered:
                self._delivered += ids
                self._settle(session)
                with contextlib.suppress(StoreFull):  # the next change saves it as well
                    self._old.advance(self._old.step + 1)
            elif session.ended is None:
                session.give_back(ids)
        return True

    async def drop_all(self) -> int:
        """Let go of every group that waits."""
        session = self._open()
        ids: list[int] = []
        while len(ids) < MOST_AT_ONCE and (entries := session.try_lease(Want(groups=1), 0)):
            ids += [entry.id for entry in entries]
        session.commit(ids)
        self._service.observed.dropped("reset", len(ids))
        await asyncio.sleep(0)
        return len(ids) + (await self.drop_all() if len(ids) == MOST_AT_ONCE else 0)

    def _settle(self, session: Session[bytes]) -> None:
        """What was delivered is never served again; where the disk is full, as soon as it can be written down."""
        try:
            session.commit(self._delivered)
        except LeaseLost:
            console.warn(f"{len(self._delivered)} groups that an old trainer has got wait again: another trainer came.")
        except StoreFull as error:
            console.warn(
                f"{Exception.__str__(error)} A batch that was delivered is served again if the server dies now."
            )
            return
        self._delivered = []

    async def _lease(self, batch_size: int) -> tuple[Session[bytes] | None, list[Entry[bytes]]]:
        for _ in range(2):
            session = self._open()
            try:
                return session, await session.lease(Want(sequences=batch_size), 0, 0.0)
            except LeaseLost:
                self._session = None
            except (DeadlineExceeded, HubFull) as error:
                self._say(Exception.__str__(error))
                break
        return None, []

    def _open(self) -> Session[bytes]:
        if self._session is None:
            self._session = self._service.hub.open(HOLDER)
        return self._session

    def _say(self, why: str) -> None:
        """Why there is no batch: on change, at most once a minute, and only where something waits."""
        now = time.monotonic()
        if self._service.hub.status().groups and why != self._said and now - self._said_at > SAY_AGAIN_S:
            console.say(f"no batch for GET /batch: {why}")
            self._said, self._said_at = why, now

    async def _error(self, scope: Scope, send: Send, message: str) -> None:
        await answer(scope, send, 200, {"status": "error", "message": message, "batch": []})

    async def _deliver(self, scope: Scope, send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        """Send it. The end goes out once all before it has arrived, so that hardly a moment is left in which a client
        that gives up could be taken for one that has its batch."""
        connection: Connection | None = scope.get(SCOPE_KEY)
        if connection is not None and connection.is_gone:
            return False
        await start(send, 200, len(body), [(b"content-type", b"application/json"), *headers])
        for at in range(0, max(len(body) - 1, 0), PIECE):
            await send(
                {"type": "http.response.body", "body": body[at : min(at + PIECE, len(body) - 1)], "more_body": True}
            )
        if connection is not None and not await connection.arrived(self._deadline_s):
            connection.transport.abort()
            return False
        await send({"type": "http.response.body", "body": body[-1:]})
        return True
