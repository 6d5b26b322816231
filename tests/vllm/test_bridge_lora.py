"""`--bridge lora` on a real vLLM: each version is an adapter of its own, and what is in flight ends with the one it began
with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.ends import connected, five_updates
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

pytestmark = pytest.mark.timeout(400)

PUBLISHES = 12
CHANGES: dict[str, Any] = {
    "trainer": {"lora": {"rank": 8, "learning_rate": 1e-2}, "old_logprobs": "recompute"},
    "engine": {"enforce_eager": True},
}


class Spy:
    """Asks the server behind an engine what it serves."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def adapters(self) -> list[str]:
        cards = (await self._engine._opened.get("/v1/models"))["data"]
        return sorted(card["id"] for card in cards if card["id"].startswith("policy-v"))


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
async def test_requests_end_with_the_adapter_they_began_with_and_engine_and_trainer_agree(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    async with connected(models[family], "lora", tmp_path, CHANGES) as ends:
        endpoint = ends.parts.engines[0].endpoint
        await endpoint.load_extension("tests.vllm.test_bridge_lora:Spy")
        at_once: list[int] = []

        async def count() -> None:
            while True:
                at_once.append(len((await endpoint.call("adapters"))[0]))
                await asyncio.sleep(0.01)

        counting = asyncio.create_task(count())
        load = await publish_under_load(ends, tmp_path / "saved", publishes=PUBLISHES, concurrent=8)
        counting.cancel()
        assert 2 <= max(at_once) < PUBLISHES, "the next one comes while the last is in use, and unused ones go"
        assert len(load.answers) == load.requests
        assert load.mixed == 0
        worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
        print(f"{family}: {compared} tokens under {PUBLISHES} swaps {worst:.1e} nats off, p95 {load.p95_s():.3f} s")
        assert compared == load.tokens
        assert worst <= 1e-4

        seen = await five_updates(ends)
        print(f"{family}: differences {seen.difference}, probe {seen.probe_shift}, publish {seen.publish_s}")
        assert np.max(seen.difference) <= 1e-4
        assert seen.probe_shift > 0.5
        last = PUBLISHES + 5
        async with asyncio.timeout(60):  # the one before goes by itself, with no further publish
            while (await endpoint.call("adapters"))[0] != [f"policy-v{last}"]:
                await asyncio.sleep(0.05)
        assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [f"v{last - 1:06d}", f"v{last:06d}"]
    assert not (tmp_path / "adapters").exists()
