"""Both servers, that of the trajectory API and that of an engine, against clients that send what no request is."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.raw_http import Connection, request
from tests.served import Server, atropos_serve, serving

ANSWER_S = 20.0
CONNECTIONS = 100
DESCRIPTORS = 256
NOBODY = 65534
HEAD = b"POST /v1/groups HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
PING = request("GET", "/health")


@dataclass
class Endpoint:
    kind: str
    server: Server
    output: Path

    def works(self) -> bool:
        """For one who means well, on a new connection."""
        end = Connection(self.server.port, ANSWER_S)
        try:
            return end.call(PING).status in (200, 404)
        finally:
            end.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), ANSWER_S)


@pytest.fixture(scope="module", params=["server", "engine"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp(request.param)
    commands = {
        "server": atropos_serve("--dir", str(folder / "api"), "--connections", str(CONNECTIONS)),
        "engine": [sys.executable, "-m", "tests.e2e.engine_endpoint"],
    }
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, limits[1]))
    try:
        with serving(commands[request.param], folder / "output") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            yield Endpoint(request.param, server, folder / "output")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def refused_with(endpoint: Endpoint, data: bytes, more: bytes = b"") -> int:
    """The status, once the server has closed the connection; 0 where it closed without a word. `more` is sent until then."""
    until = time.monotonic() + ANSWER_S
    answer, left = b"", b""
    with endpoint.connect() as end:
        try:
            end.sendall(data)
            end.setblocking(False)
            while True:
                assert time.monotonic() < until, "the server goes on reading"
                try:
                    while piece := end.recv(1 << 16):
                        answer += piece
                    break
                except BlockingIOError:
                    pass
                try:
                    left = left or more
                    left = left[end.send(left) :]
                except BlockingIOError:
                    time.sleep(0.005)
                if not more:
                    time.sleep(0.005)
        except ConnectionError:
            pass
    return int(answer[9:12] or 0)


@pytest.mark.parametrize(
    ("start", "more", "status"),
    [
        (HEAD + b"x: ", b"y" * (1 << 16), 431),
        (HEAD, b"a: b\r\n" * 10_000, 431),
        (b"GET /", b"a" * (1 << 16), 414),
        (b"GET /info?", b"a=1&" * (1 << 14), 414),
        (b"G" * 10, b"G" * (1 << 16), 414),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 10_000, 431),
        (CHUNKED + b"1\r\n{\r\n0\r\na: ", b"b" * (1 << 16), 431),
        (CHUNKED + b"1;", b"e" * (1 << 16), 431),
        (CHUNKED, b"1;" + b"e" * 1000 + b"\r\n{\r\n", 431),
    ],
    ids=["header bytes", "header lines", "path", "query", "method", "trailers", "trailer", "extension", "extensions"],
)
def test_what_has_no_end_is_refused_early(endpoint: Endpoint, start: bytes, more: bytes, status: int) -> None:
    before = endpoint.server.rss()
    assert refused_with(endpoint, start, more) == status
    assert endpoint.server.rss() - before < 16e6
    assert endpoint.works()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n", 431),
        (HEAD + b"".join(b"h%d: v\r\n" % number for number in range(100_000)) + b"\r\n", 431),
        (HEAD + b"".join(b"h%d: v\r\n" % number for number in range(250)) + b"\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 414),
        (PING + PING.replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 100_000 + b"\r\n\r\n"), 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
    ],
    ids=["1 MB", "100,000 lines", "250 lines", "path", "second of two", "TLS", "version", "no version"],
)
def test_whole_heads_are_within_bounds(endpoint: Endpoint, data: bytes, status: int) -> None:
    with endpoint.connect() as end:
        try:
            end.sendall(data)
        except ConnectionError:
            pass
        answer = b"".join(iter(lambda: end.recv(1 << 16), b""))
    statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert int(statuses[-1]) == status, answer[:300]
    assert endpoint.works()


def test_heads_within_the_bounds_are_read(endpoint: Endpoint) -> None:
    many = PING.removesuffix(b"\r\n") + b"".join(b"h%d: v\r\n" % number for number in range(190)) + b"\r\n"
    long = PING.removesuffix(b"\r\n") + b"x: " + b"y" * 60_000 + b"\r\n\r\n"
    end = Connection(endpoint.server.port, ANSWER_S)
    right = end.call(PING).status
    assert right in (200, 404)
    for whole in (many, long, b"\r\n" + PING):
        assert end.call(whole).status == right
        for first in range(0, len(whole), 7000):
            end.send(whole[first : first + 7000])
            time.sleep(0.002)
        assert end.receive().status == right
    end.close()


def test_many_requests_at_once_are_answered_each_in_its_turn(endpoint: Endpoint) -> None:
    """One connection sends them, and another gets its own answers in between."""
    many = 3000
    one = Connection(endpoint.server.port, 6 * ANSWER_S)
    received: list[int] = []

    def receive() -> None:
        for _ in range(many):
            received.append(one.receive().status)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sending = threading.Thread(target=one.send, args=(PING * many,), daemon=True)
    sending.start()
    other = Connection(endpoint.server.port, ANSWER_S)
    between = 0
    while thread.is_alive() and between < 200:
        assert other.call(PING).status in (200, 404)
        between += len(received) < many
    thread.join(6 * ANSWER_S)
    assert len(received) == many
    assert set(received) <= {200, 404}
    assert between > 20, "others had a turn while these were answered"
    one.close()
    other.close()


def test_connections_that_say_nothing_make_way_for_one_that_does(endpoint: Endpoint) -> None:
    spoken = Connection(endpoint.server.port, ANSWER_S)
    assert spoken.call(PING).status in (200, 404)
    silent = [endpoint.connect() for _ in range(600)]
    try:
        for _ in range(5):
            assert endpoint.works()
        assert spoken.call(PING).status in (200, 404), "who has sent something is not the first to go"
        silent[0].settimeout(ANSWER_S)
        assert silent[0].recv(1) == b"", "the oldest went"
        half = [endpoint.connect() for _ in range(400)]
        for end in half:
            end.sendall(HEAD)
        assert endpoint.works()
        for end in half:
            end.close()
    finally:
        for end in silent:
            end.close()
        spoken.close()


def test_requests_that_never_arrive_make_way_for_one_that_does(endpoint: Endpoint) -> None:
    half = []
    for _ in range(600):
        end = endpoint.connect()
        try:
            end.sendall(HEAD + b"content-length: 5\r\n\r\n{")
        except ConnectionError:
            pass
        half.append(end)
    assert endpoint.works()
    for end in half:
        end.close()


def test_a_flood_writes_few_lines(endpoint: Endpoint) -> None:
    """Runs after the others."""
    for _ in range(200):
        refused_with(endpoint, b"\x00" * 10 + b"\r\n\r\n")
    assert endpoint.works()
    assert len(endpoint.output.read_text().splitlines()) < 60


# -- other users of the machine


def as_user(uid: int, work: Callable[[], bytes]) -> bytes:
    """What `work` gives in a process of that user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        given = file.read()
    os.waitpid(pid, 0)
    return given


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user: run this as root")
def test_another_user_of_the_machine_is_refused_where_there_is_no_token(endpoint: Endpoint) -> None:
    port = endpoint.server.port
    calls = {
        "server": [
            request("GET", "/info"),
            request("GET", "/reset_data"),
            request("POST", "/scored_data", b"{}"),
            request("POST", "/v1/groups", b"x"),
            request("GET", "/metrics"),
            request("GET", "/openapi.json"),
        ],
        "engine": [request("POST", "/v1/engine/open"), request("POST", "/v1/engine/samples", b"x")],
    }[endpoint.kind]

    def call() -> bytes:
        found = []
        for data in calls:
            end = Connection(port, ANSWER_S)
            answer = end.call(data)
            found.append([answer.status, answer.body.decode()])
            end.close()
        return json.dumps(found).encode()

    for status, text in json.loads(as_user(NOBODY, call)):
        assert status == 403
        assert "another user" in text and "--token-file" in text
    for status, _ in json.loads(as_user(0, call)):
        assert status != 403


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user: run this as root")
def test_who_has_gone_before_it_was_looked_at_is_not_taken_for_root(endpoint: Endpoint) -> None:
    """Of a socket that nobody holds any more, the kernel says that it is root's."""
    if endpoint.kind != "server":
        pytest.skip("about the trajectory API: nothing of an engine's can be counted from here")
    port = endpoint.server.port
    body = json.dumps({"desired_name": "theirs", "max_token_length": 8, "weight": 1.0, "group_size": 4}).encode()

    def send_and_go() -> bytes:
        for _ in range(50):
            end = socket.create_connection(("127.0.0.1", port))
            end.sendall(request("POST", "/register-env", body))
            end.close()
        return b"sent"

    assert as_user(NOBODY, send_and_go) == b"sent"
    counted = endpoint.server.metrics
    until = time.monotonic() + ANSWER_S
    while counted().get('atropos_refused_connections_total{cause="user"}', 0) < 50:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert b"theirs" not in endpoint.server.call(request("GET", "/v1/status", accept="application/json")).body


def test_refused_connections_are_counted_by_cause(endpoint: Endpoint) -> None:
    if endpoint.kind != "server":
        pytest.skip("an engine's endpoint has no /metrics")
    counted = endpoint.server.metrics()
    for cause in ("head_bytes", "head_lines", "url", "chunks", "malformed", "made_way_silent", "made_way_arriving"):
        assert counted[f'atropos_refused_connections_total{{cause="{cause}"}}'] > 0, counted
