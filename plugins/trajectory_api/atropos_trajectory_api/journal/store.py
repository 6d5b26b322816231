"""The hub's store on a journal: what was acknowledged survives the process, and what is settled makes room again.

The oldest segments are dropped once none of their groups is live. So a record about a group is never older than the group's own,
and only the newest idempotency keys of a dropped segment must be kept. If long-lived groups keep too much dead data on the disk,
they are copied to the front: the journal stays below twice the live data plus two segments.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from atropos_core import console
from atropos_core.errors import DataError, StoreFull
from atropos_core.hub.ledger import KEYS
from atropos_core.hub.records import GroupRecord, Label, Restored, State
from atropos_trajectory_api.journal.log import RESERVE_BYTES, SEGMENT_BYTES, Journal, RecordPosition, Sync

_PUT, _MARK, _SETTLE, _SESSION, _SUMMARY, _KEYS = range(1, 7)
_STATES: tuple[State, ...] = ("waiting", "leased", "trained")
_LABEL = struct.Struct(
    "<QQIqqB16s?II"
)  # id, size, sequences, version, draw, state, key, has a key, lengths of two texts
_NONE = -(1 << 63)  # of version and draw
_NUMBER = struct.Struct("<Q?")
_KEY = np.dtype([("key", "V16"), ("id", "<u8")])


class JournalStore:
    """`Store[bytes]`: opened once per process and directory, and closed by its owner."""

    def __init__(self, directory: Path, *, sync: Sync = "second", segment_bytes: int = SEGMENT_BYTES) -> None:
        self.meta: Mapping[str, Any] = {}  # a small JSON dictionary for the store's owner
        self.full: str | None = None  # the reason why groups are refused now
        self.check: Callable[[bytes], None] = lambda payload: None  # for groups of another process; raises DataError
        self._refused_bytes = 0  # size of the record that was refused then
        self._places: dict[int, RecordPosition | None] = {}  # of live groups; None: damaged
        self._marked: dict[int, State] = {}  # groups that do not wait
        self._live: dict[int, dict[int, None]] = {}  # ids by segment
        self._keys: dict[int, bytearray] = {}  # (key, id) by segment
        self._live_bytes = 0
        self._summarised_in = 0  # the newest segment in which a summary was found
        self._summary: dict[str, Any] = {"next": 0, "committed": 0, "session": 0, "holder": None}
        self._journal = Journal(directory, sync=sync, segment_bytes=segment_bytes)
        try:
            self._labels = self._replay()
            if self._journal.is_due:
                self._roll()
            elif next(reversed(self._journal.segments)) != self._summarised_in:  # killed between these two, or damaged
                self._journal.append(_SUMMARY, self._summarised(), urgent=True)
        except BaseException:
            self._journal.close()
            raise

    @property
    def size_bytes(self) -> int:
        """On the disk."""
        return self._journal.size_bytes

    @property
    def live_bytes(self) -> int:
        """Size of the groups that are not settled yet."""
        return self._live_bytes

    def restored(self, now: float) -> Restored[bytes]:
        records: list[GroupRecord[bytes]] = [
            GroupRecord(id, cast(bytes, None), label, now, self._marked.get(id, "waiting"))
            for id, label in sorted(self._labels.items())
        ]
        self._labels = {}
        found = np.concatenate(
            [np.frombuffer(bytes(keys), _KEY) for keys in self._keys.values()] or [np.empty(0, _KEY)]
        )
        found = found[np.unique(found["id"], return_index=True)[1]]  # some were copied; in the order of ids
        keys = [(bytes(key), int(id)) for key, id in found.tolist()]
        summary = self._summary
        return Restored(records, keys, summary["next"], summary["committed"], summary["session"], summary["holder"])

    # -- what the hub writes

    def put(self, id: int, payload: bytes, label: Label, key: bytes | None) -> None:
        record = _encoded(id, label, "waiting", key)
        size_bytes = len(record) + len(payload)
        try:
            try:
                self._append_put(id, record, payload)
            except StoreFull:
                if not self._begin_anew():
                    raise
                self._append_put(id, record, payload)
        except StoreFull as error:
            self._say_full(error, size_bytes)
            raise
        if size_bytes >= self._refused_bytes:
            self._say_room()
        if key is not None:
            self._keys.setdefault(self._places[id].segment, bytearray()).extend(key + id.to_bytes(8, "little"))  # type: ignore[union-attr]
        self._summary["next"] = id + 1
        self._compact(len(payload))

    def read(self, id: int) -> bytes:
        place = self._places[id]
        if place is None:
            raise DataError(f"group {id} is damaged in the journal in {self._journal.directory}.")
        body = self._journal.read(place)
        payload = body[_label_bytes(body) :]
        try:
            self.check(payload)
        except DataError as error:
            what = Exception.__str__(error)
            raise DataError(
                f"group {id} in the journal in {self._journal.directory} cannot be trained: {what}."
            ) from error
        return payload

    def mark(self, ids: Sequence[int], state: State) -> None:
        self._append(_MARK, bytes([_STATES.index(state)]), np.asarray(ids, "<u8").tobytes())
        for id in ids:
            self._marked[id] = state
            if state == "waiting":
                del self._marked[id]

    def settle(self, ids: Sequence[int], *, committed: bool) -> None:
        self._append(_SETTLE, bytes([committed]), np.asarray(ids, "<u8").tobytes())
        self._summary["committed"] += len(ids) if committed else 0
        for id in ids:
            self._forget(id)
        self._compact(0)

    def session(self, number: int, holder: str | None) -> None:
        self._append(_SESSION, _NUMBER.pack(number, holder is not None), (holder or "").encode())
        self._summary |= {"session": number, "holder": holder}
        self._marked.clear()

    def save_meta(self, meta: Mapping[str, Any]) -> None:
        """Save `meta` instead of the old value. Raises StoreFull."""
        before, self.meta = self.meta, meta
        try:
            self._append(_SUMMARY, self._summarised())
        except StoreFull:
            self.meta = before
            raise

    async def written(self) -> None:
        await self._journal.written()

    def has_reserve(self) -> bool:
        """True if others may write to this disk. Without the reserve, records that free space could no longer be written."""
        return self._journal.fill_reserve()

    def tick(self) -> None:
        """Called once a second: notice if a full disk has space again, even if no client sends."""
        if self.full is not None:
            self._begin_anew()
            if self._journal.has_room(self._refused_bytes):
                self._say_room()

    def close(self) -> None:
        self._journal.close()

    # -- segments

    def _append(self, kind: int, *parts: bytes) -> RecordPosition:
        """Append a small record. A full disk has a reserve for it, and it may exceed the segment's size."""
        if self._journal.is_due:
            try:
                self._roll()
            except StoreFull:
                pass
        return self._journal.append(kind, *parts, urgent=True)

    def _append_put(self, id: int, label: bytes, payload: bytes | memoryview, *, urgent: bool = False) -> None:
        if self._journal.is_due:
            self._roll()
        place = self._journal.append(_PUT, label, payload, urgent=urgent)
        self._places[id] = place
        self._live.setdefault(place.segment, {})[id] = None
        self._live_bytes += place.length

    def _roll(self, *, urgent: bool = False) -> None:
        """Begin a new segment with a summary of all earlier ones, so that those can be dropped."""
        self._journal.roll(urgent=urgent)
        try:
            self._journal.append(_SUMMARY, self._summarised(), urgent=True)
        except StoreFull:
            self._journal.unroll()
            raise

    def _summarised(self) -> bytes:
        return json.dumps(self._summary | {"meta": self.meta}).encode()

    def _forget(self, id: int) -> None:
        place = self._places.pop(id, None)
        self._marked.pop(id, None)
        if place is not None:
            self._live[place.segment].pop(id, None)
            self._live_bytes -= place.length

    def _begin_anew(self) -> bool:
        """For a full disk: if almost nothing is live and the dead data is in the current segment, continue in a new one, using the
        reserve. Returns True if that freed space."""
        if self._live_bytes > RESERVE_BYTES // 4 or self._journal.size_bytes < RESERVE_BYTES:
            return False
        try:
            self._roll(urgent=True)
        except StoreFull:
            return False
        self._compact(0, urgent=True)
        return len(self._journal.segments) == 1

    def _say_full(self, error: StoreFull, size_bytes: int) -> None:
        self._refused_bytes = size_bytes
        if self.full is None:
            self.full = Exception.__str__(error)
            console.warn(f"from now on groups are refused: {error}")

    def _say_room(self) -> None:
        if self.full is not None:
            self.full, self._refused_bytes = None, 0
            console.warn(f"the journal in {self._journal.directory} has space again: groups are accepted.")

    def _compact(self, written: int, *, urgent: bool = False) -> None:
        """Drop the oldest segments if nothing in them is live. If the disk holds too much dead data, or if it is `urgent`, copy a
        few groups out of them. Does little at a time, because a caller waits."""
        journal, left = self._journal, 1_000_000 + 4 * written
        while len(journal.segments) > 1:
            oldest = next(iter(journal.segments))
            live = self._live.get(oldest)
            if not live:
                self._drop(oldest)
                continue
            if left <= 0 or (not urgent and journal.size_bytes <= 2 * self._live_bytes + journal.segment_bytes):
                return
            id = next(reversed(live))
            place = self._places[id]
            assert place is not None, "damaged groups are not live in any segment"
            left -= place.length
            try:
                body = journal.read(place)
                at = _label_bytes(body)
                label = _with_state(body[:at], self._marked.get(id, "waiting"))
                self._append_put(id, label, memoryview(body)[at:], urgent=urgent)
            except StoreFull:
                return
            except DataError:
                self._places[id] = None
            del live[id]
            self._live_bytes -= place.length

    def _drop(self, segment: int) -> None:
        keys = np.frombuffer(bytes(self._keys.pop(segment, b"")), _KEY)
        keys = keys[keys["id"] + KEYS >= self._summary["next"]]
        self._live.pop(segment, None)
        kept = keys.tobytes()
        place = None
        try:
            place = self._journal.append(_KEYS, kept, copied=True) if kept else None
        except StoreFull:  # this segment is the only space: a kill before the next line would lose the keys
            pass
        self._journal.drop_first()
        if kept:
            place = place or self._journal.append(_KEYS, kept, urgent=True, copied=True)
            self._keys.setdefault(place.segment, bytearray()).extend(kept)

    # -- reading it again

    def _replay(self) -> dict[int, Label]:
        labels: dict[int, Label] = {}
        summary = self._summary
        for kind, place, body in self._journal.replay():
            if kind == _PUT:
                id, label, state, key = _decoded(body)
                self._forget(id)
                labels[id] = label
                self._places[id] = place
                self._live.setdefault(place.segment, {})[id] = None
                self._live_bytes += place.length
                summary["next"] = max(summary["next"], id + 1)
                if state != "waiting":
                    self._marked[id] = state
                if key is not None:
                    self._keys.setdefault(place.segment, bytearray()).extend(key + id.to_bytes(8, "little"))
            elif kind == _MARK:
                for id in np.frombuffer(body[1:], "<u8").tolist():
                    if id in labels:
                        self._marked[id] = _STATES[body[0]]
            elif kind == _SETTLE:
                ids = np.frombuffer(body[1:], "<u8").tolist()
                summary["committed"] += len(ids) if body[0] else 0
                for id in ids:
                    labels.pop(id, None)
                    self._forget(id)
            elif kind == _SESSION:
                number, is_open = _NUMBER.unpack_from(body)
                summary |= {"session": number, "holder": str(body[_NUMBER.size :], "utf-8") if is_open else None}
                self._marked.clear()
            elif kind == _SUMMARY:
                known = json.loads(bytes(body))
                self.meta = known.pop("meta")
                summary |= known
                self._summarised_in = place.segment
            elif kind == _KEYS:
                self._keys.setdefault(place.segment, bytearray()).extend(body)
            else:
                raise DataError(
                    f"the journal in {self._journal.directory} has a record of kind {kind}, which this version does not know.",
                    remedy="Read it with the version that wrote it, or serve from another directory (--dir).",
                )
        self._marked = {id: state for id, state in self._marked.items() if state != "waiting"}
        return labels


