"""Groups from old environments on their way into the hub: checked, buffered where they are pieces, held while it is full.

What unmodified environments understand of a full hub: a larger `queue_size`, then an answer that takes its time (they wait
300 s), then 503, upon which they try twice more. Any 4xx makes them drop the group at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from atropos_core.errors import DataError, HubClosed, HubFull, StoreFull
from atropos_core.hub import Label
from atropos_trajectory_api.config import ServeOptions
from atropos_trajectory_api.connection import SCOPE_KEY
from atropos_trajectory_api.limits import GoneAway
from atropos_trajectory_api.old_group import OldGroup
from atropos_trajectory_api.old_pieces import Piece, Pieces, joined
from atropos_trajectory_api.old_retries import Retries, digest
from atropos_trajectory_api.old_state import OldEnvironment
from atropos_trajectory_api.service import Service
from atropos_trajectory_api.wire import parse, read

ANONYMOUS = "anonymous"
MOST_GROUPS = 1024  # in one body: each is held parsed and as bytes before the first is stored
ASIDE_BYTES, LIST_ASIDE_BYTES = 1 << 19, 1 << 16  # reading a body of this size on the event loop holds everyone up
MANY = 16  # groups that are stored before others have a turn


class Read(NamedTuple):
    """One group of a body, checked."""

    environment: OldEnvironment | None
    group: OldGroup
    frame: bytes


class Intake:
    """One for all old environments."""

    def __init__(self, service: Service, options: ServeOptions, vocabulary: int, killed_at: float | None) -> None:
        self._service = service
        self._old = service.old
        self._hold_s = options.hold_s
        self._vocabulary = vocabulary
        self.stopping = asyncio.Event()
        self.latest: bytes | None = None  # the frame that was queued last
        kept = Path(options.directory) / "pieces" if options.journal else None
        self.pieces = Pieces(kept, durable=options.sync == "always")
        buffered = frozenset(self.pieces.keys())
        self.retries = Retries(lambda key: key in buffered or service.hub.knows(key), killed_at, options.hold_s)

    async def resume(self) -> None:
        """Queue the whole groups that a killed server had not got round to."""
        for number in self.pieces.environments():
            if (environment := self._old.environments.get(number)) is not None:
                await self._queue_whole(environment, None, 0.0)

    async def take(self, scope: Scope, receive: Receive, body: bytes, *, many: bool) -> list[dict[str, Any]]:
        """Store every group of a body, or none that is malformed; the answers in their order. Raises DataError for one
        that cannot be, HubFull where there is no room in time, GoneAway for a client that did not wait."""
        if len(body) >= (LIST_ASIDE_BYTES if many else ASIDE_BYTES):
            groups = await asyncio.to_thread(self._read_all, body, many)
        else:
            groups = self._read_all(body, many)
        for first in groups[:1]:
            scope["atropos.worker"] = first.environment.name if first.environment else ANONYMOUS
        body_digest = digest(*[one.frame for one in groups])
        stored = self.retries.take(body_digest, len(groups))
        until = time.monotonic() + self._hold_s
        replies: list[dict[str, Any]] = []
        for item, one in enumerate(groups):
            if item % MANY == MANY - 1:
                await asyncio.sleep(0)
            if item < stored:
                replies.append(self._buffered(one.environment) if self._is_piece(one) else {"status": "received"})
                continue
            try:
                replies.append(await self._store(one, body_digest, item, receive, until))
            except (HubFull, HubClosed, GoneAway, asyncio.CancelledError):
                if item:
                    self.retries.remember(body_digest, item)
                raise
        connection = scope.get(SCOPE_KEY)
        if connection is not None and connection.is_gone:
            self.retries.remember(body_digest, len(groups))
            raise GoneAway
        return replies

    @property
    def _version(self) -> int | None:
        """The policy version that old groups are taken to be of, at best: no old client says it."""
        return self._service.version if self._service.trainer is not None else None

    def _read_all(self, body: bytes, many: bool) -> list[Read]:
        """Raises DataError. Touches nothing that changes: it may run beside the event loop."""
        given = parse(body)
        if not many:
            if not isinstance(given, dict):
                raise DataError("the body must be one group: a JSON object.", remedy="Lists go to /scored_data_list.")
            return [self._read(given, None)]
        if not isinstance(given, list):
            raise DataError("the body must be a JSON list of groups.", remedy="One group goes to /scored_data.")
        if len(given) > MOST_GROUPS:
            raise DataError(
                f"the body is a list of {len(given)}, and up to {MOST_GROUPS} groups are taken at once.",
                remedy="Send them in several requests.",
            )
        return [self._read(data, index if len(given) > 1 else None) for index, data in enumerate(given)]

    def _read(self, data: Any, index: int | None) -> Read:
        where = "" if index is None else f"group {index}: "
        if not isinstance(data, dict):
            raise DataError(f"{where}a group is a JSON object, and this is a {type(data).__name__}.")
        number = data.get("env_id")
        if isinstance(number, int) and number < 0:
            raise DataError(f"{where}env_id {number} is below 0: environments are numbered from 0.")
        environment = self._old.environments.get(number) if isinstance(number, int) else None
        name = environment.name if environment else ANONYMOUS
        try:
            group = read(data, name)
        except DataError as error:
            if where:
                raise DataError(where + Exception.__str__(error), remedy=error.remedy) from error
            raise
        self._refuse_other_vocabulary(group)
        return Read(environment, group, group.frame())

    def _refuse_other_vocabulary(self, group: OldGroup) -> None:
        known = self._service.vocabulary or self._vocabulary
        if known and (highest := int(group.tokens.max())) >= known:
            raise DataError(
                f"tokens{group.place(int(group.tokens.argmax()))} of environment {group.environment} has the id {highest}, "
                f"and the policy's vocabulary ends at {known - 1}: the environment has another tokenizer.",
                remedy="Give the environment the policy's tokenizer (tokenizer_name), and start it again.",
            )

    async def _store(self, one: Read, body_digest: str, item: int, receive: Receive, until: float) -> dict[str, Any]:
        environment, sequences = one.environment, len(one.group.lengths)
        if environment is None:
            self._old.anonymous_largest = max(self._old.anonymous_largest, sequences)
        else:
            environment.seen = time.monotonic()
            if self._is_piece(one):
                key = self.retries.new_key(body_digest, item, held=True)  # the whole may wait for room
                self.pieces.add(environment.id, Piece.of(key, one.group))
                await self._queue_whole(environment, receive, until)
                return self._buffered(environment)
            environment.largest = max(environment.largest, sequences)

        def key_of(held: bool) -> str:
            return self.retries.new_key(body_digest, item, held=held)

        await self._put(one.group, one.frame, key_of, receive, until)
        return {"status": "received"}

    @staticmethod
    def _is_piece(one: Read) -> bool:
        return one.environment is not None and len(one.group.lengths) < one.environment.group_size

    def _buffered(self, environment: OldEnvironment | None) -> dict[str, Any]:
        return {"status": "buffered", "buffer_size": self.pieces.sequences(environment.id) if environment else 0}

    async def _queue_whole(self, environment: OldEnvironment, receive: Receive | None, until: float) -> None:
        """Where pieces make a group, queue it. The last piece's key is the group's: a server that was killed in between
        does the same again, and the hub knows the key."""
        whole = self.pieces.whole(environment.id, environment.group_size)
        if not whole:
            return
        group = read(joined(whole), environment.name)
        try:
            await self._put(group, group.frame(), lambda held: whole[-1].key, receive, until)
        except HubFull:
            return  # the pieces stay where they are, and the next one tries again
        self.pieces.remove(environment.id, whole)

    async def _put(
        self, group: OldGroup, frame: bytes, key_of: Callable[[bool], str], receive: Receive | None, until: float
    ) -> None:
        label = Label(
            environment=group.environment, sequences=len(group.lengths), size_bytes=len(frame),
            oldest_version=self._version, draw=-1, task=group.task,
        )  # fmt: skip
        try:
            await self._service.put(frame, label, key=key_of(False), worker=label.environment, deadline_s=0.0)
        except StoreFull:
            raise
        except HubFull:
            if receive is None:
                raise
            await self._put_held(frame, label, key_of(True), receive, until)
        self.latest = frame

    async def _put_held(self, frame: bytes, label: Label, key: str, receive: Receive, until: float) -> None:
        left_s = max(0.0, until - time.monotonic())
        put = asyncio.ensure_future(
            self._service.put(frame, label, key=key, worker=label.environment, deadline_s=left_s)
        )
        gone, ending = asyncio.ensure_future(receive()), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({put, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
            if put.done():
                put.result()
            elif ending.done():
                raise HubClosed("the server is ending.", remedy="Send it again: it may be back in a moment.")
            else:
                raise GoneAway
        finally:
            for task in (put, gone, ending):
                task.cancel()
            await asyncio.gather(put, gone, ending, return_exceptions=True)
