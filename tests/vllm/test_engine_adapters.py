"""Adapters that follow each other in a running vLLM."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from atropos_core.errors import DeadlineExceeded, WeightsMismatch
from atropos_core.types import Sampling, tokens
from tests.vllm.hosted import difference, hosted, until_running
from tests.vllm.models import make_adapter, make_model

pytestmark = pytest.mark.timeout(300)

PROMPT = tokens([5, 9, 33, 7, 120, 64])
LONG_S = 120.0
ANNOUNCED = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}}


async def test_each_request_ends_with_the_adapter_that_it_began_with(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", ends=False)  # or what is to be in flight may have ended
    adapters = {number: make_adapter(tmp_path / f"v{number}", model, seed=number) for number in range(1, 5)}
    async with hosted(model, tmp_path / "run", announced=ANNOUNCED, transport="adapter", max_loras=2) as made:
        engine = made.engine

        def ask(count: int, length: int, temperature: float = 1.0) -> asyncio.Future[list]:  # type: ignore[type-arg]
            return asyncio.ensure_future(
                engine.sample(PROMPT, count, Sampling(length, temperature), range(count), LONG_S)
            )

        base = await ask(2, 20)
        assert {version for one in base for version in one.policy_version.tolist()} == {0}
        assert difference(model, PROMPT, base) <= 1e-4

        await engine.load_adapter(adapters[1], 1)
        first = ask(16, 480)
        await until_running(made, first)
        await engine.load_adapter(adapters[2], 2)
        second = await ask(2, 20)
        await engine.load_adapter(adapters[3], 3)
        assert not first.done()
        third = await ask(2, 20)

        for version, completions in ((1, await first), (2, second), (3, third)):
            assert {number for one in completions for number in one.policy_version.tolist()} == {version}
            assert difference(model, PROMPT, completions, adapters[version]) <= 1e-4
        assert difference(model, PROMPT, third) > 0.5, "an adapter that does nothing would prove nothing"

        shutil.rmtree(adapters[1])
        shutil.rmtree(adapters[2])
        await engine.load_adapter(
            adapters[4], 3
        )  # the version again, as after a resume: not what is cached under its name
        again = await ask(2, 20)
        assert difference(model, PROMPT, again, adapters[4]) <= 1e-4
        assert {number for one in again for number in one.policy_version.tolist()} == {3}

        with pytest.raises(DeadlineExceeded):
            await engine.sample(PROMPT, 16, Sampling(480), range(16), 0.5)
        adapter = shutil.copytree(adapters[3], tmp_path / "v5")
        for version in range(5, 9):  # none is read again, used or not
            await engine.load_adapter(adapter, version)
            if version % 2:
                assert difference(model, PROMPT, await ask(1, 20), adapters[3]) <= 1e-4
            shutil.rmtree(adapter)
            shutil.copytree(adapters[4], adapter) if version == 7 else shutil.copytree(adapters[3], adapter)

        with pytest.raises(WeightsMismatch, match="refuses the adapter"):
            await engine.load_adapter(tmp_path / "nothing", 9)
        assert difference(model, PROMPT, await ask(2, 20), adapters[4]) <= 1e-4
        with pytest.raises(NotImplementedError, match="have the trainer score it"):
            await engine.logprobs([PROMPT])
