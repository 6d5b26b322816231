"""`--bridge checkpoint` on a real vLLM: it reloads what the trainer has saved, and what is in flight goes on with that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.ends import connected, five_updates
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

pytestmark = pytest.mark.timeout(400)

PUBLISHES = 6
CHANGES: dict[str, Any] = {
    "trainer": {"learning_rate": 5e-3, "old_logprobs": "recompute"},
    "engine": {"enforce_eager": True},
}


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
async def test_every_token_is_of_the_weights_it_names_over_reloads_and_engine_and_trainer_agree(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    async with connected(models[family], "checkpoint", tmp_path, CHANGES) as ends:
        load = await publish_under_load(ends, tmp_path / "saved", publishes=PUBLISHES, concurrent=8)
        assert len(load.answers) == load.requests
        assert load.mixed > 0, "what was in flight went on under the new weights"
        worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
        print(f"{family}: {compared} tokens under {PUBLISHES} reloads {worst:.1e} nats off, p95 {load.p95_s():.3f} s")
        assert compared == load.tokens
        assert worst <= 1e-4

        seen = await five_updates(ends)
        print(f"{family}: differences {seen.difference}, probe {seen.probe_shift}, publish {seen.publish_s}")
        assert np.max(seen.difference) <= 1e-4
        assert seen.probe_shift > 0.5
        assert [path.name for path in (tmp_path / "published").iterdir()] == [f"v{PUBLISHES + 5:06d}"]
    assert not (tmp_path / "published").exists()
