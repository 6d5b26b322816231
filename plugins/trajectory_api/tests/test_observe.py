"""The server's counters: right, bounded, and in the exact format that Prometheus reads."""

from __future__ import annotations

import asyncio
import math
import re
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from atropos_core.hub.records import HubStatus, Limits
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.app import create_app
from atropos_trajectory_api.server.metrics_routes import ABORTED, Timing, metrics_routes, render_prometheus
from atropos_trajectory_api.server.prometheus_format import Exposition
from atropos_trajectory_api.service.counters import OTHER, QUIET_S, Counters, Rate
from atropos_trajectory_api.service.service import Service

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
VALUE = r"NaN|[+-]Inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ({VALUE})")
SUFFIXES = {"summary": ("", "_sum", "_count"), "histogram": ("_bucket", "_sum", "_count")}
Family = dict[str, Any]


def parsed(text: str) -> dict[str, Family]:
    """By the published grammar of version 0.0.4 and nothing else: families whole, HELP then TYPE then samples."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    series: set[str] = set()
    current: Family = {}
    for line in text[:-1].split("\n"):
        if helped := re.fullmatch(rf"# HELP ({NAME}) (.*)", line):
            assert helped[1] not in families, f"{helped[1]} comes twice"
            assert current.get("samples", True), f"no sample before {line}"
            current = families[helped[1]] = {"name": helped[1], "type": None, "samples": {}}
        elif typed := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|summary|histogram)", line):
            assert typed[1] == current["name"]
            assert current["type"] is None
            assert not current["samples"]
            current["type"] = typed[2]
        else:
            found = SAMPLE.fullmatch(line)
            assert found, f"not a sample: {line!r}"
            allowed = [current["name"] + suffix for suffix in SUFFIXES.get(current["type"], ("",))]
            assert found[1] in allowed, f"{found[1]} stands in {current['name']}"
            assert line.rsplit(" ", 1)[0] not in series, f"twice: {line}"
            series.add(line.rsplit(" ", 1)[0])
            if current["type"] == "counter":
                assert found[1].endswith("_total")
                assert float(found[3]) >= 0
            current["samples"][line.rsplit(" ", 1)[0]] = float(found[3])
    for family in families.values():
        if family["type"] == "histogram":
            name, samples = family["name"], family["samples"]
            buckets = [value for key, value in samples.items() if key.startswith(f"{name}_bucket")]
            assert buckets == sorted(buckets)
            assert samples[f'{name}_bucket{{le="+Inf"}}'] == samples[f"{name}_count"]
    return families


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class FullHub:
    """Ten groups wait in it."""

    def status(self) -> HubStatus:
        limits = Limits(size_bytes=1_000_000)
        return HubStatus(10, 80, 800_000, 3, 2, 7, 900_000, 120, limits, puts_waiting=4, oldest_s=12.5, why="too few")


@dataclass
class Watched:
    """A server's state, as far as it is observed."""

    counters: Counters = field(default_factory=Counters)
    hub: FullHub = field(default_factory=FullHub)


@pytest.mark.parametrize("seconds", [3, 30, 600])
def test_a_rate_is_right_while_young_and_when_old(seconds: int) -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(seconds * 10):
        rate.add(8)
        clock.now += 0.1
    assert rate.per_second() == pytest.approx(80, rel=0.05)
    clock.now += 300
    assert rate.per_second() < 0.01


def test_memory_stays_whatever_names_clients_choose() -> None:
    counters = Counters()

    def busy(first: int) -> None:
        for i in range(first, first + 2_000):
            counters.request(f"/route/{i}", f"worker {i}", 0.001 * (i % 97), 200 + i % 7, 10, 10)
            counters.group(f"worker {i}", f"environment {i}", 8, 1000)
            counters.dropped(f"cause {i}")
            counters.lag(i)

    busy(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        busy(10_000)
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    seen = counters.snapshot()
    assert [len(seen[kind]) for kind in ("routes", "workers", "environments", "dropped")] == [65, 65, 65, 33]
    assert sum(one["calls"] for one in seen["routes"].values()) == 4_000
    assert sum(one["groups"] for one in seen["workers"].values()) == 4_000
    assert sum(seen["dropped"].values()) == 4_000
    assert sum(seen["staleness"].values()) == 4_000


def test_a_quiet_worker_makes_way_and_its_counts_go_to_other() -> None:
    clock = Clock()
    counters = Counters(clock=clock, workers=2)
    counters.group("old", "e", 8, 100)
    clock.now += 1
    counters.group("young", "e", 8, 100)
    counters.group("third", "e", 4, 50)  # no room, and no worker was quiet for long
    clock.now += QUIET_S - 0.5
    counters.group("fourth", "e", 2, 25)
    workers = counters.snapshot()["workers"]
    assert {name: one["sequences"] for name, one in workers.items()} == {"young": 8, "fourth": 2, OTHER: 12}


def test_the_page_keeps_to_the_exposition_format() -> None:
    watched = Watched()
    assert parsed(render_prometheus(watched))["atropos_up_seconds"]["type"] == "gauge"
    watched.counters.request("/batch", 'two\nlines "quoted" \\ slash', 0.02, 200, 0, 5000)
    watched.counters.request("/scored_data", "", 0.001, 422, 700, 90)
    watched.counters.group("w", "math", 8, 98_000)
    watched.counters.dropped("stale", 3)
    watched.counters.lag(2)
    watched.counters.lag(1000)
    families = parsed(render_prometheus(watched))
    samples = {key: value for family in families.values() for key, value in family["samples"].items()}
    assert samples['atropos_requests_total{route="/scored_data",status="422"}'] == 1
    assert samples['atropos_request_seconds_count{route="/batch"}'] == 1
    assert samples['atropos_worker_request_seconds_count{worker="two\\nlines \\"quoted\\" \\\\ slash"}'] == 1
    assert samples['atropos_environment_sequences_total{environment="math"}'] == 8
    assert samples['atropos_dropped_groups_total{cause="stale"}'] == 3
    assert samples['atropos_staleness_versions_bucket{le="2"}'] == 1
    assert samples["atropos_staleness_versions_sum"] == 1002
    assert samples["atropos_resident_bytes"] > 1e6
    assert samples["atropos_hub_waiting_groups"] == 10
    assert samples["atropos_hub_oldest_seconds"] == 12.5


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    page = Exposition()
    page.gauge(
        "g",
        "Of odd values.",
        [({"i": str(i)}, v) for i, v in enumerate((math.nan, math.inf, -math.inf, 1e300, 0.1, -3))],
    )
    values = list(parsed(page.text())["g"]["samples"].values())
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1e300, 0.1, -3.0]


