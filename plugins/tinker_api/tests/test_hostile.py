"""Requests that a client would never send: the server answers with an error or closes the connection, and continues to serve."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from atropos_tinker_api.wire.protobuf import content, integer, varint
from plugins.tinker_api.tests.requests import PLAIN, PROTOBUF, Client, datum, forward_backward
from tests.raw_http import Connection, request
from tests.tinker.server import TinkerServer

API = "/api/v1/"
GROWTH = 300e6  # bytes that hostile requests may cost the server in all


@pytest.fixture(autouse=True)
def serves_on(server: TinkerServer) -> Iterator[None]:
    """After each test the server trains, and has not grown much."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    yield
    client = Client(server)
    client.done(client.send(1))
    assert "error" not in client.done(client.step(2))
    assert process.memory_info().rss < before + GROWTH


def refused(server: TinkerServer, path: str, body: object, statuses: tuple[int, ...] = (400, 404)) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = server.call("POST", path, data)
    assert status in statuses, (path, data[:100], status, answer)
    assert set(answer) == {"error", "category"}, answer
    return str(answer["error"])


PATHS = [
    "create_session", "session_heartbeat", "create_model", "get_info", "load_weights", "forward_backward", "optim_step",
    "save_weights", "save_weights_for_sampler", "save_weights_external", "create_sampling_session", "asample",
    "retrieve_future", "weights_info",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_nothing_are_refused(server: TinkerServer, path: str) -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x00\xff\xfe",
        b'{"a":' * 500,
        b'"text"',
        b"1e999",
        b'{"session_id": 5}',
        b"NaN",
    ):
        if path in ("create_session", "cancel_future") and body == b"":
            continue
        status, answer = server.call("POST", path, body)
        assert status in (200, 400, 404), (path, body[:20], status, answer)
        assert status != 200 or path == "create_session"


def test_wrong_kinds_of_values_are_named(server: TinkerServer) -> None:
    client = Client(server)
    for wrong in (None, True, 1.5, -1, 1 << 80, "x" * 10_000, [], {}, [[]]):
        body = {
            "session_id": client.session,
            "model_seq_id": wrong,
            "base_model": server.model,
            "lora_config": {"rank": 2},
        }
        assert "model_seq_id" in refused(server, "create_model", body)
        body = {
            "session_id": client.session,
            "model_seq_id": 9,
            "base_model": server.model,
            "lora_config": {"rank": wrong},
        }
        if wrong is not None:
            assert "rank" in refused(server, "create_model", body)
        refused(server, "session_heartbeat", {"session_id": wrong})
        refused(server, "retrieve_future", {"request_id": wrong})
    assert "not served here" in refused(
        server, "create_model", {**body, "lora_config": {"rank": 2}, "base_model": "../../etc"}
    )


def test_unknown_ids_are_not_found(server: TinkerServer) -> None:
    for id in (
        "0" * 16 + ":train:0:1",
        "x",
        "::",
        ":sample:",
        "0" * 16 + ":train:0:" + "9" * 50,
        "a:train:0:-1",
        "\x00",
        "../../x:1",
    ):
        status, answer = server.call("POST", "retrieve_future", {"request_id": id})
        assert status == 404 and "error" in answer
    status, _ = server.call("POST", "retrieve_future", {"request_id": "0" * 16 + ":sample:0:0"})
    assert status == 410  # the client samples again
    for path in ("get_info", "optim_step"):
        refused(server, path, {"model_id": "nobody", "seq_id": 1, "adam_params": {}}, (404,))
    for path in (
        "sessions/x",
        "samplers/x",
        "training_runs/x",
        "training_runs/x/checkpoints",
        "nothing",
        "samplers/%2e%2e%2fx",
    ):
        assert server.call("GET", path)[0] == 404
    assert server.call("PUT", "create_session", b"{}")[0] == 405


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "x" * 200, "a\x00b", "a b", "-x", ".hidden", "ü"]
)
def test_names_of_checkpoints_stay_in_their_folder(server: TinkerServer, name: str) -> None:
    client = Client(server)
    body = {"model_id": client.model, "seq_id": 1, "path": name, "overwrite": True}
    answer = client.done(server.call("POST", "save_weights", body))
    assert "error" in answer and answer["category"] == "user"
    path = f"tinker://{client.model}/weights/{name}"
    refused(server, "weights_info", {"tinker_path": path})
    refused(
        server,
        "create_sampling_session",
        {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path},
    )


