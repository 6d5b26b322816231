"""Groups from old environments on their way into the hub: checked, buffered where they are pieces, held while it is full.

What unmodified environments understand of a full hub: a larger `queue_size`, then an answer that takes its time (they wait
300 s), then 503, upon which they try twice more. Any 4xx makes them drop the group at once.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope

from atropos_core.codec import encode_bytes
from atropos_core.errors import DataError, HubClosed, HubFull, StoreFull
from atropos_core.hub import Label
from atropos_core.types import ScoredGroup
from atropos_trajectory_api.config import ServeOptions
from atropos_trajectory_api.limits import GoneAway
from atropos_trajectory_api.old_pieces import Piece, Pieces, joined
from atropos_trajectory_api.old_retries import Retries, digest, item_key
from atropos_trajectory_api.old_state import OldEnvironment
from atropos_trajectory_api.service import Service
from atropos_trajectory_api.wire import from_wire

ANONYMOUS = "anonymous"


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
        self._retries = Retries(lambda key: key in buffered or service.hub.knows(key), killed_at)

    async def resume(self) -> None:
        """Queue the whole groups that a killed server had not got round to."""
        for number in self.pieces.environments():
            if (environment := self._old.environments.get(number)) is not None:
                await self._queue_whole(environment, None, 0.0)

    def undelivered(self, body: bytes, items: int) -> None:
        self._retries.remember(digest(body), items)

    async def take(self, scope: Scope, receive: Receive, body: bytes, given: list[Any]) -> list[dict[str, Any]]:
        """Store every group of a body, or none that is malformed; the answers in their order. Raises DataError for one
        that cannot be, HubFull where there is no room in time, GoneAway for a client that did not wait."""
        read = [self._read(data, index if len(given) > 1 else None) for index, data in enumerate(given)]
        for environment, _ in read[:1]:
            scope["atropos.worker"] = environment.name if environment else ANONYMOUS
        body_digest = digest(body)
        stored = self._retries.take(body_digest, len(given))
        key, until = self._retries.new_key(body_digest), time.monotonic() + self._hold_s
        replies = []
        for item, (environment, group) in enumerate(read):
            if item >= stored:
                try:
                    replies.append(await self._store(environment, group, item_key(key, item), receive, until))
                except (HubFull, HubClosed, GoneAway, asyncio.CancelledError):
                    if item:
                        self._retries.remember(body_digest, item)
                    raise
            elif environment is not None and self._is_piece(environment, group):
                replies.append(self._buffered(environment))
            else:
                replies.append({"status": "received"})
        return replies

    @property
    def _version(self) -> int | None:
        """The policy version that old groups are taken to be of, at best: no old client says it."""
        return self._service.version if self._service.trainer is not None else None

    def _read(self, data: Any, index: int | None) -> tuple[OldEnvironment | None, ScoredGroup]:
        where = "" if index is None else f"group {index}: "
        if not isinstance(data, dict):
            raise DataError(f"{where}a group is a JSON object, and this is a {type(data).__name__}.")
        number = data.get("env_id")
        if isinstance(number, int) and number < 0:
            raise DataError(f"{where}env_id {number} is below 0: environments are numbered from 0.")
        environment = self._old.environments.get(number) if isinstance(number, int) else None
        name = environment.name if environment else ANONYMOUS
        try:
            group = from_wire(data, environment=name, version=self._version)
        except DataError as error:
            if where:
                raise DataError(where + Exception.__str__(error), remedy=error.remedy) from error
            raise
        self._refuse_other_vocabulary(name, group)
        return environment, group

    def _refuse_other_vocabulary(self, name: str, group: ScoredGroup) -> None:
        known = self._service.vocabulary or self._vocabulary
        if not known:
            return
        for index, episode in enumerate(group.episodes):
            for rollout in episode.rollouts:
                if len(rollout.tokens) and (highest := int(rollout.tokens.max())) >= known:
                    raise DataError(
                        f"tokens[{index}] of environment {name} has the id {highest}, and the policy's vocabulary ends at "
                        f"{known - 1}: the environment has another tokenizer.",
                        remedy="Give the environment the policy's tokenizer (tokenizer_name), and start it again.",
                    )

    async def _store(
        self,
        environment: OldEnvironment | None,
        group: ScoredGroup,
        key: str,
        receive: Receive,
        until: float,
    ) -> dict[str, Any]:
        if environment is not None:
            environment.seen = time.monotonic()
            if self._is_piece(environment, group):
                self.pieces.add(environment.id, Piece.of(key, group))
                await self._queue_whole(environment, receive, until)
                return self._buffered(environment)
            environment.largest = max(environment.largest, len(group.episodes))
        else:
            self._old.anonymous_largest = max(self._old.anonymous_largest, len(group.episodes))
        await self._put(group, key, receive, until)
        return {"status": "received"}

    @staticmethod
    def _is_piece(environment: OldEnvironment, group: ScoredGroup) -> bool:
        return len(group.episodes) < environment.group_size

    def _buffered(self, environment: OldEnvironment) -> dict[str, Any]:
        return {"status": "buffered", "buffer_size": self.pieces.sequences(environment.id)}

    async def _queue_whole(self, environment: OldEnvironment, receive: Receive | None, until: float) -> None:
        """Where pieces make a group, queue it. The last piece's key is the group's: a server that was killed in between
        does the same again, and the hub knows the key."""
        whole = self.pieces.whole(environment.id, environment.group_size)
        if not whole:
            return
        group = from_wire(joined(whole), environment=environment.name, version=self._version)
        try:
            await self._put(group, whole[-1].key, receive, until)
        except HubFull:
            return  # the pieces stay where they are, and the next one tries again
        self.pieces.remove(environment.id, whole)

    async def _put(self, group: ScoredGroup, key: str, receive: Receive | None, until: float) -> None:
        frame = encode_bytes(group)
        label = Label(
            environment=group.draw.environment, sequences=len(group.episodes), size_bytes=len(frame),
            oldest_version=self._version, draw=group.draw.id, task=group.task.id,
        )  # fmt: skip
        try:
            await self._service.put(frame, label, key=key, worker=label.environment, deadline_s=0.0)
        except StoreFull:
            raise
        except HubFull:
            if receive is None:
                raise
            await self._put_held(frame, label, key, receive, until)
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
