"""Requests that arrive whole are answered without the layers, with the same result."""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.trajectory_api.tests.running import Running, group, running
from tests.raw_http import Connection, request
from tests.waiting import wait_until

POST_GROUP = (b"POST", b"/scored_data")
TOKEN = b"open sesame"
OF_TOKEN = {"authorization": f"Bearer {TOKEN.decode()}"}


class Recorded:
    """The answer at once to each request that may have one: a status, or None if it has none."""

    def __init__(self, server: Running) -> None:
        self.said: list[int | None] = []
        self._of = server.app.at_once[POST_GROUP]
        server.app.at_once[POST_GROUP] = self._answer  # type: ignore[index]

    def _answer(self, scope: Any, body: bytes) -> Any:
        given = self._of(scope, body)
        self.said.append(given.status if given else None)
        return given


def body(tag: int = 0, **more: Any) -> bytes:
    return json.dumps(group(tag=tag, env_id=0, **more)).encode()


def by_way_of_all_layers(port: int, sent: bytes) -> tuple[int, bytes, bytes]:
    """The same request, whose body comes a moment after its head."""
    end = Connection(port, 60)
    head, _, rest = sent.partition(b"\r\n\r\n")
    end.send(head + b"\r\n\r\n" + rest[:1])
    end.until_read()
    end.send(rest[1:])
    answer = end.receive()
    end.close()
    return answer


def whole(port: int, sent: bytes) -> tuple[int, bytes, bytes]:
    end = Connection(port, 60)
    answer = end.call(sent)
    end.close()
    return answer


def post(content: bytes, **headers: str) -> bytes:
    return request("POST", "/scored_data", content, **headers)


GOOD = {
    "a group": post(body()),
    "of nobody": post(json.dumps(group()).encode()),
    "with gzip": post(gzip.compress(body()), content_encoding="gzip"),
    "a page of this server": post(body(), sec_fetch_site="same-origin"),
    "who takes gzip": post(body(), accept_encoding="gzip"),
}
OTHER = {
    "no JSON": post(b"{ "),
    "no body": post(b""),
    "a list": post(b"[]"),
    "a wrong value": post(body(scores=[1.0, 2.0, 3.0, "four"])),
    "an id below 0": post(json.dumps(group(env_id=-1)).encode()),
    "a piece": post(json.dumps(group(2, env_id=0)).encode()),
    "no gzip": post(body(), content_encoding="gzip"),
    "half of gzip": post(gzip.compress(body())[:-9], content_encoding="gzip"),
    "more behind gzip": post(gzip.compress(body()) + b"x", content_encoding="gzip"),
    "another encoding": post(body(), content_encoding="br"),
    "more than is free": post(body() + b" " * (1 << 16)),
    "more after gzip than may be": post(gzip.compress(b" " * 3_000_000), content_encoding="gzip"),
    "another origin": post(body(), origin="http://elsewhere"),
    "another site": post(body(), sec_fetch_site="cross-site"),
    "another host": request("POST", "/scored_data", body()).replace(b"host: 127.0.0.1", b"host: elsewhere"),
    "which is to be closed": post(body(), connection="close"),
    "an older HTTP": post(body()).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "another method": request("PUT", "/scored_data", body()),
    "with a query": request("POST", "/scored_data?a=1", body()),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("api"), journal=False, body_mb=2.0) as started:
        started.begin()
        yield started


def same(answer: tuple[int, bytes, bytes]) -> tuple[int, bytes, bytes]:
    """Without what counts."""
    status, head, said = answer
    return status, re.sub(rb"(content-length|date): .*", b"", head), re.sub(rb'"buffer_size":\d+', b"", said)


@pytest.mark.parametrize("which", [*GOOD, *OTHER])
def test_the_answer_is_the_same_however_the_request_arrives(server: Running, which: str):
    sent = (GOOD | OTHER)[which]
    recorded = Recorded(server)
    at_once, by_layers = whole(server.port, sent), by_way_of_all_layers(server.port, sent)
    assert same(at_once) == same(by_layers)
    assert recorded.said == [200] if which in GOOD else set(recorded.said) <= {None}


def test_a_group_is_stored_and_counted_as_by_way_of_all_layers(server: Running):
    def known() -> dict[str, Any]:
        server.settle()
        said = server.service.status()
        counts = {
            kind: {
                name: {what: n for what, n in one.items() if what not in ("seconds", "per_second", "sequences_per_second")
                       and not what.startswith("p")}
                for name, one in said["observed"][kind].items() if "status" not in name
            }
            for kind in ("routes", "workers", "environments")
        }  # fmt: skip
        return {**counts, "held": said["hub"]["held_bytes"], "groups": said["hub"]["groups"]}

    def difference(after: Any, before: Any) -> Any:
        if isinstance(after, dict):
            return {
                name: difference(value, before.get(name, 0 if isinstance(value, int) else {}))
                for name, value in after.items()
            }
        return after - before

    recorded, states = Recorded(server), [known()]
    for way in (whole, by_way_of_all_layers):
        assert way(server.port, post(body(tag=7)))[0] == 200
        states.append(known())
    assert recorded.said == [200]
    assert difference(states[1], states[0]) == difference(states[2], states[1])
    assert states[1]["groups"] - states[0]["groups"] == 1