def _encoded(id: int, label: Label, state: State, key: bytes | None) -> bytes:
    environment, task = label.environment.encode(), label.task.encode()
    version = _NONE if label.oldest_version is None else label.oldest_version
    drawn = _NONE if label.draw is None else label.draw
    fixed = _LABEL.pack(
        id, label.size_bytes, label.sequences, version, drawn, _STATES.index(state),
        key or b"", key is not None, len(environment), len(task),
    )  # fmt: skip
    return fixed + environment + task


def _decoded(body: memoryview) -> tuple[int, Label, State, bytes | None]:
    id, size, sequences, version, drawn, state, key, has_key, first, second = _LABEL.unpack_from(body)
    at = _LABEL.size
    label = Label(
        environment=str(body[at : at + first], "utf-8"),
        sequences=sequences,
        size_bytes=size,
        oldest_version=None if version == _NONE else version,
        draw=None if drawn == _NONE else drawn,
        task=str(body[at + first : at + first + second], "utf-8"),
    )
    return id, label, _STATES[state], key if has_key else None


def _label_bytes(body: bytes) -> int:
    """The length of a put's body before its payload."""
    *_, first, second = _LABEL.unpack_from(body)
    return _LABEL.size + int(first) + int(second)


def _with_state(label: bytes, state: State) -> bytes:
    values = list(_LABEL.unpack_from(label))
    values[5] = _STATES.index(state)
    return _LABEL.pack(*values) + label[_LABEL.size :]
