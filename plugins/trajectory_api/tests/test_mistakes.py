"""Requests that a client sends only by mistake are refused with what to do, or reported once if unmodified clients send them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_core.codec import encode_bytes
from atropos_core.errors import DataError
from atropos_trajectory_api.legacy_groups import mistakes
from atropos_trajectory_client.client import Api, TrainerSession
from plugins.trajectory_api.tests.running import ENVIRONMENT, REGISTER, Running, group, running
from plugins.trajectory_api.tests.test_client import SPEC


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(mistakes, "_WARNED", set())
    with running(tmp_path) as made:
        yield made


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def without(name: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in group().items() if key != name} | more


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "score": (without("scores", score=[1.0] * 4), "'score' is not known.* Did you mean 'scores'"),
    "mask": (without("masks", mask=group()["masks"]), "'mask' is not known.* Did you mean 'masks'"),
    "advantage": (group(advantage=[[0.0] * 3] * 4), "'advantage' is not known.* Did you mean 'advantages'"),
    "Env-ID": (group(**{"Env-ID": 0}), "'Env-ID' is not known.* Did you mean 'env_id'"),
    "of an override": (
        group(overrides=[{}, {"set_advantages_to_zero": True}]),
        r"'set_advantages_to_zero' is not known in overrides\[1\].* Did you mean 'set_advantage_to_zero'",
    ),
    "of the group's overrides": (
        group(group_overrides={"temprature": 0.5}),
        "'temprature' is not known in group_overrides.* Did you mean 'temperature'",
    ),
    "all masked": (group(masks=[[-100] * 3] * 4), "nothing in this group can be trained: .* -100.*its own id"),
    "flags": (group(masks=[[0, 1, 1]] * 4), r"masks\[0\]\[0\] is 0, but tokens\[0\]\[0\] is 1: .*not a flag.*its own id"),
    "one that contradicts": (
        group(masks=[[-100, 2, 3], [-100, 3, 4], [-100, 4, 9], [-100, 5, 6]]),
        r"masks\[2\]\[2\] is 9, but tokens\[2\]\[2\] is 5",
    ),
    "an env_id that was not given": (group(env_id=3), "env_id 3 is not known: none has registered.*register-env"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_in_a_group_is_refused_with_what_to_do(server: Running, what: str) -> None:
    body, told = REFUSED[what]
    for path, sent in (("/scored_data", body), ("/scored_data_list", [group(), body])):
        answer = server.post(path, sent)
        assert answer.status_code == 422, answer.text
        assert re.search(told, answer.json()["detail"][0]["msg"]), answer.text
    assert server.client.get("/status").json()["queue_size"] == 0


def test_an_env_id_that_no_registration_got_is_refused(server: Running) -> None:
    server.begin()
    assert server.post("/scored_data", group(env_id=0)).status_code == 200
    answer = server.post("/scored_data", group(env_id=1))
    assert answer.status_code == 422 and "env_id 1 is not known: 1 have registered, from 0 to 0." in answer.text


def test_a_sequence_or_a_piece_may_be_all_masked(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """As environments send one that reached its limit."""
    server.begin()
    some = group(env_id=0)
    some["masks"][2] = [-100] * 3
    assert server.post("/scored_data", some).json() == {"status": "received"}
    pieces = [server.post("/scored_data", group(1, tag=tag, env_id=0, masks=[[-100] * 3])) for tag in range(8)]
    assert [one.json()["buffer_size"] for one in pieces] == [1, 2, 3, 0] * 2
    assert said(capsys).count("'maths_0' sent pieces of a group in which every token is masked") == 1


def test_flags_as_masks_reach_a_trainer_of_the_old_protocol_with_one_warning(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """As atroposlib's published tests send them."""
    server.begin()
    for tag in range(2):
        assert server.post("/scored_data", group(tag=tag, env_id=0, masks=[[1, 1, 1]] * 4)).status_code == 200
        assert server.client.get("/batch").json()["batch"][0]["masks"] == [[1, 1, 1]] * 4
    assert said(capsys).count("'maths_0' sends masks that contradict its tokens: masks[0][1] is 1, but") == 1
    answer = server.post("/scored_data", group(env_id=0, masks=[[-100] * 3] * 4))
    assert answer.status_code == 422, "from these no trainer learns"


async def test_flags_as_masks_are_refused_if_the_trainer_is_ours(server: Running) -> None:
    api = Api(server.url)
    session = await TrainerSession.open(api, SPEC, deadline_s=10)
    assert "not a flag" in server.post("/scored_data", group(masks=[[1, 1, 1]] * 4)).text
    await session.close()
    assert "not a flag" in server.post("/scored_data", group(masks=[[1, 1, 1]] * 4)).text, "it may come back"
    await api.close()


