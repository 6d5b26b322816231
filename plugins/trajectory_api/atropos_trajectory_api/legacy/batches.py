"""GET /batch: the internal session through which old trainers take groups.

The old protocol has no acknowledgement, so a batch counts as trained when all of it has reached the client's machine. If the client
was gone before that, the same groups are served again. A short answer is sent whole and then watched. A long answer, or one after
which the connection ends, keeps its last byte back until the rest has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Scope, Send

from atropos_core import console
from atropos_core.errors import DataError, DeadlineExceeded, HubFull, LeaseLost, StoreFull
from atropos_core.hub.records import BatchSize, GroupRecord
from atropos_core.hub.session import Session
from atropos_http_server.answers import start
from atropos_http_server.connection import SCOPE_KEY, Connection
from atropos_trajectory_api.http.answers import ASIDE_FROM, PIECE, answer, encoded
from atropos_trajectory_api.legacy_groups.incoming_groups import dumps
from atropos_trajectory_api.legacy_groups.stored_group import as_wire
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.service import Service

HOLDER = "old"
SAY_AGAIN_S = 60.0
MOST_AT_ONCE = 1000
WATCHED_BYTES = 1 << 18  # of an answer that is sent whole: the kernel accepts this much at once
UNSAYABLE = (TypeError, ValueError, RecursionError, DataError)  # for a group with a value that JSON cannot express
_T = TypeVar("_T")


class OldTrainer:
    """All old trainers together: the one that asks gets the next batch."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        self._service = service
        self._old = service.old
        self._deadline_s = options.request_s
        self._session: Session[bytes] | None = None
        self._delivered: list[int] = []  # but not settled yet
        self._watched: set[asyncio.Task[None]] = set()  # batches on their way
        self._warned, self._warned_at = "", 0.0

    def native_holder(self) -> str | None:
        """The holder of the native protocol's session, if there is one."""
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
        """Answer with a batch. Returns False, without answering, if there is none now."""
        registration = self._old.registration
        if registration is None:
            await self._error(scope, send, "Trainer not registered. Call /register first.")
            return True
        if (holder := self.native_holder()) is not None:
            await self._error(scope, send, f"Trainer {holder} of the native protocol takes the groups of this server.")
            return True
        self._old.start()
        session, entries, text = await self._next(registration.batch_size)
        if session is None:
            return False
        ids = [entry.id for entry in entries]
        delivered: bool | None = False
        try:
            body, more = await encoded(scope, text)
            delivered = await self._deliver(scope, send, body, more)
        finally:
            self._advance(1)
            if delivered is None:
                self._watch(scope[SCOPE_KEY], session, ids)
            else:
                self._end(session, ids, delivered)
        return True

    async def _next(self, batch_size: int) -> tuple[Session[bytes] | None, list[GroupRecord[bytes]], bytes]:
        """A batch and its JSON. Groups without JSON are dropped: while an old trainer trains, no other trainer takes them."""
        while True:
            session, entries = await self._lease(batch_size)
            if session is None:
                return None, [], b""
            text = None
            try:
                if sum(len(entry.payload) for entry in entries) < ASIDE_FROM:
                    text = _written(entries)
                else:
                    text = await asyncio.to_thread(_written, entries)
                return session, entries, text
            except UNSAYABLE as error:
                if not (unsayable := [entry for entry in entries if not _is_sayable(entry)]):
                    raise
                self._drop(session, unsayable, error)
            finally:
                if text is None:
                    with contextlib.suppress(LeaseLost):  # then they already wait again
                        session.give_back([entry.id for entry in entries])

    def _drop(self, session: Session[bytes], unsayable: list[GroupRecord[bytes]], error: Exception) -> None:
        with contextlib.suppress(LeaseLost):
            session.drop([entry.id for entry in unsayable], "unsayable")
            console.warn(
                f"{len(unsayable)} groups of {unsayable[0].label.environment!r} cannot be written as JSON ({error}), which old "
                "trainers need: they are dropped. Train them with a trainer of /v1, or send plain values."
            )

    async def drop_all(self) -> int:
        """Drop every waiting group."""
        dropped = 0
        while True:
            ids = self._in_session(self._drop_some)
            dropped += len(ids)
            if len(ids) < MOST_AT_ONCE:
                return dropped
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Called when the connections are closed: wait a moment for the fate of batches that were on their way."""
        if self._watched:
            _, late = await asyncio.wait(self._watched, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    @staticmethod
    def _drop_some(session: Session[bytes]) -> list[int]:
        ids: list[int] = []
        while len(ids) < MOST_AT_ONCE and (entries := session.try_lease(BatchSize(groups=1), 0)):
            ids += [entry.id for entry in entries]
        session.drop(ids, "reset")
        return ids

    def _watch(self, connection: Connection, session: Session[bytes], ids: list[int]) -> None:
        """Settle the groups once they are on the client's machine."""

        async def until_arrived() -> None:
            arrived = False
            try:
                arrived = await connection.arrived(self._deadline_s)
                if not arrived:
                    connection.transport.abort()
            finally:
                self._end(session, ids, arrived)

        task = asyncio.create_task(until_arrived())
        self._watched.add(task)
        task.add_done_callback(self._watched.discard)

    def _end(self, session: Session[bytes], ids: list[int], delivered: bool) -> None:
        if delivered:
            self._delivered += ids
            self._settle(session)
            return
        self._advance(-1)
        with contextlib.suppress(LeaseLost):  # then they already wait again
            session.give_back(ids)

    def _advance(self, steps: int) -> None:
        registration = self._old.registration
        if self.native_holder() is None and registration is not None:
            with contextlib.suppress(StoreFull):  # the next change also saves it
                self._old.advance(max(self._old.step + steps, registration.starting_step))

    def _settle(self, session: Session[bytes]) -> None:
        """Settle what was delivered, so that it is never served again. If the disk is full, do so as soon as possible."""
        try:
            session.commit(self._delivered)
        except LeaseLost:
            console.warn(
                f"{len(self._delivered)} groups that an old trainer received wait again: another trainer came."
            )
        except StoreFull as error:
            console.warn(
                f"{Exception.__str__(error)} A batch that was delivered is served again if the server dies now."
            )
            return
        self._delivered = []

    async def _lease(self, batch_size: int) -> tuple[Session[bytes] | None, list[GroupRecord[bytes]]]:
        for _ in range(2):
            session = self._open()
            try:
                return session, await session.lease(BatchSize(sequences=batch_size), 0, 0.0)
            except LeaseLost:
                self._session = None
            except (DeadlineExceeded, HubFull) as error:
                self._say(Exception.__str__(error))
                break
        return None, []

    def _in_session(self, work: Callable[[Session[bytes]], _T]) -> _T:
        """Do the work in the present session, or in a new one if that is over because a native trainer came and went."""
        try:
            return work(self._open())
        except LeaseLost:
            self._session = None
            return work(self._open())

    def _open(self) -> Session[bytes]:
        if self._session is None or self._session.ended is not None:
            self._session = self._service.hub.open(HOLDER)
        return self._session

    def _say(self, why: str) -> None:
        """Say why there is no batch: on a change, at most once a minute, and only if groups wait."""
        now = time.monotonic()
        if self._service.hub.status().groups and why != self._warned and now - self._warned_at > SAY_AGAIN_S:
            console.say(f"no batch for GET /batch: {why}")
            self._warned, self._warned_at = why, now

    async def _error(self, scope: Scope, send: Send, message: str) -> None:
        await answer(scope, send, 200, {"status": "error", "message": message, "batch": []})

    async def _deliver(self, scope: Scope, send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> bool | None:
        """True if the client has the answer; None if that is not known yet."""
        connection: Connection | None = scope.get(SCOPE_KEY)
        if connection is not None and connection.is_gone:
            return False
        await start(send, 200, len(body), [(b"content-type", b"application/json"), *headers])
        watched = connection is not None and connection.keeps_alive and len(body) <= WATCHED_BYTES
        end = (
            len(body) // 2 if watched else len(body) - 1
        )  # a second segment is acknowledged at once, a first one after 40 ms
        for at in range(0, end, PIECE):
            await send({"type": "http.response.body", "body": body[at : min(at + PIECE, end)], "more_body": True})
        if watched:
            await asyncio.sleep(0)  # so that the halves are sent separately
        elif connection is not None and not await connection.arrived(self._deadline_s):
            connection.transport.abort()
            return False
        await send({"type": "http.response.body", "body": body[end:]})
        return None if watched else True


def _written(entries: list[GroupRecord[bytes]]) -> bytes:
    return dumps({"batch": [as_wire(entry.payload) for entry in entries]})


def _is_sayable(entry: GroupRecord[bytes]) -> bool:
    try:
        _written([entry])
    except UNSAYABLE:
        return False
    return True
