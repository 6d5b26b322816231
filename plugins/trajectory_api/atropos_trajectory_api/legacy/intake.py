"""Groups from old environments on their way into the hub: checked, buffered if they are pieces, and kept waiting while it is full.

Unmodified environments understand three signs of a full hub: a larger `queue_size`, an answer that takes long (they wait 300 s), and
503, after which they try twice more. Any 4xx makes them drop the group at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from atropos_core import console
from atropos_core.errors import DataError, HubClosed, HubFull, StoreFull
from atropos_core.hub.records import Label
from atropos_http_server.body_limits import SHARE_KEY, GoneAway
from atropos_http_server.connection import SCOPE_KEY, Connection
from atropos_trajectory_api.groups.frame_check import Checked
from atropos_trajectory_api.legacy.pieces import OVERHEAD_BYTES, Piece, Pieces, joined
from atropos_trajectory_api.legacy.retries import Retries, digest
from atropos_trajectory_api.legacy_groups.incoming_groups import parse, read
from atropos_trajectory_api.legacy_groups.mistakes import check_masks, check_names, warn_of_nothing_to_train
from atropos_trajectory_api.legacy_groups.quick_json import QuickReader
from atropos_trajectory_api.legacy_groups.stored_group import OldGroup
from atropos_trajectory_api.legacy_groups.wire_json import has_many_parts
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.old_state import OldEnvironment
from atropos_trajectory_api.service.service import Service

ANONYMOUS = "anonymous"
MOST_GROUPS = 1024  # in one body: each is held both parsed and as bytes before the first is stored
ASIDE_BYTES, LIST_ASIDE_BYTES = 1 << 19, 1 << 16  # reading a body of this size on the event loop delays all others
SHORT_BYTES = 1 << 13  # nothing in a body of this size takes long to read
READ_S = 30.0  # how long a large body may wait to be read
READ_KEY = "atropos.read"  # in a scope: the part of its body that was already read
MANY = 16  # groups to store before other tasks get a turn
PIECES_PART = 4  # pieces may take one part in this many of the hub's size
SAY_AGAIN_S = 60.0


def is_long(body: bytes, *, many: bool) -> bool:
    """Return True if reading this body on the event loop would hold others up."""
    most = LIST_ASIDE_BYTES if many else ASIDE_BYTES
    return len(body) >= most or (len(body) > SHORT_BYTES and has_many_parts(body))


class Read(NamedTuple):
    """One checked group of a body."""

    environment: OldEnvironment | None
    group: OldGroup
    frame: bytes

    @property
    def sender(self) -> str:
        return self.environment.name if self.environment else ANONYMOUS


class Intake:
    """One instance for all old environments."""

    def __init__(self, service: Service, options: ServeOptions, vocabulary: int, killed_at: float | None) -> None:
        self._service = service
        self._old = service.old
        self._hold_s = options.hold_s
        self._most_sequences = options.hub_sequences or math.inf
        self._vocabulary = vocabulary
        self._reading = asyncio.Lock()
        self._quick = QuickReader()
        self.stopping = asyncio.Event()
        self.latest: bytes | None = None  # the last queued frame
        kept = Path(options.directory) / "pieces" if options.journal else None
        self.pieces = Pieces(
            kept,
            durable=options.sync == "always",
            knows=service.hub.knows,
            may_write=service.may_write,
            most_bytes=options.hub_mb * 1e6 / PIECES_PART,
        )
        self._warned_at = -math.inf
        self.retries = Retries(
            lambda key: key in self.pieces.found or service.hub.knows(key), killed_at, options.hold_s
        )

    def at_once(self, scope: Scope, body: bytes) -> dict[str, Any] | None:
        """As `take`, for a short body of one group that need not wait. None if it may have to wait or must be refused; `take` then
        continues from what was read."""
        connection: Connection = scope[SCOPE_KEY]
        if not self._service.durable_at_once or is_long(body, many=False):
            return None
        try:
            (one,) = scope[READ_KEY] = self._read_all(body, many=False)
            label = self._label(one.group, one.frame)
            if self._is_piece(one) or connection.has_hung_up() or not self._service.hub.admits(label):
                return None
        except DataError:
            return None
        scope["atropos.worker"] = one.sender
        body_digest = digest(one.frame)
        if not self.retries.take(body_digest, 1):
            key = self.retries.new_key(body_digest)
            try:
                self._service.try_put(one.frame, Checked(None, label), key=key)
            except (StoreFull, HubClosed):
                self.retries.give_back(key)
                return None
            self._note_whole(one)
            self.latest = one.frame
        return {"status": "received"}

    async def queue_wholes(self) -> None:
        """Queue groups that pieces have completed: a killed server did not get to it, or the hub had no room in time."""
        for number in self.pieces.environments():
            if (environment := self._old.environments.get(number)) is not None:
                await self._queue_whole(environment, None, 0.0)

    async def take(self, scope: Scope, receive: Receive, body: bytes, *, many: bool) -> list[dict[str, Any]]:
        """Store every group of a body, or none if one is malformed. Returns the answers in order. Raises DataError for a malformed
        group, HubFull if there is no room in time, GoneAway for a client that did not wait."""
        if READ_KEY in scope:
            groups = scope.pop(READ_KEY)
        elif is_long(body, many=many):
            groups = await self._read_aside(body, many)
        else:
            groups = self._read_all(body, many)
        if share := scope.get(SHARE_KEY):
            share.read()
        for first in groups[:1]:
            scope["atropos.worker"] = first.sender
        body_digest = digest(*[one.frame for one in groups])
        stored = self.retries.take(body_digest, len(groups))
        until = time.monotonic() + self._hold_s
        replies: list[dict[str, Any]] = []
        for item, one in enumerate(groups):
            if item % MANY == MANY - 1:
                await asyncio.sleep(0)
            keys: list[str] = []  # under which it may have been stored
            try:
                if item >= stored:
                    replies.append(await self._store(one, body_digest, item, keys, receive, until))
                elif self._is_piece(one) and one.environment is not None:
                    replies.append(await self._queue_whole(one.environment, receive, until))
                else:
                    replies.append({"status": "received"})
            except (HubFull, HubClosed, GoneAway, asyncio.CancelledError):
                not_stored = [key for key in keys if not self._has(one, key)]
                for key in not_stored:
                    self.retries.give_back(key)
                if kept := max(stored, item + (len(not_stored) < len(keys))):
                    self.retries.remember(body_digest, kept)
                raise
        connection = scope.get(SCOPE_KEY)
        if connection is not None and connection.has_hung_up():
            self.retries.remember(body_digest, len(groups))
            if connection.is_gone:
                raise GoneAway  # a client that only closed its sending side still reads
        return replies

    @property
    def _version(self) -> int | None:
        """The newest policy version that old groups can have: old clients do not report it."""
        return self._service.version if self._service.trainer is not None else None

    async def _read_aside(self, body: bytes, many: bool) -> list[Read]:
        """Read one body at a time, so that only one body's memory is used."""
        try:
            async with asyncio.timeout(min(READ_S, self._hold_s)):
                await self._reading.acquire()
        except TimeoutError:
            raise HubFull(
                f"large bodies are read one at a time, and this one has waited for {min(READ_S, self._hold_s):g} s.",
                remedy="Send it again later, or send smaller ones, which are read as they come.",
            ) from None
        gc.disable()  # it would scan all that is being read again and again, and delay all others
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_all, body, many))
        reading.add_done_callback(self._has_read)  # reading continues if this call is cancelled
        try:
            return await asyncio.shield(reading)
        finally:
            del reading  # its error would refer to this frame, and the frame to it: a cycle that holds the body

    def _has_read(self, reading: asyncio.Future[Any]) -> None:
        gc.enable()
        self._reading.release()

    def _read_all(self, body: bytes, many: bool) -> list[Read]:
        """Read all groups. Raises DataError. Only short bodies of one group change shared state, so the others may be read
        in a thread."""
        if not many and not is_long(body, many=many) and (quick := self._quick.read(body)) is not None:
            with contextlib.suppress(DataError):  # the full way reports it better
                return [self._read(quick, None)]
        given = parse(body)
        if not many:
            if not isinstance(given, dict):
                raise DataError("the body must be one group: a JSON object.", remedy="Lists go to /scored_data_list.")
            return [self._read(given, None)]
        if not isinstance(given, list):
            raise DataError("the body must be a JSON list of groups.", remedy="One group goes to /scored_data.")
        if len(given) > MOST_GROUPS:
            raise DataError(
                f"the body is a list of {len(given)}, but at most {MOST_GROUPS} groups are accepted at once.",
                remedy="Send them in several requests.",
            )
        return [self._read(data, index if len(given) > 1 else None) for index, data in enumerate(given)]

    def _read(self, data: Any, index: int | None) -> Read:
        where = "" if index is None else f"group {index}: "
        if not isinstance(data, dict):
            raise DataError(f"{where}a group is a JSON object, but this is a {type(data).__name__}.")
        number = data.get("env_id")
        if isinstance(number, int) and number < 0:
            raise DataError(f"{where}env_id {number} is below 0: environments are numbered from 0.")
        try:
            environment = self._environment(number) if isinstance(number, int) else None
            name = environment.name if environment else ANONYMOUS
            check_names(data, name)
            one = Read(environment, group := read(data, name), group.frame())
            check_masks(group, is_piece=self._is_piece(one), passed_on=self._is_passed_on)
        except DataError as error:
            if where:
                raise DataError(where + Exception.__str__(error), remedy=error.remedy) from error
            raise
        self._refuse_other_vocabulary(group)
        return one

    def _environment(self, number: int) -> OldEnvironment:
        known = self._old.environments
        if number not in known:
            raise DataError(
                f"env_id {number} is not known: "
                + (
                    f"{len(known)} have registered, from {min(known)} to {max(known)}."
                    if known
                    else "none has registered."
                ),
                remedy="Send the env_id that POST /register-env answered, or leave it out.",
            )
        return known[number]

    @property
    def _is_passed_on(self) -> bool:
        """True if groups go to a trainer of the old protocol, as they came."""
        return self._service.policy is None and self._old.registration is not None

    def _refuse_other_vocabulary(self, group: OldGroup) -> None:
        known = self._service.vocabulary or self._vocabulary
        if known and group.teacher is not None:
            group.check(known)
        if known and (highest := int(group.tokens.max())) >= known:
            raise DataError(
                f"tokens{group.place(int(group.tokens.argmax()))} of environment {group.environment} has the id {highest}, "
                f"but the policy's vocabulary ends at {known - 1}: the environment has another tokenizer.",
                remedy="Give the environment the policy's tokenizer (tokenizer_name), and start it again.",
            )

    async def _store(
        self, one: Read, body_digest: str, item: int, keys: list[str], receive: Receive, until: float
    ) -> dict[str, Any]:
        environment = one.environment

        def key_of(held: bool) -> str:
            keys.append(self.retries.new_key(body_digest, item, held=held))
            return keys[-1]

        if environment is not None and self._is_piece(one):
            environment.seen = time.monotonic()
            piece = Piece.of(key_of(True), one.group, one.frame)  # the whole group may wait for room
            await self._make_room(piece, receive, until)
            self.pieces.add(environment.id, piece)
            return await self._queue_whole(environment, receive, until)
        self._note_whole(one)
        await self._put(one.group, one.frame, key_of, receive, until)
        return {"status": "received"}

    def _note_whole(self, one: Read) -> None:
        sequences = len(one.group.lengths)
        if one.environment is None:
            self._old.anonymous_largest = max(self._old.anonymous_largest, sequences)
        else:
            one.environment.seen = time.monotonic()
            one.environment.largest = max(one.environment.largest, sequences)

    def _has(self, one: Read, key: str) -> bool:
        known = self._service.hub.knows(key)
        return known or (one.environment is not None and self.pieces.has(one.environment.id, key))

    def _size_of(self, environment: OldEnvironment) -> int:
        """The size of its whole groups: a size beyond the hub's would never be reached."""
        return int(min(environment.group_size, self._most_sequences))

    def _is_piece(self, one: Read) -> bool:
        """True for a piece to buffer. A piece too large to buffer is a separate group."""
        if one.environment is None or len(one.group.lengths) >= self._size_of(one.environment):
            return False
        return len(one.frame) + OVERHEAD_BYTES <= self.pieces.most_bytes

    async def _make_room(self, piece: Piece, receive: Receive, until: float) -> None:
        """Put the oldest pieces into the hub as they are. Otherwise, pieces of an environment that is gone would keep all others
        out. Raises HubFull if the hub has no room for them."""
        while not self.pieces.fits(piece):
            number = self.pieces.oldest()
            if number is None:
                raise HubFull("buffered pieces of groups wait for room in the hub, and no more are accepted.")
            if time.monotonic() - self._warned_at > SAY_AGAIN_S:
                self._warned_at = time.monotonic()
                console.warn(
                    f"buffered pieces of groups take {self.pieces.size_bytes / 1e6:.1f} MB, and their limit is a quarter of the "
                    "hub: the oldest are queued as they are (--hub-mb)."
                )
            known = self._old.environments.get(number)
            oldest = self.pieces.first(number, self._size_of(known) if known else 1)
            await self._queue(number, oldest, receive, until)

    async def _queue_whole(self, environment: OldEnvironment, receive: Receive | None, until: float) -> dict[str, Any]:
        """If pieces make a whole group, queue it. Returns the answer to the sender of the last piece."""
        if whole := self.pieces.whole(environment.id, self._size_of(environment)):
            with contextlib.suppress(HubFull, HubClosed):  # they stay, and the next piece tries again
                await self._queue(environment.id, whole, receive, until)
        return {"status": "buffered", "buffer_size": self.pieces.sequences(environment.id)}

    async def _queue(self, environment: int, numbers: list[int], receive: Receive | None, until: float) -> None:
        """Put these pieces into the hub as one group. In the meantime they cannot be part of another group."""
        pieces = self.pieces.begin(environment, numbers)
        key = pieces[-1].key
        try:
            if sum(len(piece.frame) for piece in pieces) >= LIST_ASIDE_BYTES:
                group, frame = await asyncio.to_thread(_one_of, pieces)
            else:
                group, frame = _one_of(pieces)
            await self._put(group, frame, lambda held: key, receive, until)
        finally:
            self.pieces.end(environment, numbers, stored=self._service.hub.knows(key))

    async def _put(
        self, group: OldGroup, frame: bytes, key_of: Callable[[bool], str], receive: Receive | None, until: float
    ) -> None:
        label = self._label(group, frame)
        key = key_of(False)
        try:
            await self._service.put(frame, Checked(None, label), key=key, deadline_s=0.0)
        except StoreFull:
            raise
        except HubFull:
            if receive is None:
                raise
            await self._put_held(frame, label, key_of(True), receive, until)
        self.latest = frame

    def _label(self, group: OldGroup, frame: bytes) -> Label:
        return Label(
            environment=group.environment, sequences=len(group.lengths), size_bytes=len(frame),
            oldest_version=self._version, draw=-1, task=group.task,
        )  # fmt: skip

    async def _put_held(self, frame: bytes, label: Label, key: str, receive: Receive, until: float) -> None:
        left_s = max(0.0, until - time.monotonic())
        put = asyncio.ensure_future(self._service.put(frame, Checked(None, label), key=key, deadline_s=left_s))
        gone, ending = asyncio.ensure_future(receive()), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({put, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done() and self._service.hub.knows(key):
                await asyncio.wait({put})  # it is on its way to the disk
            if gone.done():
                raise GoneAway  # the caller checks if it is stored
            if not put.done():
                raise HubClosed("the server is ending.", remedy="Send it again: the server may be back in a moment.")
            put.result()
        finally:
            for task in (put, gone, ending):
                task.cancel()
            await asyncio.gather(put, gone, ending, return_exceptions=True)


def _one_of(pieces: Sequence[Piece]) -> tuple[OldGroup, bytes]:
    groups = [piece.group() for piece in pieces]
    group = read(joined(groups), groups[0].environment)
    warn_of_nothing_to_train(group)
    return group, group.frame()