def served(watched: Watched, why: str | None = None) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(metrics_routes(watched, lambda: why))

    @app.post("/v1/workers/{worker}/draws")
    async def draws(worker: str, request: Request) -> dict[str, int]:
        request.scope["atropos.worker"] = worker
        return {"size": len(await request.body())}

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("planted")

    transport = httpx.ASGITransport(Timing(app, watched.counters), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_every_request_is_counted_under_its_pattern_and_worker() -> None:
    watched = Watched()
    async with served(watched) as client:
        assert (await client.post("/v1/workers/w7/draws", content=b"12345")).json() == {"size": 5}
        assert (await client.get("/nobody/serves/this")).status_code == 404
        assert (await client.get("/broken")).status_code == 500
    seen = watched.counters.snapshot()
    draws = seen["routes"]["/v1/workers/{worker}/draws"]
    assert (draws["calls"], draws["bytes_in"], draws["bytes_out"], draws["statuses"]) == (1, 5, 10, {"200": 1})
    assert seen["routes"][OTHER]["statuses"] == {"404": 1}
    assert seen["routes"]["/broken"]["statuses"] == {"500": 1}
    assert seen["workers"]["w7"]["calls"] == 1


async def test_an_answer_that_was_never_finished_is_counted_as_aborted() -> None:
    watched = Watched()

    async def halfway(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def nothing(message: Any = None) -> Any:
        await asyncio.sleep(0)

    await Timing(halfway, watched.counters)({"type": "http"}, nothing, nothing)
    assert watched.counters.snapshot()["routes"][OTHER]["statuses"] == {str(ABORTED): 1}


async def test_health_ready_and_metrics_answer() -> None:
    watched = Watched()
    async with served(watched) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready", "why": None}
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (
            parsed(metrics.text)["atropos_requests_total"]["samples"][
                'atropos_requests_total{route="/health",status="200"}'
            ]
            == 1
        )
    async with served(watched, "the journal's disk is full") as client:
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["why"]) == (503, "the journal's disk is full")


async def test_a_real_server_counts_what_it_takes_under_the_names_of_routes_and_environments() -> None:
    options = ServeOptions(journal=False, same_host=False)
    service = Service.open(options)
    transport = httpx.ASGITransport(create_app(service, options))
    registration = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 8, "checkpoint_dir": "",
        "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9,
    }  # fmt: skip
    group = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0], "env_id": 0}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.post("/register", json=registration)).status_code == 200
        await client.get("/batch")
        named = {"max_token_length": 8, "desired_name": "sums", "weight": 1.0, "group_size": 2}
        assert (await client.post("/register-env", json=named)).json()["status"] == "success"
        assert (await client.post("/scored_data", json=group)).json() == {"status": "received"}
        assert (await client.post("/scored_data", json=group | {"tokens": "no"})).status_code == 422
        assert (await client.get("/v1/status")).status_code == 200
        waiting = parsed((await client.get("/metrics")).text)
        assert len((await client.get("/batch")).json()["batch"]) == 1
        assert (await client.get("/health")).json() == {"status": "ok"}
        drained = parsed((await client.get("/metrics")).text)
    await service.close()
    assert waiting["atropos_hub_waiting_sequences"]["samples"]["atropos_hub_waiting_sequences"] == 2
    assert drained["atropos_hub_waiting_sequences"]["samples"]["atropos_hub_waiting_sequences"] == 0
    samples = {key: value for family in drained.values() for key, value in family["samples"].items()}
    assert samples['atropos_requests_total{route="/scored_data",status="200"}'] == 1
    assert samples['atropos_requests_total{route="/scored_data",status="422"}'] == 1
    assert samples['atropos_requests_total{route="GET /v1/status",status="200"}'] == 1
    assert samples['atropos_requests_total{route="/health",status="200"}'] == 1
    assert samples['atropos_request_seconds_count{route="/batch"}'] == 2
    assert samples['atropos_environment_sequences_total{environment="sums_0"}'] == 2
