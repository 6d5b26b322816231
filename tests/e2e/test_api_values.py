"""No value in any field of any call makes a server fail, and what it accepts can be trained."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.advantages import group_advantages
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.codec import decode, encode_bytes
from atropos_core.group_schema import check_group
from atropos_core.plugins.provider import RunContext
from atropos_core.training.batch import to_batch
from atropos_core.types import Episode
from atropos_trajectory_api.engine_http.server import open_engine_server
from atropos_trajectory_api.native.openapi import NATIVE
from tests.e2e.malformed import GROUP, json_request, native_bodies, native_request, old_bodies
from tests.e2e.wrong_values import PLAIN, Case, engine_bodies, of_frame, of_json
from tests.native_payloads import native_call, open_session, register_native
from tests.old_payloads import environment, trainer
from tests.raw_http import Connection, request
from tests.served import JSON, Server, atropos_serve, serving
from tests.wrong_groups import column, rollout, with_episode, with_rollout
from tests.wrong_groups import group as right_group

ANSWER_S = 30.0


class Sender:
    """Sends cases over kept-alive connections, and keeps what went wrong."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self._port = port
        self._end = Connection(port, ANSWER_S)

    def send(self, path: str, cases: Iterable[Case], *, old: bool = False) -> None:
        for case in cases:
            data = json_request(path, case.body) if old else native_request(path, case.body)
            self.one(f"{path}: {case.field} = {case.value}", data)

    def one(self, what: str, data: bytes) -> int:
        try:
            answer = self._end.call(data)
        except OSError as error:
            self.failures.append(f"{what}: {error!r}")
            self._end = Connection(self._port, ANSWER_S)
            return 0
        self.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != 503:
            self.failures.append(f"{what}: {answer.status} {answer.body[:200]!r}")
        if 400 <= answer.status < 500 and len(answer.body) > 3000:
            self.failures.append(f"{what}: a refusal of {len(answer.body)} bytes")
        if b"connection: close" in answer.head.lower():
            self._end = Connection(self._port, ANSWER_S)
        return answer.status


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("values")
    with serving(atropos_serve("--hold-s", "1", "--dir", str(folder / "api")), folder / "server.out") as found:
        yield found
    text = (folder / "server.out").read_text()
    assert "Traceback" not in text, text[-4000:]


def test_no_value_in_any_field_of_v1_is_an_error_of_the_servers_own(server: Server) -> None:
    end, sender = Connection(server.port, ANSWER_S), Sender(server.port)
    worker = register_native(end, "one")
    session = open_session(end, 2, GROUP)
    bodies = native_bodies(worker, session)
    path_of = f"/v1/sessions/{session}"
    frame = encode_bytes(right_group(environment="one"))
    bodies["/v1/groups"] = {"groups": [{"key": "k", "worker": worker, "frame": frame}], "wait_s": 0.0}
    bodies[f"/v1/workers/{worker}/draws"] |= {"wait_s": 0.0}
    bodies[f"/v1/workers/{worker}/failed"] = {"group": right_group()}
    bodies[f"{path_of}/lease"] |= {"wait_s": 0.0}
    bodies[f"{path_of}/version"] |= {"newest": 3}
    bodies[f"{path_of}/drop"] = {"ids": [1], "cause": "other_timeline"}
    opened = bodies.pop("/v1/sessions") | {"deadline_s": 3.0, "hub_id": "h"}
    for method, path, _, takes, _ in NATIVE:  # none is forgotten here that a client can send
        if method == "post" and path != "/v1/sessions":
            known = bodies[path.replace("{worker}", worker).replace("{session}", str(session))]
            assert set(re.sub(r": \[.*?\]", "", takes or "").split(", ")) == known.keys(), path
    for path, body in bodies.items():
        sender.send(path, of_frame(body))
    sender.send("/v1/sessions", of_frame(opened))  # last: each one that is taken ends the session before
    for method, path, _, takes, _ in NATIVE:
        if takes is None:
            for value, text in PLAIN.items():
                where = path.replace("{worker}", "none").replace("{session}", "99")
                sender.one(f"{path} with {value}", request(method.upper(), where, text.encode()))
        for value in ("-1", "9" * 400, "0x1", "nan", "%00", "%ed%a0%80", "a" * 3000, "1e3", "٣".encode().hex()):
            where = re.sub(r"\{.*?\}", value, path)
            if where != path:
                sender.one(f"{where[:60]}", request(method.upper(), where, encode_bytes({})))
    assert not sender.failures, "\n".join(sender.failures[:40])
    assert sender.statuses.total() > 3000, sender.statuses


