"""A model of the protocol: one adapter, the requests to it in order, and their results.

Requests have sequence ids from 1 and are carried out strictly in that order, whatever the order in which they arrive. A retried request
repeats its id, and is carried out once. Everything here is in the model's journal before a client is told of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atropos_core.stepwise import AdapterSettings
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.state.checkpoints import folder_of
from atropos_tinker_api.state.directory import read_json, write_json
from atropos_tinker_api.state.journal import Entry, Journal, Kind

ABOUT = "model.json"
STATE = "state-"  # and the sequence id up to which it is
AHEAD = 100_000  # how far a sequence id may be ahead of the next one
KEPT = 1000  # results, the last ones
JOURNAL_BYTES = 64 << 20  # a journal is made shorter from this size on


@dataclass(frozen=True)
class ModelRecord:
    """The request that created a model. `source`: the checkpoint that it began from; `with_moments`: also with its optimizer's state."""

    id: str
    session_id: str
    base_model: str
    settings: AdapterSettings
    created: float
    user_metadata: Mapping[str, Any] | None = None
    source: str | None = None
    with_moments: bool = False


class Model:
    """`next_seq` is the request that is carried out next; `pending` has what was accepted and not carried out."""

    def __init__(self, record: ModelRecord, directory: Path) -> None:
        self.record = record
        self.directory = directory
        self.journal = Journal(directory / "journal")
        self.pending: dict[int, Entry] = {}
        self.pending_bytes = 0
        self.next_seq = 0
        self.last_request = record.created
        self._requests: dict[int, Entry] = {}
        self._results: dict[int, Entry] = {}
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        for entry in self.journal.entries:
            (self._results if entry.kind.is_result else self._requests)[entry.seq] = entry
        if self._results:
            self.next_seq = max(self._results) + 1
        self.pending = {seq: entry for seq, entry in self._requests.items() if seq >= self.next_seq}
        self.pending_bytes = sum(entry.size for entry in self.pending.values())
        if 0 not in self._requests and not self.next_seq:  # request 0 creates the adapter
            self.accept(Kind.CREATE, 0, b"{}")

    @classmethod
    def create(cls, record: ModelRecord, models: Path) -> Model:
        """Make the model's directory."""
        directory = models / folder_of(record.id)
        directory.mkdir(exist_ok=True)
        write_json(directory / ABOUT, asdict(record))
        return cls(record, directory)

    @classmethod
    def open(cls, directory: Path) -> Model:
        """Open a model that an earlier server left. Raises RunDirectoryError."""
        about = read_json(directory / ABOUT)
        record = ModelRecord(**{**about, "settings": AdapterSettings(**about["settings"])})
        return cls(record, directory)

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def is_ready(self) -> bool:
        """True if its next request is there."""
        return self.next_seq in self.pending

    def accept(self, kind: Kind, seq: int, body: bytes) -> None:
        """Keep a request. A repeated one changes nothing. Raises Refused for an id that another request has, or that cannot be, and
        StoreFull."""
        if (known := self._requests.get(seq)) is not None:
            if known.kind != kind or self.journal.body(known) != body:
                raise Refused(f"seq_id {seq} of model {self.id} is that of another request.")
            return
        if seq < self.next_seq:
            if seq < 1:
                raise Refused(f"seq_id {seq} is not possible: a model's requests count from 1.")
            return  # carried out long ago, so the client has sent it again
        if seq > self.next_seq + AHEAD:
            raise Refused(f"seq_id {seq} is too far ahead: the next request of model {self.id} is {self.next_seq}.")
        self._requests[seq] = self.pending[seq] = self.journal.append(kind, seq, body)
        self.pending_bytes += len(body)

    def body(self, seq: int) -> tuple[Kind, bytes]:
        """Return a request that is kept."""
        entry = self._requests[seq]
        return entry.kind, self.journal.body(entry)

    def finish(self, kind: Kind, body: bytes) -> None:
        """Keep the result of the next request, and go to the one after it."""
        seq = self.next_seq
        self._results[seq] = self.journal.append(kind, seq, body)
        self.pending_bytes -= self.pending.pop(seq).size
        self.next_seq += 1
        for waiting in self._waiting.pop(seq, ()):
            if not waiting.done():
                waiting.set_result(None)
        self._results.pop(seq - KEPT, None)

    async def result(self, seq: int, hold_s: float) -> tuple[Kind, bytes] | None:
        """Return the result of a request, or None if it is not there within `hold_s`. Raises Refused for an unknown one."""
        if seq not in self._results:
            if seq < self.next_seq:
                raise Refused(f"the result of request {seq} of model {self.id} is not kept any more.", status=404)
            if seq not in self.pending:
                raise Refused(f"model {self.id} has no request {seq}.", status=404)
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(seq, []).append(waiting)
            try:
                async with asyncio.timeout(hold_s):
                    await waiting
            except TimeoutError:
                self._waiting[seq].remove(waiting)
                return None
        entry = self._results[seq]
        return entry.kind, self.journal.body(entry)

    # -- the saved state

    def state(self) -> tuple[int, Path] | None:
        """Return the newest saved state: the request up to which it is, and its directory."""
        return max(((int(path.name.removeprefix(STATE)), path) for path in self.state_directories()), default=None)

    def state_directories(self) -> list[Path]:
        return list(self.directory.glob(f"{STATE}*"))

    def state_directory(self, seq: int) -> Path:
        return self.directory / f"{STATE}{seq:010d}"

    def carried_out_since(self, seq: int) -> list[tuple[int, Kind, bytes, bool]]:
        """Return the requests after `seq` that were carried out: id, kind, body, and True for one that succeeded."""
        return [
            (one, *self.body(one), self._results[one].kind != Kind.FAILED)
            for one in range(seq + 1, self.next_seq)
            if one in self._requests
        ]

    def shorten(self) -> None:
        """Remove what no restart and no retry needs from a long journal: requests before the saved state, old results."""
        state = self.state()
        if state is None or self.journal.size_bytes < JOURNAL_BYTES:
            return
        self._requests = {seq: entry for seq, entry in self._requests.items() if seq > state[0]}
        kept = [*self._requests.values(), *self._results.values()]
        if sum(entry.size for entry in kept) > JOURNAL_BYTES // 2:
            self._results = {seq: entry for seq, entry in self._results.items() if seq > self.next_seq - KEPT // 10}
            kept = [*self._requests.values(), *self._results.values()]
        moved = self.journal.rewrite(kept)
        self._requests = {entry.seq: entry for entry in moved if not entry.kind.is_result}
        self._results = {entry.seq: entry for entry in moved if entry.kind.is_result}
        self.pending = {seq: entry for seq, entry in self._requests.items() if seq >= self.next_seq}

    def close(self) -> None:
        self.journal.close()


def json_body(value: Mapping[str, Any]) -> bytes:
    """Return a body of the journal, or an answer, as JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
