"""Fixtures: a model directory without weights, and a server that gives the answers of a test, to test our side of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atropos_core.plugins.provider import RunContext
from atropos_engine_vllm.config import VLLMOptions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 8, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def context(tmp_path: Path, model: Path) -> Callable[..., RunContext]:
    return lambda **fields: RunContext(directory=tmp_path, model=model, **fields)


@pytest.fixture
def options() -> Callable[..., VLLMOptions]:
    return VLLMOptions


@pytest.fixture
async def answering() -> AsyncIterator[Callable[..., Any]]:
    """`await answering({"/path": answer})` returns the server's URL. An answer is JSON, (status, JSON), or seconds to wait."""
    runners: list[web.AppRunner] = []

    async def start(answers: dict[str, Any]) -> str:
        async def handle(request: web.Request) -> web.Response:
            answer = answers.get(request.path, (404, {"detail": "Not Found"}))
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = {}
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [(host, port)] = runner.addresses
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()
