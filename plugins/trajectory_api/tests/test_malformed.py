"""Whatever is sent: no answer is a 5xx but a deliberate 503, nothing grows, nothing hangs."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from plugins.trajectory_api.tests.running import ENVIRONMENT, REGISTER, group, running

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**65), 10**400, 1e308, -0.0, "", "x", "5", "NaN", [], [[]], [[[]]], {}, {"a": []},
    [None], [-100], "\ud800", "\0",
)  # fmt: skip
PATHS = {
    "/scored_data": group(3, env_id=0, inference_logprobs=[[1.0, -0.5, -0.25]] * 3, overrides=[{}] * 3, messages=None),
    "/scored_data_list": [group(2, env_id=0), group(1)],
    "/register": REGISTER,
    "/register-env": ENVIRONMENT,
    "/disconnect-env": {"env_id": 0},
}


def mutated(value: Any, rng: random.Random) -> Any:
    """The same with something odd somewhere in it."""
    if rng.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(ODD)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: entry for other, entry in value.items() if other != key}
        return {**value, key: mutated(value[key], rng)}
    place = rng.randrange(len(value))
    return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]


def malformed(body: Any, rng: random.Random) -> tuple[bytes, dict[str, str]]:
    kind = rng.randrange(6)
    if kind < 3:
        return json.dumps(mutated(body, rng)).encode(), {}
    raw = bytearray(json.dumps(body).encode())
    if kind == 3:
        return bytes(raw[: rng.randrange(len(raw))]), {}
    if kind == 4:
        for _ in range(rng.randrange(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw), {}
    packed = bytearray(gzip.compress(bytes(raw)))
    packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    return bytes(packed[: rng.randrange(1, len(packed) + 1)]), {"content-encoding": "gzip"}


def test_two_thousand_malformed_bodies(tmp_path: Path) -> None:
    rng = random.Random(4)
    with running(tmp_path) as server:
        server.begin()
        seen: dict[int, int] = {}
        before = 0
        for number in range(2000):
            path, body = rng.choice(list(PATHS.items()))
            content, headers = malformed(body, rng)
            answer = server.client.post(path, content=content, headers=headers)
            assert answer.status_code in (200, 400, 422), (path, content, answer.text)
            assert "Traceback" not in answer.text
            answer.json()
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            if number == 500:
                before = _resident()
        assert seen[422] > 500 and seen[400] > 100, seen
        assert _resident() - before < 30e6
        for path in ("/status", "/latest_example", "/info", "/wandb_info", "/batch", "/metrics", "/openapi.json"):
            assert server.client.get(path).status_code == 200, "nothing that was taken poisons an answer"


def test_deep_json_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for deep in (b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 500 + b"1" + b"}" * 500):
            assert server.post("/scored_data", deep).status_code == 422
            whole = json.dumps(group(1, images="HERE")).encode().replace(b'"HERE"', deep)
            assert server.post("/scored_data", whole).status_code == 422


@pytest.mark.slow
def test_schemathesis_finds_no_answer_that_the_document_does_not_know(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        found = [operation.ok() for operation in schema.get_all_operations()]
        assert len(found) >= 16
        each = st.one_of([operation.as_strategy(mode) for operation in found for mode in schemathesis.GenerationMode])
        checks = [schemathesis.checks.not_a_server_error]

        @settings(
            max_examples=100,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(each)
        def every(case: Any) -> None:
            answer = case.call(timeout=30)
            assert answer.status_code < 500, answer.text
            case.validate_response(answer, checks=checks)

        every()


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
