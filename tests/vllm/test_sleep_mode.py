"""`enable_sleep_mode` on a real vLLM: its memory of keys and values goes while an update runs, and what it samples stays the same."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from atropos_core.types import Sampling, tokens
from tests.vllm.hosted import Hosted, difference, hosted, start, until_running
from tests.vllm.models import make_adapter, make_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = tokens(np.random.default_rng(3).integers(3, 150, size=200))
LONG_S = 120.0
GB = 10**9
CACHE_GB = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sleeping(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosted]:
    made = await start(
        models["qwen2"], tmp_path_factory.mktemp("run"), max_num_seqs=64, kv_cache_gb=CACHE_GB, enable_sleep_mode=True
    )
    yield made
    await made.engine.close()


def resident(served: Hosted) -> int:
    return int(served.processes["worker"].memory_info().rss)


async def is_sleeping(served: Hosted) -> bool:
    """By the server's own word."""
    headers = {"Authorization": f"Bearer {served.key}"}
    async with aiohttp.request("GET", f"{served.url}/is_sleeping", headers=headers) as response:
        return bool((await response.json())["is_sleeping"])


async def test_the_memory_of_keys_and_values_goes_and_comes_again(sleeping: Hosted) -> None:
    before = await sleeping.engine.sample(PROMPT, 8, Sampling(60), range(8), LONG_S)
    full = resident(sleeping)
    for version in range(3):
        await sleeping.engine.release_cache()
        await sleeping.engine.release_cache()  # twice is fine
        assert full - resident(sleeping) > 0.95 * CACHE_GB * GB
        again = await sleeping.engine.sample(PROMPT, 8, Sampling(60), range(8), LONG_S)
        for one, other in zip(before, again, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert difference(sleeping.model, PROMPT, again) <= 1e-4, f"after release {version}"
        assert full - resident(sleeping) > 0.9 * CACHE_GB * GB, "only what is used comes back"


async def test_weights_that_change_meanwhile_are_those_that_are_sampled_from(sleeping: Hosted, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen2", seed=5)
    before = await sleeping.engine.sample(PROMPT, 2, Sampling(30), range(2), LONG_S)
    await sleeping.engine.release_cache()
    async with sleeping.engine.paused(1):
        await sleeping.engine.load_weights(other)
    after, scored = await asyncio.gather(
        sleeping.engine.sample(PROMPT, 2, Sampling(30), range(2), LONG_S), sleeping.engine.logprobs([PROMPT])
    )
    assert {int(version) for one in after for version in one.policy_version} == {1}
    assert difference(other, PROMPT, after) <= 1e-4 < 0.5 < difference(sleeping.model, PROMPT, after)
    async with sleeping.engine.paused(2):
        await sleeping.engine.load_weights(sleeping.model)
    again = await sleeping.engine.sample(PROMPT, 2, Sampling(30), range(2), LONG_S)
    np.testing.assert_array_equal(before[0].tokens, again[0].tokens)
    assert np.isfinite(scored[0]).all()


async def test_what_is_in_flight_keeps_its_keys_and_values(sleeping: Hosted) -> None:
    waiting = asyncio.ensure_future(sleeping.engine.sample(PROMPT, 64, Sampling(300, 0.5), range(64), LONG_S))
    await until_running(sleeping, waiting)
    await sleeping.engine.release_cache()
    assert not waiting.done(), "or this shows nothing"
    assert not await is_sleeping(sleeping)
    assert difference(sleeping.model, PROMPT, await waiting) <= 1e-4
    await sleeping.engine.release_cache()
    assert await is_sleeping(sleeping)


async def test_many_that_come_at_once_after_a_release_wait_for_one_return(sleeping: Hosted) -> None:
    await sleeping.engine.release_cache()
    made = await asyncio.gather(
        *(sleeping.engine.sample(PROMPT, 2, Sampling(8), [i, i + 1], LONG_S) for i in range(60))
    )
    assert len(made) == 60
    assert difference(sleeping.model, PROMPT, [one for some in made for one in some]) <= 1e-4


async def test_a_pause_between_release_and_sampling_holds_what_comes(sleeping: Hosted) -> None:
    await sleeping.engine.release_cache()
    await sleeping.engine.pause()
    waiting = asyncio.ensure_future(sleeping.engine.sample(PROMPT, 2, Sampling(8), [1, 2], LONG_S))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await sleeping.engine.resume(9)
    assert {int(version) for one in await waiting for version in one.policy_version} == {9}
    await sleeping.engine.resume(2)


async def test_adapters_that_are_loaded_before_and_after_a_release_are_those_that_are_sampled_from(
    sleeping: Hosted, tmp_path: Path
) -> None:
    adapters = [make_adapter(tmp_path / f"v{seed}", sleeping.model, seed=seed) for seed in (1, 2)]
    announced = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}}
    options = {"kv_cache_gb": 0.5, "max_loras": 2, "enable_sleep_mode": True}
    async with hosted(sleeping.model, tmp_path / "run", announced=announced, transport="adapter", **options) as adapted:
        for version, adapter in enumerate(adapters, 1):
            await adapted.engine.load_adapter(adapter, version)
            for _ in range(2):
                made = await adapted.engine.sample(PROMPT, 2, Sampling(30), range(2), LONG_S)
                assert {int(one) for each in made for one in each.policy_version} == {version}
                assert difference(sleeping.model, PROMPT, made, adapter) <= 1e-4
                assert difference(sleeping.model, PROMPT, made) > 0.5, (
                    "an adapter that does nothing would prove nothing"
                )
                await adapted.engine.release_cache()
                assert await is_sleeping(adapted)


async def test_on_a_gpu_only_keys_and_values_are_in_the_pool_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own method says which pool; on a CPU there is none, so that it is only seen for what it is asked."""
    from vllm.v1.worker.gpu_worker import Worker

    from atropos_engine_vllm.cuda_worker import SleepingCUDAWorker

    asked: list[str] = []
    named = Worker._maybe_get_memory_pool_context
    monkeypatch.setattr(
        Worker, "_maybe_get_memory_pool_context", lambda self, tag: asked.append(tag) or named(self, tag)
    )
    worker = SleepingCUDAWorker.__new__(SleepingCUDAWorker)
    for tag in ("weights", "workspace", "runtime", "kv_cache"):
        with worker._maybe_get_memory_pool_context(tag):
            pass
    assert asked == ["kv_cache"]
    for method in (Worker.load_model, Worker.initialize_from_config):
        assert "self._maybe_get_memory_pool_context(tag=" in inspect.getsource(method), "vLLM puts it elsewhere now"