@pytest.mark.parametrize(
    "path", ["tinker://../../etc/weights/x", "tinker://a/b", "file:///etc/passwd", "tinker://" + "x" * 3000, ""]
)
def test_paths_that_are_none_of_ours_are_refused(server: TinkerServer, path: str) -> None:
    refused(server, "weights_info", {"tinker_path": path})


def test_damaged_protobuf_never_stops_the_model(server: TinkerServer) -> None:
    """Bodies that name their model and their turn are accepted, and fail in it. Others are refused."""
    client, dice = Client(server), random.Random(1)
    whole = forward_backward(client.model, 0, PLAIN)[len(content(1, client.model)) + 2 :]
    seq = 1
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        body = content(1, client.model) + integer(2, seq) + bytes(damaged[: dice.randrange(len(damaged) + 1)])
        status, answer = server.call("POST", "forward_backward", body, **PROTOBUF)
        assert status in (200, 400, 404), answer
        if status == 200 and answer["request_id"] == f"{client.model}:{seq}":
            client.done((status, answer))
            seq += 1
    assert "error" in client.done(client.step(seq)) or seq
    client.done(client.send(seq + 1))
    client.done(client.step(seq + 2))
    assert client.forward(seq + 3)


HUGE = 1 << 62


@pytest.mark.parametrize(
    "data",
    [
        datum([], target_tokens=[]),
        datum([5], target_tokens=[6, 7]),
        datum([5], target_tokens=[[]]),
        datum([-1], target_tokens=[1]),
        datum([10**6], target_tokens=[1]),
        datum([5], target_tokens=[HUGE]),
        datum([5], target_tokens=[-5]),
        datum([5], target_tokens=[6], weights=[float("nan")]),
        datum([5], target_tokens=[6], weights=[float("inf")]),
        datum([5], target_tokens=[6], weights=[3e38]),
        datum([5], target_tokens=[6], weights=[1.0, 2.0]),
        datum([5], target_tokens=[0.5]),
        datum([5], weights=[1.0]),
        datum([5] * 100_000, target_tokens=[6] * 100_000),
        content(
            2, content(1, "target_tokens") + content(2, content(1, b"") + integer(3, 2) + content(4, varint(HUGE) * 2))
        ),
        content(1, content(2, content(1, b"png"))),
        content(1, content(3, content(1, b"audio"))),
    ],
)
def test_data_that_cannot_be_trained_fails_by_name(server: TinkerServer, data: bytes) -> None:
    client = Client(server)
    answer = client.done(client.send(1, data))
    assert "sequence 0" in answer["error"] and answer["category"] == "user"
    client.done(client.send(2))
    assert "error" in client.done(client.step(3))


@pytest.mark.parametrize(
    "adam",
    [{"learning_rate": -1}, {"beta1": 1.0}, {"beta2": 2}, {"eps": -1}, {"learning_rate": 1e308}, {"learning_rate": "x"},
     {"unknown": 1}, {"weight_decay": None, "grad_clip_norm": -3}],
)  # fmt: skip
def test_steps_with_impossible_numbers_fail_and_change_nothing(server: TinkerServer, adam: dict[str, object]) -> None:
    client = Client(server)
    before = client.forward(1)
    client.done(client.send(2))
    assert "adam_params" in client.done(client.step(3, **adam))["error"]
    assert client.forward(4) == before


