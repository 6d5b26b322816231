"""The engine "vllm" in a process of its own, as a run has it, and the same tokens scored by transformers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from atropos_core.interfaces import ModelInfo
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedAdapterEngine
from atropos_core.types import Completion, Floats, Tokens
from tests.vllm.processes import SIGNS, vllm_processes

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of engine and trainer; a GPU is "cuda:0"


@dataclass
class Hosted:
    """An open engine, and the processes behind it."""

    engine: HostedAdapterEngine
    child: Child
    info: ModelInfo
    model: Path

    @property
    def url(self) -> str:
        """Where its server listens."""
        [port] = [one.laddr.port for one in self.processes["server"].net_connections() if one.status == "LISTEN"]
        return f"http://127.0.0.1:{port}"

    @property
    def key(self) -> str:
        return self.processes["server"].environ()["VLLM_API_KEY"]

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """engine, and those of `vllm_processes`."""
        engine = psutil.Process(self.child.process.pid)
        found = {"engine": engine, **vllm_processes(engine)}
        assert set(found) == {"engine", *SIGNS}, [process.cmdline() for process in engine.children(recursive=True)]
        return found


async def start(
    model: Path,
    directory: Path,
    *,
    announced: Mapping[str, Any] | None = None,
    transport: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Hosted:
    """Whoever starts it closes it: `await hosted.engine.close()`."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {
        "kind": "engine",
        "name": "vllm",
        "options": options,
        "context": {
            "directory": directory, "model": model, "transport": transport, "devices": (DEVICE,), "threads": 1,
            "announced": dict(announced or {}),
        },
    }  # fmt: skip
    child = await Child.start("engine", wanted, directory / "engine.log", threads=1, environment=environment)
    engine = HostedAdapterEngine(child)
    try:
        return Hosted(engine, child, await engine.open(), model)
    except BaseException:
        await engine.close()
        raise


@asynccontextmanager
async def hosted(model: Path, directory: Path, **wanted: Any) -> AsyncIterator[Hosted]:
    """`start`, and the end of it."""
    made = await start(model, directory, **wanted)
    try:
        yield made
    finally:
        await made.engine.close()


async def running(served: Hosted) -> int:
    """Requests that the server works on, by its own metrics."""
    return await count(served, "num_requests_running")


async def count(served: Hosted, metric: str) -> int:
    """A number of the server's own metrics."""
    headers = {"Authorization": f"Bearer {served.key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{served.url}/metrics", headers=headers) as response,
    ):
        lines = (await response.text()).splitlines()
    [line] = [line for line in lines if line.startswith((f"vllm:{metric}{{", f"vllm:{metric}_total{{"))]
    return int(float(line.split()[-1]))


async def until_running(served: Hosted, call: asyncio.Future[Any]) -> None:
    """Wait until the server computes, or this call has already ended."""
    async with asyncio.timeout(60):
        while not call.done() and await running(served) == 0:
            await asyncio.sleep(0.02)


def reference(
    directory: Path, sequences: Sequence[Tokens], temperature: float = 1.0, adapter: Path | None = None
) -> list[Floats]:
    """f32[T] each, as Engine.logprobs, by transformers' own forward pass, with peft's adapter where one is given."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    scored = []
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.from_numpy(sequence.astype(np.int64))[None]
            logprobs = (model(ids).logits[0].double() / (temperature or 1.0)).log_softmax(-1)
            chosen = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            scored.append(np.concatenate([[0.0], chosen.numpy()]).astype(np.float32))
    return scored


def difference(
    directory: Path, prompt: Tokens, completions: Sequence[Completion], adapter: Path | None = None
) -> float:
    """The largest |engine - transformers| over what was sampled, nats."""
    whole = [np.concatenate([prompt, one.tokens]) for one in completions]
    scored = reference(directory, whole, completions[0].temperature, adapter)
    gaps = [np.abs(score[len(prompt) :] - one.logprobs) for score, one in zip(scored, completions, strict=True)]
    return float(np.concatenate(gaps).max())
