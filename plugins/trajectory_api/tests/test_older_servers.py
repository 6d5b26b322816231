"""Our clients at a server of an earlier version: a real one, behind a relay that takes from it what that version did not have.

Such a server reads groups as rows alone, does not say which versions there were, and drops no group as damaged.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import ApiError, DataError
from atropos_trajectory_client.client import Api, TrainerSession, Worker, WorkerSpec
from plugins.trajectory_api.tests.sent_groups import Server, drawn, group_of, serving
from plugins.trajectory_api.tests.test_client import SPEC

NEWER = ("frames", "newest_version")  # in answers


@contextmanager
def older(server: Server, *, spoils: bool = False) -> Iterator[str]:
    """The address of `server` as one of before. With `spoils`, what it leases cannot be read."""

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.endswith("/drop") and decode(body)["cause"] == "damaged":
                refusal = {"kind": "DataError", "message": "'cause' cannot be 'damaged'", "remedy": None}
                return self.answer(400, "application/json", json.dumps({"error": refusal}).encode())
            there = http.client.HTTPConnection("127.0.0.1", server.port)
            there.request(self.command, self.path, body, {"Content-Type": self.headers.get("Content-Type", "")})
            answer = there.getresponse()
            kind, content = answer.headers.get("Content-Type", ""), answer.read()
            there.close()
            if answer.status == 200 and content and "json" not in kind:
                content = encode_bytes(self.without(decode(content)))
            return self.answer(answer.status, kind, content)

        def without(self, value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            if spoils and self.path.endswith("/lease"):
                value["entries"] = [{**entry, "frame": b"spoilt"} for entry in value["entries"]]
            return {key: one for key, one in value.items() if key not in NEWER}

        def answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = relay

        def log_message(self, *arguments: Any) -> None: ...

    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    relay.daemon_threads = True
    threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{relay.server_port}"
    finally:
        relay.shutdown()
        relay.server_close()


async def test_a_worker_is_refused_by_name_before_it_runs_for_a_server_that_cannot_read_its_groups(tmp_path: Path):
    with serving(tmp_path) as server, older(server) as url:
        api = Api(url)
        with pytest.raises(ApiError, match=r"of an older version(.|\n)*Start the server with this version"):
            await Worker.register(api, WorkerSpec("one", "words", 9), deadline_s=10)
        assert not (await api.status())["workers"], "nothing was registered"
        await api.close()


async def test_a_trainer_trains_on_at_a_server_that_does_not_say_which_versions_there_were(tmp_path: Path):
    with serving(tmp_path) as server, older(server) as url:
        ours, theirs = Api(url), Api(server.url)
        session = await TrainerSession.open(ours, SPEC, deadline_s=10)
        assert session.newest_before is None
        await session.announce(3)
        await session.set_version(3)
        worker = await Worker.register(theirs, WorkerSpec("one", "words", 9))
        await session.offer_draws([drawn(0)])
        assignment = await worker.draws(1, 5.0)
        number = await worker.put(group_of(assignment.draws[0], version=3), deadline_s=10)
        leased = await session.lease(1, 3, 5.0)
        assert [entry for entry, _ in leased.entries] == [number]
        assert await session.commit([number]) == 1
        for one in (worker, session, ours, theirs):
            await one.close()


async def test_a_damaged_group_is_never_served_again_where_the_server_knows_no_such_cause(tmp_path: Path):
    with serving(tmp_path) as server, older(server, spoils=True) as url:
        ours, theirs = Api(url), Api(server.url)
        session = await TrainerSession.open(ours, SPEC, deadline_s=10)
        worker = await Worker.register(theirs, WorkerSpec("one", "words", 9))
        await session.offer_draws([drawn(0)])
        assignment = await worker.draws(1, 5.0)
        number = await worker.put(group_of(assignment.draws[0]), deadline_s=10)
        assert number is not None
        with pytest.raises(DataError, match="cannot be 'damaged'"):
            await session.drop([number], "damaged")
        leased = await session.lease(1, 0, 5.0)
        assert not leased.entries and leased.dropped == ((-1, "damaged"),)
        assert not await session.lease(1, 0, 0.2), "it is settled"
        for one in (worker, session, ours, theirs):
            await one.close()