@pytest.mark.parametrize(
    "change",
    [{"num_samples": 10**9}, {"num_samples": 0}, {"num_samples": -1}, {"seq_id": -1}, {"seq_id": 1 << 90}, {"prompt": {}},
     {"prompt": {"chunks": []}}, {"prompt": {"chunks": [{"type": "image"}]}}, {"prompt": {"chunks": [{"tokens": [1.5]}]}},
     {"prompt": {"chunks": [{"tokens": [True]}]}}, {"prompt": {"chunks": [{"tokens": [-1]}]}},
     {"prompt": {"chunks": [{"tokens": [10**30]}]}}, {"sampling_params": {"max_tokens": 0}},
     {"sampling_params": {"max_tokens": 10**12}}, {"sampling_params": {"max_tokens": 2, "temperature": -1}},
     {"sampling_params": {"max_tokens": 2, "top_p": 0}}, {"sampling_params": {"max_tokens": 2, "top_k": -5}},
     {"sampling_params": {"max_tokens": 2, "stop": 5}}, {"sampling_params": {"max_tokens": 2, "stop": [""]}},
     {"sampling_params": {"max_tokens": 2, "stop": [-1]}}, {"sampling_params": {"max_tokens": 2, "stop": ["x"] * 1000}},
     {"sampling_params": {"max_tokens": 2, "stop": [None]}}, {"topk_prompt_logprobs": 10**9},
     {"prompt_logprobs_last_n": 0}, {"record_stability_info": True}, {"target_prompt_logprobs": {"data": [1]}}],
)  # fmt: skip
def test_samples_that_cannot_be_fail_by_name(server: TinkerServer, change: dict[str, object]) -> None:
    client = Client(server)
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": server.model}
    sampler = server.call("POST", "create_sampling_session", body)[1]["sampling_session_id"]
    plain = {
        "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 2},
    }  # fmt: skip
    status, answer = server.call("POST", "asample", {**plain, **change})
    if status == 200:
        status, answer = client.result(answer["request_id"])
    assert (status in (200, 400)) and answer["category"] == "user", answer
    status, answer = server.call(
        "POST", "asample", {**plain, "seq_id": 7, "sampling_params": {"max_tokens": 2, "seed": 10**30 % 2**62}}
    )
    assert status == 200 and isinstance(client.result(answer["request_id"])[1], bytes)


def test_a_body_beyond_the_bound_is_refused(server: TinkerServer) -> None:
    status, answer = server.call("POST", "forward_backward", b"x" * 9_000_000)
    assert status == 413 and "--body-mb" in answer["error"]
    status, answer = server.call("POST", "asample", b'{"a": "' + b"x" * 5_000_000 + b'"}')
    assert status == 413


def test_heads_and_bodies_that_never_end_take_nothing_from_others(server: TinkerServer) -> None:
    ends = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        for index, end in enumerate(ends):
            end.sendall(
                b"POST /api/v1/asample HTTP/1.1\r\n"
                if index % 2
                else request("POST", f"{API}asample", b"x" * 100)[:-50]
            )
        began = time.monotonic()
        assert server.call("GET", "healthz")[0] == 200
        assert time.monotonic() - began < 20
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    "data",
    [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n", b"POST /api/v1/telemetry HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
     b"POST /api/v1/telemetry HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
     b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
     b"POST /api/v1/telemetry HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n"],
)  # fmt: skip
def test_what_is_not_http_is_answered_or_closed(server: TinkerServer, data: bytes) -> None:
    end = socket.create_connection(("127.0.0.1", server.port), 30)
    with end:
        end.settimeout(30)
        try:
            end.sendall(data)
            answer = end.recv(200)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))


def test_a_page_of_a_browser_and_another_name_are_refused(server: TinkerServer) -> None:
    assert server.call("POST", "create_session", {}, origin="http://evil.example")[0] == 403
    assert server.call("POST", "create_session", {}, host="evil.example")[0] == 403


def test_a_flood_of_requests_that_wait_is_bounded(server: TinkerServer) -> None:
    """Requests whose first one never comes: they wait, and the others are served."""
    client = Client(server)
    connection = Connection(server.port)
    for seq in range(2, 400):
        connection.send(request("POST", f"{API}forward_backward", forward_backward(client.model, seq, PLAIN)))
    statuses = {connection.receive().status for _ in range(2, 400)}
    assert statuses == {200}
    far = forward_backward(client.model, 3_000_000, PLAIN)
    assert connection.call(request("POST", f"{API}forward_backward", far)).status == 400
    connection.close()
