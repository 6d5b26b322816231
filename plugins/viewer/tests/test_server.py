"""Who may read the page's records, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import serve_in_loop
from atropos_viewer.page_records import PageRecords
from atropos_viewer.server import CONNECTIONS, GRACE_S, HEAD_S, HOST, KEEP_ALIVE_S, application, nobody_waits

TOKEN = "a-token-of-this-start"
GIVEN = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def served(*runs: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = application(PageRecords(runs), TOKEN)
    gate = Gate(HEAD_S, CONNECTIONS)
    running = await serve_in_loop(app, gate, HOST, 0, stop=nobody_waits, grace_s=GRACE_S, keep_alive_s=KEEP_ALIVE_S)
    try:
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
            yield client
    finally:
        await running.close()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"cookie": f"token={TOKEN}"}],
    ids=["none", "wrong", "basic", "cookie"],
)
async def test_records_want_the_token(toy_run: Path, headers: Mapping[str, str]):
    async with served(toy_run) as client:
        answer = await client.get("/records/runs", headers=headers)
        assert answer.status_code == 401
        assert "sums" not in answer.text
        assert (await client.get("/records/runs", headers=GIVEN)).json()[0]["name"] == "sums"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "[", ""])
async def test_a_name_of_another_machine_gets_nothing_even_with_the_token(toy_run: Path, host: str):
    async with served(toy_run) as client:
        for path in ("/", "/page/app.js", "/records/runs"):
            answer = await client.get(path, headers={**GIVEN, "host": host})
            assert answer.status_code in (400, 403)
            assert "sums" not in answer.text


async def test_no_page_of_another_origin_is_let_in_and_every_answer_binds_the_browser(toy_run: Path):
    async with served(toy_run) as client:
        for path in ("/", "/page/app.js", "/records/runs", "/records/none", "/nothing"):
            for method in ("GET", "OPTIONS"):
                answer = await client.request(method, path, headers={**GIVEN, "origin": "http://evil.example"})
                assert not [name for name in answer.headers if name.startswith("access-control")]
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "address",
    ["runs/1/metrics", "runs/-1/metrics", "runs/x/metrics", "runs/0/rollouts/99", "runs/0/rollouts/1/999", "nothing",
     "runs/0/rollouts/../../config.toml", "runs/0/evaluations/77",
     *(f"runs/0/{what}/{number}" for what in ("rollouts", "evaluations", "rollouts/1") for number in
       ("9" * 300, "9" * 4200, "9" * 5000, "-" + "9" * 300, "1_0", "%EF%BC%91", "%00", "%ED%A0%80", "NaN", "1e5", "+1", "%201", "")),
     "runs/0/metrics?since=" + "9" * 300, "runs/0/metrics?since=Infinity", f"runs/{'9' * 300}/metrics", "x/" * 3000],
)  # fmt: skip
async def test_what_is_not_there_is_said_in_one_error(toy_run: Path, address: str):
    async with served(toy_run) as client:
        answer = await client.get(f"/records/{address}", headers=GIVEN)
        assert answer.status_code == 404
        assert set(answer.json()) == {"message", "remedy"}


async def test_files_beside_the_page_are_not_served(toy_run: Path):
    async with served(toy_run) as client:
        for path in (
            "/page/../server.py",
            "/page/%2e%2e/server.py",
            "/page/vendored/uPlot.LICENSE",
            "/page//etc/passwd",
        ):
            assert (await client.get(path, headers=GIVEN)).status_code == 404


async def test_steps_that_are_known_are_not_sent_again_until_the_file_is_cut_back(toy_run: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_bytes((toy_run / "config.toml").read_bytes())
    lines = (toy_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    async with served(run) as client:

        async def read(since: int, edition: str) -> dict:
            query = {"since": since, "edition": edition}
            return (await client.get("/records/runs/0/metrics", params=query, headers=GIVEN)).json()

        first = await read(-1, "0")
        assert first["steps"] == [0, 1, 2] and first["from"] == 0, "the line that is not whole waits"
        assert first["columns"]["reward/mean"] == [
            value if value is None else pytest.approx(value, rel=1e-6)
            for value in (json.loads(line).get("reward/mean") for line in lines[:3])
        ]
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:5]))
        more = await read(2, first["edition"])
        assert more["steps"] == [3, 4] and more["from"] == 3 and more["edition"] == first["edition"]
        assert (await read(4, first["edition"]))["steps"] == []
        other = lines[1].replace(b'"reward/mean": ', b'"reward/mean": 1')
        (run / "metrics.jsonl").write_bytes(lines[0] + other + b"".join(lines[2:]))
        again = await read(4, first["edition"])
        assert again["from"] == 0 and len(again["steps"]) == 6 and again["edition"] != first["edition"]


async def test_many_callers_at_once_get_the_same(toy_run: Path):
    async with served(toy_run) as client:
        answers = await asyncio.gather(*(client.get("/records/runs/0/rollouts/3", headers=GIVEN) for _ in range(20)))
        assert len({answer.text for answer in answers}) == 1 and answers[0].json()["count"] == 16
