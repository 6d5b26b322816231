"""`--bridge delta` on a real vLLM: a copy of the model beside it is changed, and loaded by vLLM's own loader, fused as it fuses."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.ends import connected, five_updates

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
async def test_engine_and_trainer_agree_after_each_update_of_what_changed(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    changes = {"trainer": {"learning_rate": 5e-3}, "engine": {"enforce_eager": True}}
    async with connected(models[family], "delta", tmp_path, changes) as ends:
        bridge, [engine] = ends.parts.bridge, ends.parts.engines
        seen = await five_updates(ends)
        print(f"{family}: differences {seen.difference}, probe {seen.probe_shift}, publish {seen.publish_s}")
        assert np.max(seen.difference) <= 1e-4
        assert seen.probe_shift > 0.5
        states = {(await end.call("digest"))[0] for end in (ends.parts.trainer.endpoint, engine.endpoint)}
        assert len(states) == 1, "the copy beside it is bit-equal"
        whole = bridge.update["elements"] * 4
        assert all(0 < size < 1.1 * whole for size in seen.bytes_copied)
        pid = engine.behind.child.process.pid  # type: ignore[attr-defined]
        assert len(copies := list(Path(tempfile.gettempdir()).glob(f"atropos-delta-*-{pid}-*"))) == 1
    assert not copies[0].exists()
