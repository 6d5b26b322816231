"""The bridge between two real processes: engine "hf" in one, trainer "grpo" in the other."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftConfig

from atropos_bridge_lora.bridge import LoraBridge
from atropos_core.errors import CheckpointError, DeadlineExceeded, FitError, WeightsMismatch
from atropos_core.types import Sampling
from tests.scenes import differences, update


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "adapters").iterdir())


@pytest.mark.slow
async def test_after_each_update_every_engine_samples_from_the_adapter_of_the_trainer(
    open_scene: Any, tmp_path: Path
) -> None:
    scene = await open_scene(trainer={"lora": {"rank": 8, "learning_rate": 1e-2}}, replicas=1)
    probe = (await scene.batch(0)).tokens[:40]
    [start] = await scene.parts.trainer.logprobs([probe])
    for version in range(1, 6):
        await update(scene, version)
        assert np.max(await differences(scene)) <= 1e-4
        published = scene.parts.bridge.published
        assert published.version == version
        assert published.bytes_copied == published.bytes_on_disk > 100_000
        assert names(tmp_path) == [f"v{v:06d}" for v in (version - 1, version)]
    [end] = await scene.parts.trainer.logprobs([probe])
    assert np.abs(end - start).max() > 0.5
    assert PeftConfig.from_pretrained(str(tmp_path / "adapters/v000005")).r == 8
    assert {path.name for path in (tmp_path / "adapters/v000005").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    await scene.parts.bridge.close()
    await scene.parts.bridge.close()
    assert not (tmp_path / "adapters").exists()


async def is_paused(scene: Any) -> bool:
    """Check that every engine is paused, then resume them."""
    for engine in scene.parts.engines:
        with pytest.raises(DeadlineExceeded):
            await engine.sample(scene.prompt, 1, Sampling(max_tokens=2), [0], 0.3)
        await engine.resume(0)
    return True


@pytest.mark.slow
async def test_whatever_goes_wrong_inside_comes_out_and_leaves_every_engine_paused(
    open_scene: Any, tmp_path: Path
) -> None:
    scene = await open_scene(replicas=1)
    bridge = scene.parts.bridge
    with pytest.raises(ZeroDivisionError):
        async with bridge.writing(1):
            assert set((await scene.sample()).policy_version.tolist()) == {0}  # they sample on
            raise ZeroDivisionError
    assert await is_paused(scene)

    writes = asyncio.Event()

    async def write() -> None:
        async with bridge.writing(1):
            writes.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(write())
    await asyncio.wait_for(writes.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await is_paused(scene)

    shutil.rmtree(tmp_path / "adapters")
    (tmp_path / "adapters").touch()  # a file in its place, so that nothing can be written there
    with pytest.raises(CheckpointError, match="cannot write the adapter"):
        async with bridge.writing(1):
            pass
    assert await is_paused(scene)
    assert bridge.published is None
    (tmp_path / "adapters").unlink()


async def test_stale_adapters_go_at_connect_and_older_ones_once_there_are_more_than_keep(
    open_scene: Any, tmp_path: Path
) -> None:
    for stale in ("v000007", ".v000008.partial"):
        (tmp_path / "adapters" / stale).mkdir(parents=True)
        (tmp_path / "adapters" / stale / "adapter_config.json").write_text("{")
    scene = await open_scene(bridge={"keep": 4})
    assert names(tmp_path) == ["v000000"]
    for version in range(1, 7):
        async with scene.parts.bridge.writing(version):
            pass
    assert names(tmp_path) == ["v000003", "v000004", "v000005", "v000006"]


async def test_a_trainer_without_an_adapter_is_refused_at_connect(tmp_path: Path) -> None:
    import torch

    from atropos_bridge_lora.config import LoraBridgeOptions
    from atropos_core.plugins.provider import RunContext
    from atropos_core.processes.endpoints import LocalEndpoint

    holder = type("Holder", (), {"model": torch.nn.Linear(2, 2)})()
    endpoint = LocalEndpoint(holder)
    bridge = LoraBridge(LoraBridgeOptions(), RunContext(tmp_path, tmp_path))
    await endpoint.load_extension(bridge.extensions()["trainer"])
    with pytest.raises(WeightsMismatch, match="a bare Linear"):
        await bridge.connect(endpoint, [])


async def test_lora_with_another_bridge_is_refused_with_what_to_type(open_scene: Any) -> None:
    with pytest.raises(FitError, match="Use --bridge lora"):
        await open_scene(trainer={"lora": {"rank": 4}}, bridge={"use": "checkpoint"})


def test_the_supervisors_part_imports_neither_torch_nor_peft() -> None:
    import subprocess
    import sys

    program = "import sys, atropos_bridge_lora.plugin, atropos_bridge_lora.bridge; print({'torch', 'peft'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
