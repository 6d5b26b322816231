"""The native protocol under benchmarks/api.py: one worker that puts, one session that leases, trains and commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atropos_core.codec import decode, encode_bytes
from tests.native_payloads import native_call, native_group, open_session, put_request, register_native
from tests.raw_http import Answer, Connection, keep_in_flight

CONNECTIONS = 4
CHECKPOINT_BATCHES = 10  # from one commit to the next


@dataclass
class Session:
    port: int
    worker: str
    number: int
    batch_groups: int

    def puts(self, olds: list[dict[str, Any]], groups: int) -> list[bytes]:
        """One request a group, each with a key of its own."""
        frames = [encode_bytes(native_group(old, "bench")) for old in olds]
        return [put_request(f"{self.number}-{i}", self.worker, frames[i % len(frames)]) for i in range(groups)]


def opened(port: int, group_size: int, batch_groups: int) -> Session:
    end = Connection(port)
    try:
        number = open_session(end, batch_groups, group_size)
        worker = register_native(end, "bench")
    finally:
        end.close()
    return Session(port, worker, number, batch_groups)


def ingest_native(session: Session, requests: list[bytes]) -> None:
    keep_in_flight(session.port, requests, len(requests), CONNECTIONS, _stored)


def drain_native(session: Session) -> int:
    """Every call that a trainer makes: a lease for each batch, which says what of the former is trained, and a commit with
    each checkpoint. What it does with the frames is its own affair. Returns how many groups came."""
    path, seen, end = f"/v1/sessions/{session.number}", 0, Connection(session.port)
    lease = {"groups": session.batch_groups, "version": 0, "wait_s": 0.0}
    ids: list[int] = []
    uncommitted: list[int] = []
    while True:
        ids = [entry["id"] for entry in native_call(end, f"{path}/lease", lease | {"trained": ids})["entries"]]
        uncommitted += ids
        if len(uncommitted) >= CHECKPOINT_BATCHES * session.batch_groups or (uncommitted and not ids):
            native_call(end, f"{path}/commit", {"ids": uncommitted})
            uncommitted = []
        seen += len(ids)
        if not ids:
            end.close()
            return seen


def _stored(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert None not in decode(answer.body)["ids"], "a group was not wanted"
