"""The bridge between two real processes: engine "hf" in one, trainer "grpo" in the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from atropos_bridge_checkpoint.bridge import CheckpointBridge
from atropos_bridge_checkpoint.config import CheckpointBridgeOptions
from atropos_bridge_checkpoint.plugin import build
from atropos_core.errors import AtroposError, CheckpointError, DeadlineExceeded, FitError, WeightsMismatch
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling
from atropos_testing import bridge_contract
from tests.scenes import differences, update

test_contract = bridge_contract("checkpoint", engine="hf", trainer="grpo")


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "published").iterdir())


@pytest.mark.slow
async def test_after_each_update_every_engine_samples_from_the_weights_of_the_trainer(
    open_scene: Any, tmp_path: Path
) -> None:
    scene = await open_scene(replicas=1)
    bridge = scene.parts.bridge
    probe = (await scene.batch(0)).tokens[:40]
    [start] = await scene.parts.trainer.logprobs([probe])
    for version in range(1, 6):
        await update(scene, version)
        assert np.max(await differences(scene)) <= 1e-4
        assert names(tmp_path) == [f"v{version:06d}"]
        on_disk = sum(path.stat().st_size for path in (tmp_path / f"published/v{version:06d}").iterdir())
        assert (bridge.published.version, bridge.published.bytes_on_disk) == (version, on_disk)
    [end] = await scene.parts.trainer.logprobs([probe])
    assert np.abs(end - start).max() > 0.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published/v000005")
    assert sum(parameter.numel() for parameter in model.parameters()) == 766_080
    assert AutoTokenizer.from_pretrained(tmp_path / "published/v000005").chat_template

    # In the same scene: whatever goes wrong inside comes out, and leaves every engine paused.
    with pytest.raises(ZeroDivisionError):
        async with bridge.writing(6):
            assert set((await scene.sample()).policy_version.tolist()) == {5}  # they sample on
            raise ZeroDivisionError
    assert await is_paused(scene, 5)
    old = (tmp_path / "published").rename(tmp_path / "aside")
    (tmp_path / "published").touch()  # a file in its place, so that nothing can be written there
    with pytest.raises(CheckpointError, match=r"cannot write .*v000006"):
        async with bridge.writing(6):
            pass
    assert await is_paused(scene, 5)
    assert bridge.published.version == 5
    (tmp_path / "published").unlink()
    old.rename(tmp_path / "published")
    await bridge.close()
    await bridge.close()
    assert not (tmp_path / "published").exists()


async def is_paused(scene: Any, version: int) -> bool:
    """Check that every engine is paused, then resume them."""
    for engine in scene.parts.engines:
        with pytest.raises(DeadlineExceeded):
            await engine.sample(scene.prompt, 1, Sampling(max_tokens=2), [0], 0.3)
        await engine.resume(version)
    return True


@pytest.mark.slow
async def test_with_every_the_versions_that_it_divides_are_published_and_the_first_of_a_connection(
    open_scene: Any, tmp_path: Path
) -> None:
    for stale in ("v000004", "v000009", ".v000010.partial"):  # of a run that was killed after its step 10
        (tmp_path / "published" / stale).mkdir(parents=True)
        (tmp_path / "published" / stale / "model.safetensors").touch()
    scene = await open_scene(bridge={"every": 3, "keep": 2}, max_staleness=2)
    assert names(tmp_path) == ["v000004", "v000009"]  # until there is a later one that is loaded
    published, seen = [], []
    for version in range(
        4, 11
    ):  # its checkpoint was of version 4: that must reach the engine, which has the base model
        await update(scene, version)
        if scene.parts.bridge.published is not None:
            published.append(version)
            assert np.max(await differences(scene)) <= 1e-4
        seen += sorted(set((await scene.sample()).policy_version.tolist()))
    assert published == [4, 6, 9]
    assert seen == [4, 4, 6, 6, 6, 9, 9]
    assert names(tmp_path) == ["v000006", "v000009"]

    # In the same scene: the next run, with an engine that another has left as it was killed.
    [engine] = scene.parts.engines
    engine.outlives_run = True
    await engine.pause()
    options = CheckpointBridgeOptions(every=3, keep=2)
    scene.parts.bridge = CheckpointBridge(options, RunContext(tmp_path, scene.parts.bridge._model, max_staleness=2))
    await scene.parts.bridge.connect(scene.parts.trainer.endpoint, [engine])
    assert scene.parts.bridge.published is None
    assert set((await scene.sample()).policy_version.tolist()) == {0}
    assert np.max(await differences(scene)) <= 1e-4
    await update(scene, 7)  # it may be resumed: what it publishes first is due
    assert scene.parts.bridge.published.version == 7
    assert np.max(await differences(scene)) <= 1e-4
    assert names(tmp_path) == ["v000007"]

    await scene.parts.bridge.publish(10)  # as before the run's last evaluation
    assert scene.parts.bridge.published.version == 10
    assert set((await scene.sample()).policy_version.tolist()) == {10}
    assert np.max(await differences(scene)) <= 1e-4
    assert names(tmp_path) == ["v000007", "v000010"]
    await scene.parts.trainer.close()
    with pytest.raises(AtroposError):
        await scene.parts.bridge.publish(11)
    assert await is_paused(scene, 10)


async def test_the_one_before_stands_until_every_engine_has_loaded_the_next(open_scene: Any, tmp_path: Path) -> None:
    scene = await open_scene(replicas=1)
    second = scene.parts.engines[1]
    async with scene.parts.bridge.writing(1):
        pass
    await second.close()
    with pytest.raises(AtroposError):
        async with scene.parts.bridge.writing(2):
            pass
    assert names(tmp_path) == ["v000001", "v000002"]


def test_falling_further_behind_than_staleness_allows_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"fall 3 versions behind") as found:
        build(CheckpointBridgeOptions(every=4), RunContext(tmp_path, tmp_path, max_staleness=2))
    assert found.value.remedy == "Set training.max_staleness=3, or bridge.every=3."
    build(CheckpointBridgeOptions(every=4), RunContext(tmp_path, tmp_path, max_staleness=3))


async def test_a_trainer_of_something_else_than_a_transformers_model_is_refused(tmp_path: Path) -> None:
    import torch

    from atropos_core.processes.endpoints import LocalEndpoint

    endpoint = LocalEndpoint(type("Holder", (), {"model": torch.nn.Linear(2, 2)})())
    await endpoint.load_extension("atropos_bridge_checkpoint.trainer_extension:TrainerExtension")
    with pytest.raises(WeightsMismatch, match=r"trainer's is a Linear.*\n.*--bridge lora"):
        await endpoint.call("save", str(tmp_path / "v000001"), str(tmp_path))


def test_a_full_disk_is_a_named_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = """
import asyncio, resource, sys
from pathlib import Path
from types import SimpleNamespace
from transformers import Qwen3Config, Qwen3ForCausalLM
from atropos_bridge_checkpoint.trainer_extension import TrainerExtension

out = Path(sys.argv[1])
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # what a write then meets is like a full disk
asyncio.run(TrainerExtension(SimpleNamespace(model=model)).save(str(out / "v000001"), str(out)))
"""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.warm.program", program, str(tmp_path)], capture_output=True, text=True
    )
    assert "CheckpointError: bridge 'checkpoint' cannot write" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_supervisors_part_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    program = (
        "import sys, atropos_bridge_checkpoint.plugin, atropos_bridge_checkpoint.bridge; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
