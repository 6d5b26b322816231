"""Hostile input to a real server: it refuses with reasons, stays up for everyone else, and grows by nothing."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import DataError
from atropos_trajectory_client.client import CONTENT_TYPE
from atropos_trajectory_client.shm.producer import Ack, RingProducer
from tests.e2e.attacked import Attacked, call_for
from tests.e2e.attacks import KINDS, paced
from tests.e2e.malformed import (
    GROUP,
    LENGTH,
    Sent,
    flipped,
    implying_frames,
    json_request,
    malformed,
    mutated_frame,
    native_bodies,
    native_request,
    old_bodies,
)
from tests.native_payloads import native_call, native_group, open_session, put_request, register_native
from tests.old_payloads import environment, old_group, trainer
from tests.raw_http import Connection, request
from tests.served import JSON, Server, atropos_serve, serving

BODIES = 2000
BODY_MB, IN_FLIGHT_MB, HUB_MB, REQUEST_S, CONNECTIONS = 4, 16, 8, 3, 150
GROWTH_BYTES = (IN_FLIGHT_MB + HUB_MB + 96) * 1e6  # in flight, in the hub, and what parsing and the allocator take
HEALTH_S = 10.0  # milliseconds, but two cores are shared with whoever sends
ANSWER_S = 30.0
SILENCE_S = 3 * REQUEST_S  # a connection on which nothing comes to an end is closed by then
EXAMPLES = 8  # of each route, right ones and wrong ones


class Watch:
    """A client who means well, all the time: /health on a new connection, ten times a second."""

    def __init__(self, server: Server) -> None:
        self.slowest_s, self.answers, self.failures = 0.0, 0, list[str]()
        self.rss_bytes = server.rss()
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            since = time.monotonic()
            try:
                end = Connection(self._server.port, ANSWER_S)
                status = end.call(request("GET", "/health")).status
                end.close()
                if status != 200:
                    self.failures.append(f"/health answered {status}")
            except OSError as error:
                self.failures.append(f"/health: {error!r}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - since)
            self.rss_bytes = max(self.rss_bytes, self._server.rss())
            self.answers += 1


class Place:
    """The server, and who is known to it."""

    def __init__(self, server: Server, output: Path) -> None:
        self.server, self.output = server, output
        self.port, self.url = server.port, f"http://127.0.0.1:{server.port}"
        self.env_id = 0
        self.renew()
        for body in islice(self.bodies(0), 200):  # what any server has made room for after a while
            self.send(body)
        self.renew()

    def renew(self) -> None:
        """No native session, nothing waits, an old trainer is registered, and one environment."""
        end = Connection(self.port, ANSWER_S)
        number = open_session(end, 1, GROUP)  # ends any other
        assert end.call(request("DELETE", f"/v1/sessions/{number}")).status == 200
        end.close()
        calls = (
            request("GET", "/reset_data"),
            request("POST", "/register", trainer(8), **JSON),
            request("GET", "/batch"),
            request("POST", "/register-env", environment("one", GROUP), **JSON),
        )
        for call in calls:
            answer = self.server.call(call)
            assert answer.status == 200, (answer.status, answer.body[:300])
        self.env_id = json.loads(answer.body)["env_id"]

    def bodies(self, seed: int) -> Iterator[Sent]:
        end = Connection(self.port)
        worker = register_native(end, "one")
        session = open_session(end, 2, GROUP)
        native_call(end, f"/v1/sessions/{session}/version", {"version": 0})
        found = list(islice(malformed(seed, old_bodies(self.env_id), native_bodies(worker, session)), 250))
        end.close()
        yield from found

    def send(self, sent: Sent) -> int:
        end = Connection(self.port, ANSWER_S)
        try:
            answer = end.call(sent.data)
        finally:
            end.close()
        right = answer.status < 500 or answer.status == 503
        assert right and not (sent.refused and answer.status < 400), (answer, sent.what, sent.path, sent.data[:2000])
        if answer.status >= 400:
            error_body = json.loads(answer.body)
            assert error_body["error"]["message"] if sent.path.startswith("/v1") else error_body["detail"], (
                answer,
                sent,
            )
        return answer.status


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hostile")
    limits = {
        "--body-mb": BODY_MB, "--in-flight-mb": IN_FLIGHT_MB, "--hub-mb": HUB_MB, "--request-s": REQUEST_S,
        "--connections": CONNECTIONS, "--hold-s": 1, "--dir": folder / "api",
    }  # fmt: skip
    arguments = [str(part) for pair in limits.items() for part in pair]
    with serving(atropos_serve(*arguments), folder / "server.out") as server:
        made = Place(server, folder / "server.out")
        rss_bytes = server.rss()
        yield made
        assert server.rss() < rss_bytes + GROWTH_BYTES, "after all of it"


@pytest.fixture
def watched(place: Place) -> Iterator[Place]:
    """What must hold whatever a test has sent."""
    place.renew()
    length_before, rss_bytes = len(place.output.read_text()), place.server.rss()
    with Watch(place.server) as watch:
        yield place
        time.sleep(0.2)
    text = place.output.read_text()[length_before:]
    assert "Traceback" not in text, text[-4000:]
    assert watch.failures == []
    assert watch.answers > 0
    grown = watch.rss_bytes - rss_bytes
    print(f"slowest /health {watch.slowest_s:.2f} s; at most {grown / 1e6:+.1f} MB")
    assert watch.slowest_s < HEALTH_S
    assert grown < GROWTH_BYTES
    still_works(place)


def still_works(place: Place) -> None:
    place.renew()
    whole = json.dumps(old_group(GROUP, LENGTH, 1, place.env_id)).encode()
    for _ in range(2):
        assert place.server.call(json_request("/scored_data", whole)).status == 200
    batch = json.loads(place.server.call(request("GET", "/batch")).body)["batch"]
    assert [len(group["tokens"]) for group in batch] == [GROUP, GROUP]


# -- schemathesis


@schemathesis.serializer(CONTENT_TYPE)
def frame_of(ctx: Any, value: Any) -> bytes:
    """What it makes of a schema of JSON, as a frame."""
    try:
        return value if isinstance(value, bytes) else encode_bytes(value)
    except (DataError, ValueError):  # its text is no text
        return json.dumps(value).encode()


def operations(place: Place) -> Iterator[Any]:
    document = json.loads(place.server.call(request("GET", "/openapi.json")).body)
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        yield result.ok()


def test_no_case_that_schemathesis_makes_of_the_document_is_a_server_error(watched: Place) -> None:
    seen: Counter[str] = Counter()
    for operation in operations(watched):
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue

            @settings(
                max_examples=EXAMPLES, deadline=ANSWER_S * 1000, database=None, derandomize=True,
                suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                answer = case.call(base_url=watched.url)
                seen[case.operation.label] += 1
                assert answer.status_code < 500 or answer.status_code == 503, (case.as_curl_command(), answer.text)
                case.validate_response(answer, checks=[conforms])

            with contextlib.suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
                call()  # where a schema allows everything, nothing is wrong
    labels = {operation.label for operation in operations(watched)}
    assert {"POST /scored_data", "POST /register", "GET /status-env", "GET /metrics"} <= labels
    assert seen.keys() == labels


def conforms(ctx: Any, response: Any, case: Any) -> None:
    """Each status is one that the document names; where it says JSON, it is."""
    from schemathesis.specs.openapi import checks

    if response.status_code != 503:
        checks.status_code_conformance(ctx, response, case)
    if "json" in response.headers.get("content-type", [""])[0]:
        json.loads(response.content)


# -- malformed bodies


def test_two_thousand_malformed_bodies_are_refused_with_reasons(watched: Place) -> None:
    statuses: Counter[int] = Counter()
    for seed in range(1, BODIES // 250 + 1):
        statuses.update(watched.send(sent) for sent in watched.bodies(seed))
        watched.renew()
    print(dict(statuses))
    assert statuses.total() == BODIES
    assert statuses[200] < BODIES // 3, "most of what is malformed is refused"
    assert statuses[503] < BODIES // 20
    assert {400, 422} <= statuses.keys()


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/v1/groups", "/v1/sessions"])
def test_a_gzip_bomb_is_refused_and_costs_no_memory(watched: Place, path: str) -> None:
    bomb = bytes_of_zeros(1 << 28)
    send = native_request if path.startswith("/v1") else json_request
    data = send(path, bomb, content_encoding="gzip")
    since = time.monotonic()
    for answer in at_once(watched, [data] * 8):
        assert answer.status == (413 if path.startswith("/v1") else 422), answer
        assert b"4 MB" in answer.body
    assert time.monotonic() - since < ANSWER_S


def test_a_bomb_of_many_gzip_members_or_of_deep_lists_is_refused(watched: Place) -> None:
    members = gzip.compress(bytes(1 << 20)) * 2000
    deep = gzip.compress(b"[" * 3_900_000)
    for body in (members, deep):
        answer = watched.server.call(json_request("/scored_data_list", body, content_encoding="gzip"))
        assert 400 <= answer.status < 500, answer.status


def test_a_body_over_the_limit_is_refused_with_and_without_a_declared_length(watched: Place) -> None:
    large = b" " * int((BODY_MB + 1) * 1e6)
    for path, status in (("/scored_data", 422), ("/v1/groups", 413)):
        declared = request("POST", path, large)
        assert watched.server.call(declared[: -len(large)]).status == status, "before any of it is sent"
        assert watched.server.call(chunked(path, [large[:100_000]] * 50)).status == status


@pytest.mark.parametrize(("path", "status"), [("/scored_data", 422), ("/v1/groups", 413)])
def test_a_client_that_sends_a_body_over_the_limit_reads_why(watched: Place, path: str, status: int) -> None:
    for _ in range(5):
        answer = watched.server.call(request("POST", path, bytes(int((BODY_MB + 1) * 1e6))))
        assert answer.status == status
        assert b"4 MB" in answer.body


@pytest.mark.parametrize(("path", "status"), [("/scored_data", 422), ("/v1/groups", 413)])
def test_a_client_that_pauses_in_a_body_over_the_limit_reads_why(watched: Place, path: str, status: int) -> None:
    data = request("POST", path, bytes(int((2 * BODY_MB - 0.1) * 1e6)))
    end = Connection(watched.port)
    for first in range(0, len(data), 1 << 20):
        end.send(data[first : first + (1 << 20)])
        time.sleep(0.05)
    answer = end.receive()
    assert answer.status == status
    assert b"4 MB" in answer.body


def test_a_body_of_very_many_small_things_holds_nobody_up(watched: Place) -> None:
    """Each within the limit. What they cost is paid by who sends them."""
    small = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}
    end = Connection(watched.port, ANSWER_S)
    worker = register_native(end, "one")
    frame = encode_bytes(native_group(old_group(1, 4, 1), "one"))
    puts = [{"key": str(number), "worker": worker, "frame": frame} for number in range(5000)]
    for data in (
        json_request("/scored_data_list", json.dumps([small] * 60_000).encode()),
        json_request("/scored_data_list", b"[" + b"[]," * 1_000_000 + b"[]]"),
        json_request("/scored_data_list", b"[" + b"1.5," * 900_000 + b"1]"),
        *(
            json_request("/scored_data", json.dumps(small | {name: [{}] * 100_000}).encode())
            for name in ("images", "overrides")
        ),
        json_request("/scored_data", json.dumps(small | {"messages": [[{}] * 100_000]}).encode()),
        *(
            json_request(path, json.dumps(made).encode())
            for names in [{"generation_params": {str(number): 0 for number in range(280_000)}}]
            for path, made in (("/scored_data", small | names), ("/scored_data_list", [small | names]))
        ),
        native_request("/v1/groups", encode_bytes({"groups": [[]] * 500_000})),
        native_request("/v1/groups", encode_bytes({"groups": puts, "wait_s": 0.0})),
    ):
        end = Connection(watched.port, 6 * ANSWER_S)
        assert end.call(data).status in (200, 422, 503)
        end.close()


def test_large_bodies_of_plain_json_cost_no_more_memory_than_is_allowed_and_give_it_back(watched: Place) -> None:
    row = "[" + "12," * 1000 + "12]"
    rows = int(BODY_MB * 1e6 * 0.9 / len(row))
    listed = "[" + ",".join([row] * rows) + "]"
    group = f'{{"tokens":{listed},"masks":{listed[: len(row) + 1]}],"scores":[1]}}'
    floats = f'{{"tokens":{listed.replace("12", "1.")[:-1]}]}}'.replace("1.,", "1.5,").replace("1.]", "1.5]")
    before = watched.server.rss()
    highest, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            highest[0] = max(highest[0], watched.server.rss())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    for body in (group, listed, floats):
        for answer in at_once(watched, [json_request("/scored_data", body.encode()[: int(BODY_MB * 1e6)])] * 8):
            assert answer.status in (400, 422, 503), answer
    stop.set()
    watching.join()
    assert highest[0] - before < 64e6
    until = time.monotonic() + ANSWER_S
    while watched.server.rss() - before > 24e6:
        assert time.monotonic() < until, "what it took has not come back"
        time.sleep(0.1)


def test_chunked_bodies_are_taken_and_broken_chunks_are_not(watched: Place) -> None:
    whole = json.dumps(old_group(GROUP, LENGTH, 1, watched.env_id)).encode()
    pieces = [whole[at : at + 100] for at in range(0, len(whole), 100)]
    assert watched.server.call(chunked("/scored_data", pieces)).status == 200
    for size in (b"xyz", b"-1", b"ffffffffffffffffff", b"1\x00"):
        broken = chunked("/scored_data", []).removesuffix(b"0\r\n\r\n") + size + b"\r\n{}\r\n0\r\n\r\n"
        assert refused_or_closed(watched, broken), size


def test_requests_that_are_no_http_are_refused_or_closed(watched: Place) -> None:
    head = b"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    for data in (
        b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5,
        head + b"content-length: -1\r\n\r\n", head + b"content-length: 1e3\r\n\r\n", head + b"content-length: 99999999999999999999\r\n\r\n",
        head + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", head + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        head + b"x: " + b"y" * 200_000 + b"\r\n\r\n", head + b"".join(b"h%d: v\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", head + b"host: evil.example\r\ncontent-length: 2\r\n\r\n{}",
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"GET /%00%ff HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"BREW /batch HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    ):  # fmt: skip
        assert refused_or_closed(watched, data), data[:200]


def test_a_small_frame_that_stands_for_a_huge_group_is_refused(watched: Place) -> None:
    end = Connection(watched.port, ANSWER_S)
    worker = register_native(end, "one")
    since = time.monotonic()
    for frame in implying_frames("one", 10_000_000):
        assert len(frame) < 2000
        answer = end.call(put_request("huge", worker, frame))
        assert answer.status == 422, answer
        many = {"groups": [{"key": str(n), "worker": worker, "frame": frame} for n in range(1000)]}
        assert end.call(native_request("/v1/groups", encode_bytes(many))).status == 422
    assert time.monotonic() - since < HEALTH_S
    end.close()


# -- attackers, a short while of each kind (benchmarks/soak_api_hostile.py: eight of each for 20 s)

SHORT = (
    "header bytes", "header lines", "address", "trailers", "chunk extensions", "small chunks", "whole heads", "pipelined",
    "resets", "no HTTP", "small lists", "numbers",
)  # fmt: skip


@pytest.mark.parametrize("kind", SHORT)
def test_others_are_served_beside_attackers_and_their_memory_comes_back(watched: Place, kind: str) -> None:
    before = watched.server.rss()

    def attack() -> None:
        for _ in paced(0.3):
            with contextlib.suppress(OSError):
                KINDS[kind](watched.port)

    attackers = [threading.Thread(target=attack, daemon=True) for _ in range(2)]
    for one in attackers:
        one.start()
    found = Attacked()
    call_for(watched.port, 0.5, found)
    for one in attackers:
        one.join(2 * ANSWER_S)
        assert not one.is_alive(), "the server goes on reading, or answers nothing"
    assert found.failures == []
    until = time.monotonic() + ANSWER_S
    while watched.server.rss() - before > 32e6:
        assert time.monotonic() < until, "what it took has not come back"
        time.sleep(0.1)


# -- slow clients


def test_slow_heads_and_slow_bodies_end_at_the_deadline(watched: Place) -> None:
    head = b"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5000\r\n\r\n"
    drips = [trickle(watched.port, start) for start in (b"POST /sco", head[:-2] + b"x: ", head, head + b"{") * 8]
    ended = [drip() for drip in drips]
    statuses = Counter(status for status, _ in ended)
    assert set(statuses) <= {0, 408}, statuses
    assert statuses[408] >= 16, "who had sent a head gets 408"
    assert max(lasted for _, lasted in ended) < SILENCE_S


def test_a_client_that_reads_nothing_holds_nobody_up(watched: Place) -> None:
    fill(watched, groups=60)
    ends = []
    for _ in range(20):
        end = socket.create_connection(("127.0.0.1", watched.port))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        end.sendall(request("GET", "/openapi.json") * 50 + request("GET", "/batch"))
        ends.append(end)
    time.sleep(1.0)
    for end in ends:
        end.close()


def test_half_closed_connections_get_their_answer_or_an_end(watched: Place) -> None:
    whole = json_request("/scored_data", json.dumps(old_group(GROUP, LENGTH, 1, watched.env_id)).encode())
    for data in (whole, whole[:-50], whole[:40], b""):
        with socket.create_connection(("127.0.0.1", watched.port), ANSWER_S) as end:
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)
            answer = end.recv(65536)
        assert not answer or answer[9:12] in (b"200", b"400"), answer


def test_resets_in_the_middle_of_requests_leave_nothing(watched: Place) -> None:
    whole = json_request("/scored_data", json.dumps(old_group(64, 512, 1, watched.env_id)).encode())
    chance = random.Random(5)
    for _ in range(100):
        end = socket.create_connection(("127.0.0.1", watched.port), ANSWER_S)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.sendall(whole[: chance.randrange(1, len(whole))])
        end.close()
    until = time.monotonic() + ANSWER_S
    while len(watched.server.process.net_connections("tcp")) > 20:
        assert time.monotonic() < until, "connections stay"
        time.sleep(0.1)


def test_many_idle_connections_do_not_stop_others(watched: Place) -> None:
    idle = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(CONNECTIONS - 20)]
    busy = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(10)]
    for end in busy:
        end.sendall(b"POST /scored_data HTTP/1.1\r\n")
    time.sleep(1.0)
    for end in (*idle, *busy):
        end.settimeout(SILENCE_S)
        assert end.recv(1000)[9:12] in (b"", b"408"), "closed by the server, with or without a word"
        end.close()


def test_bodies_in_flight_are_bounded_together(watched: Place) -> None:
    """Forty that stop before their end: 160 MB, were they all read."""
    size = int(BODY_MB * 1e6) - 1000
    head = f"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n".encode()
    ends = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(40)]
    for end in ends:
        end.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            end.sendall(head + bytes(size - 1))
    for end in ends:
        end.settimeout(2 * SILENCE_S)
        with contextlib.suppress(ConnectionError):
            assert end.recv(1000)[9:12] in (b"408", b"503", b"")
        end.close()


# -- the endpoint for shared memory


def test_what_is_no_greeting_is_no_ring(watched: Place) -> None:
    offer = offered(watched)
    right = {"layout": 1, "nonce": offer["nonce"], "slots": 4, "slot_bytes": 4096, "name": "n"}
    greetings = [b"", b"H", b"X" * 100, b"H" + b"[" * 15_000, b"H\xff\xfe", b"H" + b"9" * 9000]
    for wrong in (
        {"nonce": "\ud800"}, {"nonce": "other"}, {"slots": -1, "slot_bytes": -4096}, {"slots": 1 << 62}, {"slots": 0},
        {"slots": 10**1000}, {"slot_bytes": float("nan")}, {"slots": float("inf")}, {"layout": 2},
        {"layout": None}, {"name": "x" * 9000}, {},
    ):  # fmt: skip
        greetings.append(b"H" + json.dumps(right | wrong).encode())
    with Path("/dev/null").open("rb") as null:
        for greeting in greetings:
            for descriptors in ([], [null.fileno()], [null.fileno()] * 3):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
                    end.settimeout(ANSWER_S)
                    end.connect(offer["path"])
                    if greeting:
                        socket.send_fds(end, [greeting], descriptors)
                    else:
                        end.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(ConnectionError):
                        answer = end.recv(1 << 16)
                        assert answer[:1] in (b"R", b""), (greeting[:200], answer)


def test_what_is_no_group_is_refused_through_shared_memory_as_well(watched: Place) -> None:
    offer = offered(watched)
    chance = random.Random(3)
    frame = encode_bytes(native_group(old_group(GROUP, LENGTH, 1), "one"))
    ring = RingProducer.connect(Path(offer["path"]), offer["nonce"], slots=8, slot_bytes=1 << 16)
    acks: list[Ack] = []
    ring.on_ack = acks.append
    for number in range(300):
        broken = (flipped(frame, chance), mutated_frame(frame, chance), chance.randbytes(500), b"")[number % 4]
        ring.send([broken], key=str(number), meta=chance.randbytes(20), deadline_s=ANSWER_S)
    ring.flush(ANSWER_S)
    refused = [ack for ack in acks if ack.error is not None]
    assert len(acks) == 300
    assert len(refused) > 200
    assert all(isinstance(ack.error, DataError) for ack in refused), Counter(type(ack.error) for ack in refused)
    ring.send([frame], key="right")
    ring.flush(ANSWER_S)
    assert acks[-1].error is None
    ring.close()


def offered(place: Place) -> Any:
    answer = place.server.call(request("GET", "/v1"))
    return decode(answer.body)["same_host"]


# -- what is sent


@functools.cache
def bytes_of_zeros(size: int) -> bytes:
    """gzip of so many zeros."""
    squeeze = zlib.compressobj(9, wbits=31)
    piece = bytes(1 << 20)
    return b"".join(squeeze.compress(piece) for _ in range(size >> 20)) + squeeze.flush()


def chunked(path: str, pieces: list[bytes]) -> bytes:
    head = request("POST", path, **JSON, transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def at_once(place: Place, requests: list[bytes]) -> list[Any]:
    ends = [Connection(place.port, 3 * ANSWER_S) for _ in requests]
    for end, data in zip(ends, requests, strict=True):
        with contextlib.suppress(ConnectionError):  # refused before it was read to the end
            end.send(data)
    answers = [end.receive() for end in ends]
    for end in ends:
        end.close()
    return answers


def refused_or_closed(place: Place, data: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", place.port), SILENCE_S) as end:
        try:
            end.sendall(data)
            answer = end.recv(65536)
        except ConnectionError:
            return True
    return not answer or answer[9:10] == b"4"


def trickle(port: int, start: bytes) -> Callable[[], tuple[int, float]]:
    """A byte every half second until the server ends it. Its status, 0 for none, and after how long."""
    found: list[tuple[int, float]] = []

    def run() -> None:
        since, answer = time.monotonic(), b""
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.sendall(start)
            end.settimeout(0.5)
            while time.monotonic() < since + 2 * SILENCE_S:
                try:
                    end.send(b"a")
                    answer = end.recv(1000)
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
        found.append((int(answer[9:12] or 0), time.monotonic() - since))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> tuple[int, float]:
        thread.join(3 * SILENCE_S)
        return found[0]

    return ended


def fill(place: Place, groups: int) -> None:
    body = json_request("/scored_data", json.dumps(old_group(GROUP, 256, 1, place.env_id)).encode())
    end = Connection(place.port, ANSWER_S)
    for _ in range(groups):
        assert end.call(body).status == 200
    end.close()


def test_the_policy_of_a_frame_is_read_back_as_it_was_sent(watched: Place) -> None:
    """Between all that is refused, what is right is taken."""
    watched.renew()
    end = Connection(watched.port, ANSWER_S)
    worker = register_native(end, "one")
    session = open_session(end, 1, GROUP)
    (put,) = native_bodies(worker, session)["/v1/groups"]["groups"]
    ids = native_call(end, "/v1/groups", {"groups": [put | {"key": "another"}]})["ids"]
    found = native_call(end, f"/v1/sessions/{session}/lease", {"groups": 1, "version": 0, "wait_s": 1.0})
    assert [entry["id"] for entry in found["entries"]] == ids
    assert found["entries"][0]["frame"] == put["frame"]
    assert decode(found["entries"][0]["frame"]).draw.environment == "one"
    native_call(end, f"/v1/sessions/{session}/commit", {"ids": ids})
    assert end.call(request("DELETE", f"/v1/sessions/{session}")).status == 200
    end.close()
