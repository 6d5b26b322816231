"""What is swapped in a vLLM server behind a run that is attached to it: the rows of docs/swaps.md that speak of vLLM."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from atropos_env_gsm8k.plugin import HERE
from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun
from tests.vllm.hosted import Hosted, start

pytestmark = pytest.mark.timeout(400)

RUN = (
    "run", "--env", "gsm8k", "--engine", "vllm", "--bridge", "checkpoint", "--steps", "500", "--set", "evaluation.problems=0",
    "--set", "training.groups_per_step=2", "--set", "training.group_size=4", "--set", "checkpoint.every=0",
    "--set", "trainer.learning_rate=1e-3",
)  # fmt: skip


def odd(folder: Path) -> Path:
    """The tiny policy with another chat template, other stop tokens and other defaults of sampling."""
    shutil.copytree(HERE / "tiny", folder)
    for path in folder.glob("chat_template.jinja"):
        path.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    (folder / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": list(range(1, 598)), "temperature": 0.1, "top_k": 1, "top_p": 0.1, "do_sample": True}
        )
    )
    return folder


def other_weights(folder: Path) -> Path:
    shutil.copytree(HERE / "tiny", folder)
    path, random = folder / "model.safetensors", np.random.default_rng(0)
    kept = load_file(path)
    made = {name: (value + random.normal(0, 0.05, value.shape)).astype(value.dtype) for name, value in kept.items()}
    save_file(made, path, metadata={"format": "pt"})
    return folder


async def post(server: Hosted, path: str, body: dict[str, str] | None = None) -> None:
    headers = {"Authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(server.url + path, json=body) as answer:
        assert answer.status < 400, await answer.text()


def attached(server: Hosted, folder: Path, *more: str) -> RunningRun:
    return RunningRun(folder, *RUN, "--dir", str(folder), "--set", f"engine.url={server.url}", *more)


async def test_what_is_swapped_in_a_server_or_stops_it_in_mid_run_is_noticed_or_has_no_effect(tmp_path, monkeypatch):
    server = await start(odd(tmp_path / "odd"), tmp_path / "server")
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    runs: list[RunningRun] = []
    try:
        runs.append(run := attached(server, tmp_path / "weights"))
        await asyncio.to_thread(run.wait_for_step, 3)
        before = metrics_of(run.folder)
        assert max(line["alignment/max_abs_logprob_diff"] for line in before) <= 1e-4, (
            "template, stops and defaults: none"
        )
        assert min(line["tokens/mean"] for line in before) > 2, (
            "a reply of one token each, by the server's own stop tokens"
        )
        await server.engine.pause()
        other = other_weights(tmp_path / "other")
        for _ in range(
            20
        ):  # a publish of the run that comes before anything is sampled has the run's own weights again
            await post(server, "/pause?mode=keep&clear_cache=true")
            await server.engine.load_weights(other)
            await post(server, "/resume")  # under the version that the run knows
            await asyncio.sleep(1)
            if run.process.poll() is not None:
                break
        assert await asyncio.to_thread(run.ended_within, 120) == 1
        assert "Misaligned" in run.text, run.text

        runs.append(run := attached(server, tmp_path / "anew"))
        await asyncio.to_thread(run.wait_for_step, 2)
        stop = asyncio.Event()

        async def forget() -> None:  # as one that was started anew, whatever a run says to it
            while not stop.is_set():
                await post(server, "/update_weight_version", {"new_version": "default"})
                await asyncio.sleep(0.002)

        forgetting = asyncio.create_task(forget())
        try:
            assert await asyncio.to_thread(run.ended_within, 120) == 1
        finally:
            stop.set()
            await forgetting
        message = " ".join(run.text.split())
        assert "NoProgress" in message and "version" in message, run.text

        bounds = ("--set", "watch.say_s=2", "--set", "watch.least_s=4", "--set", "watch.times=5")
        runs.append(run := attached(server, tmp_path / "stopped", *bounds))
        await asyncio.to_thread(run.wait_for_step, 2)
        processes = psutil.Process(server.child.process.pid).children(recursive=True)
        for process in processes:
            process.suspend()
        try:
            assert await asyncio.to_thread(run.ended_within, 60) == 1
        finally:
            for process in processes:
                process.resume()
        message = " ".join(run.text.split())
        assert "ProcessSilent engine (pid " in message, run.text
        assert f"the vLLM server at {server.url} has given no answer to /inference/v1/generate for" in message, run.text
    finally:
        for run in runs:
            run.process.kill()
        await server.engine.close()
