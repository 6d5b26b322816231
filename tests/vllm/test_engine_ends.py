"""How an engine ends: by request, killed, or with its server; and that nothing but its own ends with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from atropos_core.errors import FitError, ProcessDied
from atropos_core.types import Sampling, tokens
from tests.vllm.hosted import Hosted, difference, start

pytestmark = pytest.mark.timeout(300)

PROMPT = tokens([5, 9, 33, 7, 120, 64])
LONG_S = 120.0
WITHIN_S = 40.0


def shared_memory(processes: Sequence[psutil.Process]) -> set[str]:
    """Named segments that these have mapped."""
    paths = {part.path for one in processes for part in one.memory_maps()}
    return {path for path in paths if path.startswith("/dev/shm/")}


def group_of(made: Hosted) -> list[psutil.Process]:
    guard = made.processes["guard"]
    return [guard, *guard.children(recursive=True)]


def scratch_of(made: Hosted) -> Path:
    return Path(made.processes["server"].environ()["TMPDIR"])


async def until_gone(processes: Sequence[psutil.Process], within_s: float) -> None:
    until = time.monotonic() + within_s
    while left := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < until, left
        await asyncio.sleep(0.02)


async def until_stopped(made: Hosted) -> ProcessDied:
    """What the supervisor learns without asking anything."""
    await asyncio.wait_for(made.child.peer.lost.wait(), WITHIN_S)
    assert isinstance(made.child.peer.error, ProcessDied)
    return made.child.peer.error


@pytest.fixture
def decoy() -> Iterator[psutil.Process]:
    """A stranger that is called vllm and listens on a port."""
    script = "import socket, sys, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(1, flush=True); time.sleep(600)"
    process = subprocess.Popen(["VLLM::Worker", "-c", script], executable=sys.executable, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()


async def test_two_engines_end_apart_and_strangers_not_at_all(
    models: dict[str, Path], tmp_path: Path, decoy: psutil.Process
) -> None:
    one, other = await asyncio.gather(
        start(models["qwen3"], tmp_path / "one"), start(models["llama3"], tmp_path / "other", kv_cache_gb=0.25)
    )
    try:
        for made in (one, other):
            sampled = await made.engine.sample(PROMPT, 2, Sampling(20), [1, 2], LONG_S)
            assert difference(made.model, PROMPT, sampled) <= 1e-4

        group, scratch = group_of(one), scratch_of(one)
        segments = shared_memory(group)
        assert segments and scratch.is_dir()
        one.child.process.popen.kill()
        await until_gone(group, WITHIN_S)
        await until_stopped(one)
        until = time.monotonic() + WITHIN_S
        while (left := [path for path in [*segments, scratch] if os.path.exists(path)]) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert not left

        assert len(await other.engine.sample(PROMPT, 2, Sampling(20), [1, 2], LONG_S)) == 2
        group, scratch = group_of(other), scratch_of(other)
        segments = shared_memory(group)
        worker = other.processes["worker"]
        worker.kill()  # it has no request
        error = str(await until_stopped(other))
        assert f"vLLM's worker (pid {worker.pid}) has ended" in error
        assert "Application startup complete" in error or "ERROR" in error, "vLLM's own last lines"
        await until_gone(group, WITHIN_S)
        assert not [path for path in [*segments, scratch] if os.path.exists(path)]
        with pytest.raises(ProcessDied, match="exit code 1"):
            await other.engine.sample(PROMPT, 1, Sampling(4), [1], LONG_S)
        assert decoy.is_running() and decoy.status() != psutil.STATUS_ZOMBIE
    finally:
        await one.engine.close()
        await other.engine.close()


async def test_an_engine_may_attach_to_a_server_and_leaves_it_running(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["qwen3"]
    owner = await start(model, tmp_path / "owner", kv_cache_gb=0.25)
    try:
        url, key = owner.url, {"VLLM_API_KEY": owner.key}
        with pytest.raises(FitError, match="not a vLLM server, or needs another key"):
            await start(model, tmp_path / "stranger", url=url)
        with pytest.raises(FitError, match="serves .* with vocab_size = 160, but this run's model has 598"):
            await start(TINY, tmp_path / "wrong", url=url, environment=key)

        guest = await start(model, tmp_path / "guest", url=url, environment=key, transport="checkpoint")
        try:
            assert guest.info == owner.info
            sampled = await guest.engine.sample(PROMPT, 2, Sampling(20, 0.7), [1, 2], LONG_S)
            assert difference(model, PROMPT, sampled) <= 1e-4
            await guest.engine.pause()
            await guest.engine.load_weights(model)
            await guest.engine.resume(4)
            assert (await guest.engine.sample(PROMPT, 1, Sampling(4), [1], LONG_S))[0].policy_version[0] == 4
            child = psutil.Process(guest.child.process.pid)
            assert child.children() == [], "it starts nothing"

            group, guard = group_of(owner), owner.processes["guard"]
            segments, scratch = shared_memory(group), scratch_of(owner)
            guard.kill()
            assert "the server's guard was killed by SIGKILL" in str(await until_stopped(owner))
            await until_gone(group, WITHIN_S)
            assert not [path for path in [*segments, scratch] if os.path.exists(path)]
            with pytest.raises(ProcessDied, match=f"the vLLM server at {url} does not answer"):
                await guest.engine.sample(PROMPT, 1, Sampling(4), [1], LONG_S)
        finally:
            await guest.engine.close()
    finally:
        await owner.engine.close()


async def test_a_server_that_cannot_start_says_why(models: dict[str, Path], tmp_path: Path) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    with pytest.raises(ProcessDied, match="no-such-flag") as caught:
        await start(
            models["qwen3"],
            tmp_path / "run",
            extra_args=["--no-such-flag", "1"],
            environment={"TMPDIR": str(temporary)},
        )
    assert str(tmp_path / "run" / "engine.vllm.log") in str(caught.value)
    assert list(temporary.iterdir()) == []


TINY = Path(__file__).parents[2] / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
