from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
import zlib
from pathlib import Path

import numpy as np
import orjson
import pytest

from atropos_core.errors import DataError, HubFull
from atropos_trajectory_api.limits import FREE, Budget
from atropos_trajectory_api.wire import read
from atropos_trajectory_api.wire_json import MOST_VALUES, _read_in_parts, parse
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
        assert time.monotonic() - started < 10
        for one in (silent, head, body):
            one.close()
        assert server.client.get("/status").status_code == 200


async def test_who_finds_the_budget_used_up_waits_and_one_alone_may_go_beyond_it() -> None:
    budget = Budget(100)
    first, second, third = budget.share(), budget.share(), budget.share()
    await first.take(FREE + 80, 1, 1)
    waiting = [asyncio.ensure_future(one.take(FREE + 50, 1, 5)) for one in (second, third)]
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False], "the first that must wait goes on, the next does not"
    await second.take(1000, 1, 1)
    assert budget.held == 80 + 50 + 1000
    second.end()
    await asyncio.wait_for(waiting[1], 1)
    first.end()
    third.end()
    assert budget.held == 0


async def test_a_wait_for_the_budget_has_a_deadline_and_leaves_nothing() -> None:
    budget = Budget(100)
    first, beyond, late = budget.share(), budget.share(), budget.share()
    await first.take(FREE + 100, 1, 1)
    await beyond.take(FREE + 100, 1, 1)
    with pytest.raises(HubFull, match="in-flight-mb"):
        await late.take(FREE + 10, 1, 0.02)
    small = budget.share()
    await small.take(FREE, 1, 0.01)  # what is free waits for nobody
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
    apart = _read_in_parts(body)
    assert type(apart["tokens"][0]) is np.ndarray and type(apart["inference_logprobs"][2]) is list
    assert apart["messages"] == sent["messages"] and apart["generation_params"] == sent["generation_params"]
    assert read(apart, "one").frame() == read(orjson.loads(body), "one").frame()
    coerced = sent | {"tokens": [list(map(float, row)) for row in sent["tokens"]]}
    text = json.dumps(coerced).encode()
    assert read(_read_in_parts(text), "one").frame() == read(orjson.loads(text), "one").frame()
    assert _read_in_parts(numbers.encode()) == orjson.loads(numbers)
    for name, wrong in (("tokens", 2**31), ("tokens", -1), ("tokens", 1.5), ("inference_logprobs", 1e300)):
        broken = sent | {name: [[wrong] * 500, *sent[name][1:]]}
        text = json.dumps(broken).encode()
        for value in (_read_in_parts(text), orjson.loads(text)):
            with pytest.raises(DataError, match=name):
                read(value, "one")


@pytest.mark.parametrize("field", ["tokens", "generation_params", ""])
def test_more_numbers_than_are_read_as_they_come_are_refused(field: str) -> None:
    numbers = [1.5] * (MOST_VALUES + 1)
    with pytest.raises(DataError, match="4000002|2000001|integers"):
        read(parse(json.dumps({**group(2), field: [numbers, numbers]} if field else [numbers]).encode()), "one")
