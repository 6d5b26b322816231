from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.types import Receive, Scope, Send

from atropos_core.errors import DataError, HubFull
from atropos_http_server.body_limits import (
    FREE,
    JSON_COST,
    LARGE,
    SHARE_KEY,
    Budget,
    Limits,
    resident_bytes,
    returnable_bytes,
)
from atropos_trajectory_api.legacy.intake import is_long
from atropos_trajectory_api.legacy_groups.incoming_groups import read
from atropos_trajectory_api.legacy_groups.wire_json import MOST_ENTRIES, MOST_VALUES, PART_BYTES, parse, read_in_parts
from plugins.trajectory_api.tests.running import group, running

GZIP = {"content-encoding": "gzip"}


def highest_mb() -> float:
    """Of what was resident since the mark was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1e3


def test_a_body_over_the_limit_is_refused_in_words_that_old_and_new_clients_read(tmp_path: Path) -> None:
    with running(tmp_path, body_mb=0.1) as server:
        old = server.post("/scored_data", b" " * 200_000)
        assert old.status_code == 422 and "--body-mb" in old.json()["detail"][0]["msg"]
        new = server.post("/v1/groups", b" " * 200_000)
        assert new.status_code == 413 and new.json()["error"]["kind"] == "TooLarge"
        chunks = server.client.post("/scored_data", content=iter([b" " * 60_000] * 4))  # nothing declared
        assert chunks.status_code == 422 and "limit" in chunks.text
        assert server.post("/scored_data", group()).status_code == 200


def test_a_gzip_bomb_costs_no_memory(tmp_path: Path) -> None:
    squeeze = zlib.compressobj(9, wbits=31)
    bomb = b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(1000)) + squeeze.flush()  # 1 GB in 1 MB
    with running(tmp_path, body_mb=8) as server:
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins at what is resident at present
        before = highest_mb()
        for _ in range(3):
            answer = server.client.post("/scored_data", content=bomb, headers=GZIP)
            assert answer.status_code == 422
        assert highest_mb() - before < 60


@pytest.mark.parametrize("keep", [0, 1, 5, 10, 11, 30, -9, -8, -1])
def test_gzip_that_ends_too_early_is_named(keep: int, tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(group(8, length=50)).encode())
    with running(tmp_path) as server:
        answer = server.client.post("/scored_data", content=whole[:keep], headers=GZIP)
        assert answer.status_code == (422 if keep == 0 else 400), answer.text
        assert keep == 0 or "too early" in answer.text
        after = server.client.post("/scored_data", content=whole + b"more", headers=GZIP)
        assert after.status_code == 400 and "after the end" in after.text
        assert server.client.post("/scored_data", content=whole, headers=GZIP).json() == {"status": "received"}
        assert server.client.post("/scored_data", content=whole, headers={"content-encoding": "br"}).status_code == 400


def test_heads_and_bodies_that_never_end_are_given_up(tmp_path: Path) -> None:
    with running(tmp_path, request_s=0.5) as server:
        silent, head, body = (socket.create_connection(("127.0.0.1", server.port)) for _ in range(3))
        head.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-")
        body.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        started = time.monotonic()
        assert body.makefile("rb").read().startswith(b"HTTP/1.1 408")
        assert head.recv(1) == silent.recv(1) == b""
        assert time.monotonic() - started < 30
        for one in (silent, head, body):
            one.close()
        assert server.client.get("/status").status_code == 200


async def test_who_finds_the_budget_used_up_waits_and_one_alone_may_go_beyond_it() -> None:
    budget = Budget(100)
    first, second, third = budget.share(), budget.share(), budget.share()
    await first.take(FREE + 80, 1, 1)
    waiting = [asyncio.ensure_future(one.take(FREE + 50, 1, 5)) for one in (second, third)]
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False], "the first that must wait continues, the next does not"
    await second.take(1000, 1, 1)
    assert budget.held == 80 + 50 + 1000
    second.end()
    await asyncio.wait_for(waiting[1], 30)
    first.end()
    third.end()
    assert budget.held == 0


async def test_what_reading_a_body_took_is_remembered_until_memory_is_given_back() -> None:
    """One of 870 kB takes eight times that while it is read, and less than what counts as large when it is answered."""
    share = Budget(64_000_000).share()
    await share.take(870_000, JSON_COST, 1.0)
    share.read()
    assert share.held < LARGE < share.most
    share.end()
    assert share.held == 0


def test_what_is_free_once_growth_is_over_is_given_back() -> None:
    """Looked at while it was in use, as it is in the middle of a flood, it must not be forgotten afterwards."""
    limits = Limits(never_called, body_bytes=1, in_flight_bytes=1, request_s=1.0, hold_s=1.0)
    limits.release_memory()
    before = resident_bytes()
    blocks: list[bytes] = []
    while (grown := resident_bytes() - before) < 100e6:  # the first of them may find what other tests have left free
        blocks += (bytes(60_000) for _ in range(100))  # less than what the C library takes from the system for each
        assert len(blocks) < 20_000
    for _ in range(3):
        limits.release_memory()
    last = bytes(60_000)  # so that the end of the heap is in use, where memory is given back without being asked
    del blocks
    assert returnable_bytes() > 60e6 and resident_bytes() - before > 0.8 * grown
    limits.release_memory()
    assert resident_bytes() - before < 0.2 * grown
    assert len(last) == 60_000


async def never_called(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError


async def sent(size: int, piece: int = 1 << 16) -> tuple[Limits, int]:
    """A body of so many bytes of the old protocol, in pieces, to an application that reads it as JSON: the limits, and the
    bytes that it got."""
    got = left = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        message = await receive()
        got = len(message["body"])
        scope[SHARE_KEY].read()

    async def receive() -> dict[str, Any]:
        nonlocal left
        now = min(piece, left)
        left -= now
        return {"type": "http.request", "body": b"1" * now, "more_body": left > 0}

    async def send(message: Any) -> None:
        raise AssertionError(f"refused: {message}")

    left = size
    limits = Limits(application, body_bytes=1 << 26, in_flight_bytes=1 << 30, request_s=30.0, hold_s=30.0)
    await limits({"type": "http", "method": "POST", "path": "/scored_data", "headers": []}, receive, send)
    return limits, got


@pytest.mark.parametrize(("size", "goes_back"), [(FREE + LARGE // JSON_COST // 2, False), (870_000, True)])
async def test_memory_goes_back_after_a_body_that_took_much_while_it_was_read(size: int, goes_back: bool) -> None:
    limits, got = await sent(size)
    assert got == size
    assert (limits._giving_back is not None) == goes_back
    assert limits.budget.held == 0


async def test_a_body_is_never_there_twice_while_it_is_put_together() -> None:
    size = 32_000_000
    tracemalloc.start()
    try:
        _, got = await sent(size)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == size and most < 1.5 * size


async def test_a_wait_for_the_budget_has_a_deadline_and_leaves_nothing() -> None:
    budget = Budget(100, "`atropos serve --in-flight-mb`")
    first, beyond, late = budget.share(), budget.share(), budget.share()
    await first.take(FREE + 100, 1, 1)
    await beyond.take(FREE + 100, 1, 1)
    with pytest.raises(HubFull, match="in-flight-mb"):
        await late.take(FREE + 10, 1, 0.02)
    small = budget.share()
    await small.take(FREE, 1, 0.01)  # free bytes need not wait
    for one in (first, beyond, late, small):
        one.end()
    await late.take(100, 1, 0.01)


def test_answers_that_nobody_reads_hold_up_nobody_else(tmp_path: Path) -> None:
    with running(tmp_path, request_s=1.0) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        for one in idle:
            one.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        assert server.client.get("/status").status_code == 200
        for one in idle:
            one.close()


def test_a_long_body_is_read_to_the_same_group_as_a_short_one() -> None:
    """Long lists of numbers are read apart; what looks like one in a text is none."""
    sent = group(3, length=500)
    numbers = "[" + "1,2," * 200 + "3]"
    sent["messages"] = [[{"role": "user", "content": numbers + '"\\' + numbers}]] * 3
    sent["inference_logprobs"] = [[-1.25] * 500, [-1] * 500, [*[-0.5] * 499, -1]]
    sent["generation_params"] = {"seeds": list(range(1000)), "mixed": [1, 2.5] * 200, "tag": 0}
    body = json.dumps(sent).encode()
    apart = read_in_parts(body)
    assert type(apart["tokens"][0]) is np.ndarray and type(apart["inference_logprobs"][2]) is np.ndarray
    assert apart["messages"] == sent["messages"] and apart["generation_params"] == sent["generation_params"]
    mixed = apart["generation_params"]["mixed"]
    assert list(map(type, mixed)) == [int, float] * 200, "a list that is not a row is returned unchanged"
    assert read(apart, "one").frame() == read(orjson.loads(body), "one").frame()
    for few in (500, 250):  # that are written as fractions, of each row
        coerced = sent | {"tokens": [[*map(float, row[:few]), *row[few:]] for row in sent["tokens"]]}
        text = json.dumps(coerced).encode()
        assert read(read_in_parts(text), "one").frame() == read(orjson.loads(text), "one").frame()
    assert read_in_parts(numbers.encode()) == orjson.loads(numbers)
    for name, wrong in (("tokens", 2**31), ("tokens", -1), ("tokens", 1.5), ("inference_logprobs", 1e300)):
        for good in (0, 1):
            broken = sent | {name: [[*sent[name][0][:good], *[wrong] * (500 - good)], *sent[name][1:]]}
            text = json.dumps(broken).encode()
            for value in (read_in_parts(text), orjson.loads(text)):
                with pytest.raises(DataError, match=name):
                    read(value, "one")


def types(value: Any) -> Any:
    return list(map(type, value))


@pytest.mark.parametrize(
    "number", ["7", "-123456", "1.5", "-2e-3", "0, -1.5", "3000000000, 7", "9007199254740993, 0.5"]
)
@pytest.mark.parametrize("count", [100, 20_000, 70_000])
def test_a_list_that_is_read_in_parts_is_the_whole_list(number: str, count: int) -> None:
    text = f"[{', '.join([number] * count)}]".encode()
    assert read_in_parts(text) == orjson.loads(text) and types(read_in_parts(text)) == types(orjson.loads(text))
    for cut in (PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, len(text) - 2):
        at = text.rfind(b",", 0, cut)
        for put in (b",,", b",1.5,9,", b"\t,\n", b", ,", b",9999999999,"):
            broken = text[:at] + put + text[at + 1 :]
            try:
                expected = orjson.loads(broken)
            except ValueError:
                with pytest.raises(ValueError, match="expected|trailing"):
                    read_in_parts(broken)
            else:
                assert read_in_parts(broken) == expected and types(read_in_parts(broken)) == types(expected)
    with pytest.raises(ValueError, match="expected|trailing"):
        read_in_parts(text[:-1] + b",]")


@pytest.mark.parametrize("inside", [r"\"", r"\\", r"[1,2] \\\"", "[" + "1," * 200 + "1]", "é"])
def test_a_text_that_is_looked_at_in_parts_ends_where_it_ends(inside: str) -> None:
    numbers = "[" + ",".join(["1.5"] * 300) + "]"
    for before in range(PART_BYTES - 14, PART_BYTES + 2):
        text = f'{{"a":"{"x" * before}{inside}","b":[{numbers},"{inside}{numbers}"]}}'.encode()
        assert read_in_parts(text) == orjson.loads(text)


def test_large_integers_are_found_among_fractions() -> None:
    fractions = b",".join([b"[1.5,-2e-3,1e300]"] * 1000)
    assert parse(b'{"a":[%b]}' % fractions) == orjson.loads(b'{"a":[%b]}' % fractions)
    with pytest.raises(DataError, match="the integer 100000000000000000000... is beyond 64 bits"):
        parse(b'{"a":[%b,[100000000000000000000]]}' % fractions)


@pytest.mark.parametrize("numbers", [[1.5], [-1, 2.5], [3_000_000_000]], ids=["fractions", "mixed", "above 32 bits"])
def test_a_long_list_of_numbers_is_never_all_python_objects(numbers: list[float]) -> None:
    body = json.dumps({"tokens": [numbers * (1_000_000 // len(numbers))]}).encode()
    tracemalloc.start()
    try:
        value = parse(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(value["tokens"][0]) == 1_000_000
    assert most < 34e6, "18 MB of arrays while they are put together, and the text once more"


@pytest.mark.parametrize("field", ["tokens", "generation_params", ""])
def test_more_numbers_than_are_read_as_they_come_are_refused(field: str) -> None:
    numbers = [1.5] * (MOST_VALUES + 1)
    with pytest.raises(DataError, match="4000002|2000001|integers"):
        read(parse(json.dumps({**group(2), field: [numbers, numbers]} if field else [numbers]).encode()), "one")


MANY = 80_000
OF_MANY_PARTS = {
    "objects": b'{"a": [' + b"{}," * MANY + b"{}]}",
    "lists": b'{"a": [' + b"[]," * MANY + b"[]]}",
    "texts": b'{"a": [' + b'"",' * MANY + b'""]}',
    "names": b'{"a": [' + b",".join(b'{"%d": 1}' % number for number in range(MANY)) + b"]}",
    "within themselves": b'{"a": [' + b"[[{}]]," * MANY + b'"\\u00e9\\ud83d\\ude00"]}',
    "in a list of groups": b"[" + b'{"a": {}},' * MANY + b"{}]",
}


@pytest.mark.parametrize("name", OF_MANY_PARTS)
def test_others_have_their_turn_while_a_body_of_many_parts_is_read(name: str) -> None:
    body, turns = OF_MANY_PARTS[name], [0.0]
    assert is_long(body, many=True) and is_long(body, many=False), "its way is beside the event loop"

    def take_turns() -> None:
        while turns[-1] >= 0:
            turns.append(time.perf_counter())
            time.sleep(0)

    other = threading.Thread(target=take_turns, daemon=True)
    other.start()
    began = time.perf_counter()
    value = parse(body)
    ended = time.perf_counter()
    during = sum(began < turn < ended for turn in turns)
    turns.append(-1.0)
    other.join(10)
    assert value == orjson.loads(body)
    assert during > 3, f"{during} in {ended - began:.3f} s"


@pytest.mark.parametrize(
    "end",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        str(2**64),
        str(-(2**63) - 1),
        r'"\ud800"',
        '"\t"',
        "1,",
        "[" * 2000,
        '"\xff"',
    ],
)
def test_what_is_not_json_is_refused_in_a_body_of_many_parts_too(end: str) -> None:
    for first in ("", "{}," * MANY):
        with pytest.raises(DataError):
            parse(b"[" + f"{first}{end}".encode("latin-1") + b"]")


def test_an_object_of_more_entries_than_are_read_is_refused() -> None:
    for inside in (b"%s", b'{"generation_params": %s}', b'[{"images": [%s]}]'):
        body = inside % json.dumps({str(number): 0 for number in range(MOST_ENTRIES + 1)}).encode()
        with pytest.raises(DataError, match="an object has 20,001 entries"):
            parse(body)


def test_a_body_of_ordinary_groups_is_read_by_the_quick_way() -> None:
    group_of = group(16, length=512) | {"messages": [[{"role": "user", "content": "x" * 100}] * 8] * 16}
    assert not is_long(json.dumps(group_of).encode(), many=False)
