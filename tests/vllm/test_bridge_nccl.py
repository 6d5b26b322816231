"""`--bridge nccl` on a real vLLM, over gloo: its workers receive by a weight-transfer engine derived from vLLM's own for NCCL."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import ProcessDied, WeightsMismatch
from tests.vllm.ends import connected, five_updates
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

pytestmark = pytest.mark.timeout(400)

PUBLISHES = 4
CHANGES: dict[str, Any] = {
    "trainer": {"learning_rate": 5e-3, "old_logprobs": "recompute"},
    "engine": {"enforce_eager": True},
}


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
async def test_every_token_is_of_the_weights_it_names_and_engine_and_trainer_agree(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    async with connected(models[family], "nccl", tmp_path, CHANGES) as ends:
        load = await publish_under_load(ends, tmp_path / "saved", publishes=PUBLISHES, concurrent=8)
        assert len(load.answers) == load.requests
        assert load.mixed > 0, "what was in flight went on under the new weights"
        worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
        print(f"{family}: {compared} tokens under {PUBLISHES} publishes {worst:.1e} nats off, p95 {load.p95_s():.3f} s")
        assert compared == load.tokens
        assert worst <= 1e-4

        seen = await five_updates(ends)
        print(f"{family}: differences {seen.difference}, probe {seen.probe_shift}, publish {seen.publish_s}")
        assert np.max(seen.difference) <= 1e-4
        assert seen.probe_shift > 0.5
        assert set(seen.bytes_copied) == {4 * ends.info.parameters}

        # In the same scene: another version is refused by the worker's own words, and a killed trainer by its name.
        bridge, [engine], trainer = ends.parts.bridge, ends.parts.engines, ends.parts.trainer
        tensors = (await trainer.endpoint.call("open", None, "", ""))[0]["tensors"]
        await engine.pause()
        sending = bridge._call(trainer.endpoint, "send", 8)
        with pytest.raises(WeightsMismatch, match="the trainer sends as 8, and this engine as 9"):
            await bridge._together([sending, bridge._call(engine.endpoint, "receive", 9, tensors)])


async def test_a_trainer_that_is_killed_in_a_broadcast_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    async with connected(models["qwen3"], "nccl", tmp_path, CHANGES) as ends:
        os.kill(ends.parts.trainer.behind.child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(ProcessDied, match=r"trainer.* was killed by SIGKILL"):
            await ends.parts.bridge.publish(1)