def test_every_group_that_a_frame_got_in_can_be_trained(server: Server) -> None:
    """With any value in any place of it: what is answered 200 is packed, and nothing in the batch is beyond 32 bits."""
    end, sender = Connection(server.port, ANSWER_S), Sender(server.port)
    session = open_session(end, 1, GROUP)
    taken = 0
    as_columns = with_episode(
        right_group(environment="one"), metrics={"turns": 2.0}, messages=({"role": "user", "content": "?"},)
    )
    shared = right_group().episodes[0].rollouts[0].tokens  # twice in one group: then it is written as records
    as_records = with_rollout(right_group(environment="one", tokens=shared, advantages=column(0.5, base=0.0)))
    as_records = replace(as_records, episodes=(as_records.episodes[0], Episode((rollout(tokens=shared),), 0.0)))
    plain = right_group(environment="one", advantages=column(0.5, base=0.0))
    frames = [*of_frame(plain), *of_frame(as_columns), *of_frame(as_records)]
    assert len(frames) > 2500
    for number, case in enumerate(frames):
        put = {"groups": [{"key": f"{session}-{number}", "worker": "", "frame": case.body}], "wait_s": 0.0}
        status = sender.one(f"{case.field} = {case.value}", native_request("/v1/groups", encode_bytes(put)))
        taken += status == 200
    assert not sender.failures, "\n".join(sender.failures[:40])
    groups = []
    while entries := native_call(end, f"/v1/sessions/{session}/lease", _lease(groups))["entries"]:
        groups += entries
    assert 100 < len(groups) <= taken, "a draw that nobody offered is taken, and not kept"
    for entry in groups:
        group = decode(entry["frame"])
        check_group(group)
        batch = to_batch([group.with_advantages(group_advantages(group.rewards))], 1)
        for values in (batch.logprobs, batch.advantages, batch.temperature):
            assert np.isfinite(np.float32(len(values)) * np.square(values, dtype=np.float32)).all()
        json.dumps([group.task.id, *group.task.messages], ensure_ascii=False).encode()
    assert end.call(request("DELETE", f"/v1/sessions/{session}")).status == 200


def _lease(path_of: list[Any]) -> dict[str, Any]:
    return {"groups": 1, "version": 0, "wait_s": 0.0, "holding": [entry["id"] for entry in path_of]}


def test_no_value_in_any_field_of_the_old_protocol_is_an_error_of_the_servers_own(server: Server) -> None:
    end, sender = Connection(server.port, ANSWER_S), Sender(server.port)
    number = open_session(end, 1, GROUP)
    assert end.call(request("DELETE", f"/v1/sessions/{number}")).status == 200
    for call in (
        request("GET", "/reset_data"),
        request("POST", "/register", trainer(8), **JSON),
        request("GET", "/batch"),
        request("POST", "/register-env", environment("one", GROUP), **JSON),
    ):
        answer = end.call(call)
        assert answer.status == 200, answer
    bodies = old_bodies(json.loads(answer.body)["env_id"])
    bodies["/scored_data"] |= {"ref_logprobs": [[-1.0] * 16] * GROUP, "images": {"a": [1]}}
    bodies["/scored_data_list"] = bodies["/scored_data_list"][:1]
    for path in ("/scored_data", "/scored_data_list"):
        sender.send(path, of_json(bodies.pop(path)), old=True)
    taken = sender.statuses[200]
    assert taken > 50
    delivered = 0
    while found := json.loads(end.call(request("GET", "/batch")).body)["batch"]:  # in words of JSON
        delivered += len(found)
    assert delivered > taken // 2, "the rest makes no whole batch"
    for path, body in bodies.items():
        sender.send(path, of_json(body), old=True)
    for value, text in PLAIN.items():
        for path in ("/", "/wandb_info", "/info", "/status", "/latest_example", "/health", "/metrics"):
            sender.one(f"GET {path} with {value}", request("GET", path, text[:60_000].encode(), **JSON))
    for value in ("-1", "9" * 400, "nan", "%00", "%ed%a0%80", "1e3", "", "[1]"):
        sender.one(f"env_id={value}", request("GET", f"/status-env?env_id={value}"))
    assert not sender.failures, "\n".join(sender.failures[:40])
    assert sender.statuses.total() > 2000, sender.statuses


async def test_no_value_in_any_field_of_the_engines_endpoint_is_an_error_of_its_own() -> None:
    engine = ToyEngine(ToyEngineOptions(), RunContext(Path("run"), TOY_MODEL))
    endpoint = await open_engine_server(engine, "127.0.0.1:0", None, await engine.open(), takes="checkpoint")

    def send() -> Sender:
        sender = Sender(int(endpoint.url.rpartition(":")[2]))
        for path, body in engine_bodies().items():
            sender.send(path, of_frame(body))
        return sender

    try:
        sender = await asyncio.wait_for(asyncio.to_thread(send), 120)
    finally:
        await endpoint.close()
    assert not sender.failures, "\n".join(sender.failures[:40])
    assert sender.statuses.total() > 500, sender.statuses