def test_a_token_is_wanted_however_the_request_arrives(tmp_path: Path):
    with running(tmp_path, token=TOKEN, journal=False) as server:
        recorded = Recorded(server)
        basic = base64.b64encode(b"any:" + TOKEN).decode()
        for headers, status in (({}, 401), ({"authorization": "Bearer none"}, 401), (OF_TOKEN, 200),
                                ({"authorization": f"Basic {basic}"}, 200)):  # fmt: skip
            sent = post(json.dumps(group()).encode(), **headers)
            assert whole(server.port, sent)[0] == status
            assert same(whole(server.port, sent)) == same(by_way_of_all_layers(server.port, sent))
        assert recorded.said == [None] * 4 + [200] * 4


def test_what_is_sent_ahead_waits_for_its_turn(server: Running):
    """Else one connection with many requests would hold up the others."""
    recorded = Recorded(server)
    end = Connection(server.port, 60)
    end.send(post(body(tag=1)) * 3)
    assert [end.receive().status for _ in range(3)] == [200] * 3
    assert len(recorded.said) <= 1, "the last, which came separately"
    assert end.call(post(body(tag=2))).status == 200, "and the connection continues"
    end.close()


def test_a_group_that_finds_no_room_waits_as_any_other(tmp_path: Path):
    with running(tmp_path, journal=False, hub_sequences=8, hold_s=0.3) as server:
        server.begin()
        recorded = Recorded(server)
        answers = [whole(server.port, post(body(tag=tag))) for tag in range(3)]
        assert [answer[0] for answer in answers] == [200, 200, 503] and recorded.said == [200, 200, None]
        assert answers[2][2] == by_way_of_all_layers(server.port, post(body(tag=3)))[2]
        assert server.service.hub.status().groups == 2


def test_where_each_group_is_written_to_the_disk_first_nothing_is_answered_at_once(tmp_path: Path):
    with running(tmp_path, sync="always") as server:
        recorded = Recorded(server)
        assert whole(server.port, post(json.dumps(group()).encode()))[0] == 200 and recorded.said == [None]


def test_who_hangs_up_and_sends_again_is_stored_once(tmp_path: Path):
    """The end of the connection is there with the request."""
    with running(
        tmp_path, token=TOKEN, journal=False
    ) as server:  # without a token, the owner of a closed socket is unknown
        sent = post(json.dumps(group()).encode(), **OF_TOKEN)
        end = socket.create_connection(("127.0.0.1", server.port), 60)
        end.sendall(request("GET", "/health"))
        assert end.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with server.standing_still():
            end.sendall(sent)
            end.close()
        wait_until(lambda: server.service.hub.status().groups, "the group of a client that has gone")
        assert whole(server.port, sent)[0] == 200
        assert server.service.hub.status().groups == 1


def test_after_a_reset_a_group_that_is_sent_again_is_a_new_one(tmp_path: Path):
    with running(tmp_path, token=TOKEN, journal=False) as server:
        sent = post(json.dumps(group()).encode(), **OF_TOKEN)
        with socket.create_connection(("127.0.0.1", server.port), 60) as end:
            end.sendall(sent)
            end.shutdown(socket.SHUT_WR)
            end.recv(1 << 16)
        wait_until(lambda: server.service.hub.status().groups, "the group")
        assert whole(server.port, request("GET", "/reset_data", **OF_TOKEN))[0] == 200
        assert not server.service.hub.status().groups
        assert whole(server.port, sent)[0] == 200
        assert server.service.hub.status().groups == 1


def test_who_has_only_ended_what_it_sends_is_answered(tmp_path: Path):
    """The end of what it sends is there with the request."""
    with running(tmp_path, token=TOKEN, journal=False) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as end:
            end.sendall(request("GET", "/health"))
            assert end.recv(1 << 16).startswith(b"HTTP/1.1 200")
            with server.standing_still():
                end.sendall(post(json.dumps(group()).encode(), **OF_TOKEN))
                end.shutdown(socket.SHUT_WR)
            assert end.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.service.hub.status().groups == 1


def test_a_fault_of_ours_is_answered_with_500_and_ends_nothing(server: Running):
    def failing(scope: Any, given: bytes) -> Any:
        raise ZeroDivisionError

    kept = server.app.at_once[POST_GROUP]
    server.app.at_once[POST_GROUP] = failing  # type: ignore[index]
    end = Connection(server.port, 60)
    try:
        assert end.call(post(body()))[::2] == (
            500,
            b"the server failed on this request. Its output has the traceback.\n",
        )
    finally:
        server.app.at_once[POST_GROUP] = kept  # type: ignore[index]
    assert end.call(post(body())).status == 200
    end.close()
