"""The routes of `/v1` as bytes: whatever comes in, what goes out is an answer or an error that says what to do."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.codec import MAGIC, PREFIX, decode, encode_bytes
from atropos_core.errors import DataError
from atropos_core.types import Draw, Failed, Sampling, Task
from atropos_trajectory_api.groups.frame_check import has_long_header, read_frame
from atropos_trajectory_api.native.routes import native_routes
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.service import Service
from atropos_trajectory_client.client import OTHER_TIMELINE
from plugins.trajectory_api.tests.sent_groups import SAMPLING, VOCABULARY, drawn, group_of

SESSION = {"holder": "run", "group_size": 4, "sampling": SAMPLING, "vocabulary": VOCABULARY}
WORKER = {"name": "w", "environment": "words", "tasks": 9}


class Wire:
    """Calls the application as a server would."""

    def __init__(self, **options: Any) -> None:
        self.service = Service.open(ServeOptions(**{"journal": False, **options}))
        self._app = native_routes(self.service)
        self.hang_up = asyncio.Event()

    async def raw(
        self, method: str, path: str, body: bytes = b"", accept: bytes = b"*/*"
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[Any] = []
        given = False

        async def receive() -> Any:
            nonlocal given
            if given:
                await self.hang_up.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [(b"accept", accept)]}
        await self._app(scope, receive, send)
        if not sent:
            return 0, {}, b""
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        status, _, answer = await self.raw(method, path, encode_bytes(body) if body is not None else b"")
        assert status == 200, (status, answer)
        return decode(answer)

    async def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        status, _, answer = await self.raw(method, path, encode_bytes(body) if body is not None else b"")
        return status, json.loads(answer)["error"]["kind"]


async def test_a_group_goes_from_a_worker_to_a_trainer_frame_for_frame():
    wire = Wire()
    frame = encode_bytes(group_of(drawn(0)))
    worker = (await wire.call("POST", "/v1/workers", WORKER))["worker"]
    session = f"/v1/sessions/{(await wire.call('POST', '/v1/sessions', SESSION))['session']}"
    await wire.call("POST", f"{session}/draws", {"draws": [drawn(0)]})
    taken = await wire.call("POST", f"/v1/workers/{worker}/draws", {"n": 5})
    assert taken["draws"] == (drawn(0),) and taken["sampling"] == SAMPLING and taken["group_size"] == 4
    ids = (await wire.call("POST", "/v1/groups", {"groups": [{"key": "a", "worker": worker, "frame": frame}]}))["ids"]
    leased = await wire.call("POST", f"{session}/lease", {"groups": 1, "version": 0})
    assert [(e["id"], e["frame"]) for e in leased["entries"]] == [(ids[0], frame)]
    assert (await wire.call("POST", f"{session}/commit", {"ids": ids}))["settled"] == 1


async def test_with_sync_always_what_is_leased_and_what_is_trained_is_on_the_disk_before_the_answer(tmp_path: Path):
    wire = Wire(journal=True, directory=tmp_path, sync="always")
    journal = wire.service._store._journal
    session = f"/v1/sessions/{(await wire.call('POST', '/v1/sessions', SESSION))['session']}"
    for draw in (-1, -2, -3):
        await wire.call("POST", "/v1/groups", {"groups": [{"frame": encode_bytes(group_of(drawn(draw)))}]})
    lease = {"groups": 1, "version": 0}
    [first] = (await wire.call("POST", f"{session}/lease", lease))["entries"]
    assert not journal._dirty
    await wire.call("POST", f"{session}/renew", {"trained": [first["id"]]})
    assert not journal._dirty
    [second] = (await wire.call("POST", f"{session}/lease", lease))["entries"]
    await wire.call("POST", f"{session}/lease", {**lease, "groups": 2, "trained": [second["id"]]})  # which gives none
    assert not journal._dirty
    await wire.service.close()


async def test_what_there_is_to_read_comes_as_json_for_people_who_ask_for_that():
    wire = Wire()
    status, headers, answer = await wire.raw("GET", "/v1/status", accept=b"text/html, application/json")
    assert (status, headers[b"content-type"]) == (200, b"application/json")
    assert json.loads(answer)["hub"]["groups"] == 0


async def test_several_groups_are_taken_all_or_none_where_one_cannot_be():
    wire = Wire()
    good, bad = encode_bytes(group_of(drawn(-1))), encode_bytes({"no": "group"})
    body = {"groups": [{"key": "a", "frame": good}, {"key": "b", "frame": bad}]}
    assert await wire.refused("POST", "/v1/groups", body) == (422, "DataError")
    assert wire.service.hub.status().groups == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/v1/nothing", None, (404, "NoSuchRoute")),
        ("GET", "/v1/sessions/1/nothing/more", None, (404, "NoSuchRoute")),
        ("PUT", "/v1/groups", None, (405, "WrongMethod")),
        ("POST", "/v1/groups", {}, (422, "DataError")),
        ("POST", "/v1/groups", [1], (422, "DataError")),
        ("POST", "/v1/groups", {"groups": [1]}, (422, "DataError")),
        ("POST", "/v1/workers/x/heartbeat", {}, (404, "UnknownThere")),
        ("POST", "/v1/sessions/7/renew", {}, (409, "LeaseLost")),
        ("POST", "/v1/sessions/-7/renew", {}, (422, "DataError")),
        ("POST", "/v1/sessions/" + "9" * 400 + "/renew", {}, (422, "DataError")),
        ("POST", "/v1/sessions", {"holder": 3}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "group_size": 0}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "vocabulary": 1 << 80}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "committed": ["a"]}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "sampling": Sampling(max_tokens="9")}, (422, "DataError")),  # type: ignore[arg-type]
        ("POST", "/v1/sessions", {**SESSION, "sampling": Sampling(top_p=b"1")}, (422, "DataError")),  # type: ignore[arg-type]
        ("POST", "/v1/sessions/1/draws", {"draws": [replace(drawn(1), environment=["a"])]}, (422, "DataError")),  # type: ignore[arg-type]
        ("POST", "/v1/sessions/1/draws", {"draws": [drawn(-1)]}, (422, "DataError")),
        ("POST", "/v1/workers", {**WORKER, "name": "n" * 1000}, (422, "DataError")),
        ("POST", "/v1/workers", {**WORKER, "name": "\ud800"}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "holder": "half \udfff"}, (422, "DataError")),
        ("POST", "/v1/sessions", {**SESSION, "holder": "h" * 5000}, (422, "DataError")),
        (
            "POST",
            "/v1/groups",
            {"groups": [{"key": "\ud800", "frame": encode_bytes(group_of(drawn(-1)))}]},
            (422, "DataError"),
        ),
        ("POST", "/v1/engines", {"session": 1, "url": "file:///etc/passwd"}, (422, "DataError")),
    ],
)
async def test_what_cannot_be_is_refused_under_its_name(method: str, path: str, body: Any, expected: tuple[int, str]):
    assert await Wire().refused(method, path, body) == expected


async def test_a_full_hub_is_a_503_that_says_when_to_come_back():
    wire, one = Wire(hub_sequences=1), {"frame": encode_bytes(group_of(drawn(-1), members=1))}
    told = await wire.call("POST", "/v1/groups", {"groups": [one, one]})
    assert told["ids"] == [0] and "no room" in told["full"]
    status, headers, answer = await wire.raw("POST", "/v1/groups", encode_bytes({"groups": [one]}))
    assert (status, headers[b"retry-after"], json.loads(answer)["error"]["kind"]) == (503, b"1", "HubFull")


async def test_a_client_that_hangs_up_ends_its_wait_and_gets_no_draws():
    wire = Wire()
    worker = (await wire.call("POST", "/v1/workers", WORKER))["worker"]
    await wire.call("POST", "/v1/sessions", SESSION)
    waiting = asyncio.create_task(
        wire.raw("POST", f"/v1/workers/{worker}/draws", encode_bytes({"n": 1, "wait_s": 50.0}))
    )
    await asyncio.sleep(0.01)
    wire.hang_up.set()
    assert (await asyncio.wait_for(waiting, 30))[0] == 0
    wire.service.draws.offer([drawn(0)], {})
    await asyncio.sleep(0)
    assert wire.service.draws.status()["waiting"] == 1


ROUTES = sorted(native_routes(Service(ServeOptions(journal=False)))._table)
ENTRY = {"key": "a", "worker": "none", "frame": encode_bytes(group_of(drawn(1)))}
BODIES: dict[str, dict[str, Any]] = {  # what a call of each route may say, once `begun` has returned
    "workers": {**WORKER, "weight": 2.0, "minimum": 0.1, "group_size": 4, "tokenizer": "t", "vocabulary": VOCABULARY,
                "playing": [0]},
    "workers/*/heartbeat": {"draining": False, "returned": [0]},
    "workers/*/draws": {"n": 1, "wait_s": 0.5, "playing": [0]},
    "workers/*/failed": {"group": group_of(drawn(0))},
    "groups": {"groups": [ENTRY], "wait_s": 0.5},
    "sessions": {**SESSION, "min_group": 1, "batch_groups": 2, "max_staleness": 1, "max_token_len": 64, "deadline_s": 9.0,
                 "tokenizer": "t", "model": "m", "version": 3, "committed": [0], "hub_id": None},
    "sessions/*/lease": {"groups": 1, "version": 0, "wait_s": 0.5, "trained": [0], "holding": [0], "seen": 0, "boot": "b"},
    "sessions/*/give_back": {"ids": [0]},
    "sessions/*/commit": {"ids": [0]},
    "sessions/*/drop": {"ids": [0], "cause": OTHER_TIMELINE},
    "sessions/*/renew": {"trained": [0]},
    "sessions/*/draws": {"draws": [drawn(2)]},
    "sessions/*/version": {"version": 3},
    "engines": {"session": 1, "url": "http://127.0.0.1:1"},
}  # fmt: skip


async def begun(pattern: str) -> tuple[Wire, str]:
    """A session that has leased group 0 of two, a worker that runs draw 0 of two, and the path of this route."""
    wire = Wire()
    worker = (await wire.call("POST", "/v1/workers", WORKER))["worker"]
    assert (await wire.call("POST", "/v1/sessions", SESSION))["session"] == 1
    await wire.call("POST", "/v1/sessions/1/draws", {"draws": [drawn(0), drawn(1)]})
    await wire.call("POST", f"/v1/workers/{worker}/draws", {"n": 1})
    await wire.call("POST", "/v1/groups", {"groups": [{"frame": encode_bytes(group_of(drawn(-1)))}] * 2})
    await wire.call("POST", "/v1/sessions/1/lease", {"groups": 1, "version": 0})
    wire.hang_up.set()  # whatever would wait from here on is over
    return wire, "/v1/" + pattern.replace("*", worker if pattern.startswith("workers") else "1")


@pytest.mark.parametrize(("method", "pattern"), ROUTES)
async def test_each_route_takes_the_body_that_the_next_test_changes(method: str, pattern: str):
    wire, path = await begun(pattern)
    await wire.call(method, path, BODIES[pattern] if method == "POST" else None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["", "key", "~r"]), inner, max_size=3)
        | st.builds(Draw, inner, inner, inner, inner, inner)
        | st.builds(Sampling, inner, inner, inner, inner)
        | st.builds(Failed, inner, inner, inner)
        | st.builds(partial(replace, group_of(drawn(0))), task=st.builds(Task, inner, inner), wire=inner)
        | st.builds(partial(replace, group_of(drawn(1))), draw=inner, failed=inner)
    ),
    max_leaves=8,
)
CALLS = st.sampled_from(ROUTES).flatmap(
    lambda route: st.tuples(
        st.just(route),
        st.dictionaries(st.sampled_from([*BODIES.get(route[1], {}), "other"]), VALUES, max_size=3),
        st.dictionaries(
            st.sampled_from([*ENTRY]), VALUES | VALUES.map(encode_bytes), max_size=2 * (route[1] == "groups")
        ),
    )
)


@settings(max_examples=250)
@given(CALLS)
def test_nothing_that_is_sent_makes_the_server_fail(call: tuple[tuple[str, str], dict[str, Any], dict[str, Any]]):
    (method, pattern), changes, entry = call

    async def once() -> None:
        wire, path = await begun(pattern)
        body = {**BODIES.get(pattern, {}), **({"groups": [{**ENTRY, **entry}]} if entry else {}), **changes}
        status, _, answer = await wire.raw(method, path, encode_bytes(body))
        assert status in (0, 200, 409, 422, 503), (status, answer)

    asyncio.run(once())


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_frame_are_refused(body: bytes):
    status, _, _ = asyncio.run(Wire().raw("POST", "/v1/groups", b"ATR1" + body))
    assert status == 422


def of_header(header: bytes) -> bytes:
    return PREFIX.pack(MAGIC, len(header), 0) + header


HOSTILE = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep mappings": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "lists without an end": b"[" * 900_000,
    "many digits": b'{"name":' + b"9" * 5000 + b"}",
    "more digits": b'{"name":' + b"9" * 1_000_000 + b"}",
    "empty lists": b'{"name":[' + b"[]," * 300_000 + b"[]]}",
    "more empty lists": b'{"name":[' + b"[]," * 2_000_000 + b"[]]}",
    "numbers": b'{"name":[' + b"1," * 300_000 + b"1]}",
    "entries of one mapping": b"{" + b",".join(b'"k%d":1' % at for at in range(120_000)) + b"}",
    "one key again and again": b"{" + b'"k":1,' * 90_000 + b'"k":1}',
    "texts": b'{"name":[' + b'"",' * 300_000 + b'""]}',
    "a long text": b'{"name":"' + b"lorem ipsum " * 600_000 + b'"}',
    "half of a surrogate pair": b'{"name":"' + b"x" * 300_000 + b'\\ud800"}',
    "half of one as a key": b'{"\\udfff":[' + b'"",' * 100_000 + b'""]}',
    "no UTF-8": b'{"name":"' + b"x" * 300_000 + b'\xff"}',
    "not a number": b'{"name":NaN,"tasks":Infinity}',
    "a record": b'{"~r":"Task","~f":[' + b"[]," * 100_000 + b"[]]}",
    "nothing": b"",
}
KEPT_S = 0.3  # of CPU time, so that what else a machine does is not counted; C's reader of JSON took up to 1.1


@pytest.mark.parametrize("what", HOSTILE)
async def test_no_header_of_a_frame_keeps_the_event_loop_or_is_a_fault_of_ours(what: str):
    longest, is_over = 0.0, False

    async def beat() -> None:
        nonlocal longest
        while not is_over:
            since = time.process_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.process_time() - since)

    wire, body = Wire(), of_header(HOSTILE[what])
    beating = asyncio.create_task(beat())
    status, _, answer = await wire.raw("POST", "/v1/workers", body)
    if len(body) > 1 << 19:  # as a group that came over a ring
        with pytest.raises(DataError):
            await wire.service.read_aside(body)
    is_over = True
    await beating
    assert status == 422 and json.loads(answer)["error"]["message"]
    assert longest < KEPT_S


def test_a_long_header_is_read_to_the_same_value_as_a_short_one():
    said = {
        "text": 'é 😀 " \\ , [ {',
        "numbers": [0, -1, 2**70, 1.5, -1e-9, True, None],
        "pair": ("a", b"bytes"),
        "~x": [[], {}],
    }
    for many in (1, 5_000):
        frame = encode_bytes({"said": [said] * many})
        assert read_frame(frame) == decode(frame) == {"said": [said] * many}
    assert has_long_header(frame)