def test_fields_of_an_environments_own_are_ignored_with_one_warning_each(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.begin()
    own = {"ground_truths": ["4"] * 4, "prompt_tokens": [1], "score": [1.0] * 4}  # `score` next to `scores`
    for tag in range(2):
        assert server.post("/scored_data", group(tag=tag, env_id=0, **own)).json() == {"status": "received"}
    own = {"overrides": [{"skip_teacher_top_k": True}], "group_overrides": {"teacher_top_k": 7, "group_size": 4}}
    assert server.post("/scored_data", group(env_id=0, **own)).json() == {"status": "received"}
    warned = said(capsys)
    assert warned.count("warning") == 1
    assert "environment 'maths_0' sends 'ground_truths', 'prompt_tokens', 'score', which the protocol" in warned


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/register-env", ENVIRONMENT | {"min_batch_alocation": 0.5}, "min_batch_allocation"),
        ("/register", {**REGISTER, "batchsize": 4} | {"batch_size": 4}, None),
        ("/register", {key: value for key, value in REGISTER.items() if key != "batch_size"} | {"batchsize": 4}, "batch_size"),
        ("/status-env", {"envid": 0}, "env_id"),
    ],
)  # fmt: skip
def test_a_misspelt_field_of_a_registration_is_refused(
    server: Running, path: str, body: dict[str, Any], meant: str | None
) -> None:
    answer = server.client.request("GET" if "status" in path else "POST", path, json=body)
    assert answer.status_code == (422 if meant else 200), answer.text
    assert not meant or f"Did you mean '{meant}'?" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("workers", {"name": "one", "environment": "words", "wieght": 2.0}, "weight"),
        ("sessions", {"holder": "run", "group_size": 4, "max_stalness": 3}, "max_staleness"),
        ("groups", {"group": []}, "groups"),
    ],
)
def test_a_misspelt_field_of_the_native_protocol_is_refused(
    server: Running, path: str, body: dict[str, Any], meant: str
) -> None:
    answer = server.client.post(f"/v1/{path}", content=encode_bytes(body))
    assert answer.status_code == 422
    assert answer.json()["error"]["kind"] == DataError.__name__
    assert answer.json()["error"]["remedy"] == f"Did you mean '{meant}'?"


async def test_fields_of_newer_clients_are_let_through(server: Running) -> None:
    answer = server.client.post("/v1/workers", content=encode_bytes({"name": "a", "environment": "words", "later": 1}))
    assert answer.status_code == 200


WORKER: dict[str, Any] = {"name": "one", "environment": "words"}
SESSION: dict[str, Any] = {"holder": "run", "group_size": 4}
CALLS: dict[str, tuple[str, str, Any, str]] = {
    "JSON for a frame": ("POST", "groups", b'{"groups": []}', "A body is a frame of atropos_core.codec, not JSON"),
    "a list for a mapping": ("POST", "groups", [1], "/openapi.json describes each call"),
    "a field that is missing": ("POST", "groups", {}, "/openapi.json describes each call"),
    "a text for a list": ("POST", "groups", {"groups": "a"}, "Send list or tuple"),
    "a text that is too long": ("POST", "sessions", SESSION | {"holder": "a" * 5000}, "Send a shorter text"),
    "a count of 0": ("POST", "sessions", SESSION | {"group_size": 0}, "Send a whole number from 1 to"),
    "a number below its bound": ("POST", "sessions", SESSION | {"deadline_s": -1.0}, "Send a number above 0 and up to"),
    "a session of no number": ("POST", "sessions/one/renew", {}, "POST /v1/sessions answers it"),
    "a session that is over": ("POST", "sessions/7/renew", {}, "opens a new session"),
    "another method": ("DELETE", "groups", {}, "Use POST"),
    "another route": ("POST", "chat/completions", {}, "Is the client of the same version"),
    "a worker's name": ("POST", "workers", WORKER | {"name": 7}, "Send text"),
    "a worker's tasks": ("POST", "workers", WORKER | {"tasks": "many"}, "Send a whole number"),
    "tasks below 0": ("POST", "workers", WORKER | {"tasks": -1}, "Send a whole number from 0 on"),
    "a worker's long name": ("POST", "workers", WORKER | {"name": "a" * 5000}, "Send a shorter text"),
    "ids that are text": ("POST", "workers", WORKER | {"playing": ["a"]}, "Send whole numbers of 64 bits"),
    "an engine's address": ("POST", "engines", {"url": "here", "session": 0}, "Send http://HOST:PORT"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_of_the_native_protocol_that_is_refused_says_what_to_do(server: Running, what: str) -> None:
    method, path, body, remedy = CALLS[what]
    content = body if isinstance(body, bytes) else encode_bytes(body)
    answer = server.client.request(method, f"/v1/{path}", content=content)
    assert answer.status_code >= 400
    assert remedy in (answer.json()["error"]["remedy"] or ""), answer.text
