"""The bridge between two real processes: engine "hf" in one, trainer "grpo" in the other."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_bridge_delta.bridge import DeltaBridge
from atropos_bridge_delta.config import DeltaBridgeOptions
from atropos_bridge_delta.plugin import build
from atropos_core.errors import AtroposError, DeadlineExceeded, FitError, ProcessDied, WeightsMismatch
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling
from atropos_testing import bridge_contract
from tests.scenes import differences, update

test_contract = bridge_contract("delta", engine="hf", trainer="grpo")


async def digests(scene: Any) -> set[str]:
    """Of the trainer's copy and of every engine's weights."""
    ends = [scene.parts.trainer.endpoint, *(engine.endpoint for engine in scene.parts.engines)]
    return {(await end.call("digest"))[0] for end in ends}


async def is_paused(scene: Any, version: int) -> bool:
    """Check that every engine is paused, then resume them."""
    for engine in scene.parts.engines:
        with pytest.raises(DeadlineExceeded):
            await engine.sample(scene.prompt, 1, Sampling(max_tokens=2), [0], 0.3)
        await engine.resume(version)
    return True


@pytest.mark.slow
async def test_after_each_update_every_engine_has_the_trainers_weights_bit_for_bit(open_scene: Any) -> None:
    scene = await open_scene(replicas=1)
    bridge = scene.parts.bridge
    assert len(await digests(scene)) == 1  # at the start nothing was sent: both have read the same files
    assert bridge.published is None
    before: set[str] = set()
    for version in range(1, 5):
        await update(scene, version)
        assert np.max(await differences(scene)) <= 1e-4
        now = await digests(scene)
        assert len(now) == 1 and not now & before
        before |= now
        published = bridge.published
        assert (published.version, published.bytes_copied) == (version, 2 * bridge.update["size"])  # two engines
        assert bridge.update["size"] <= 1.10 * bridge.update["least"]

    # In the same scene: whatever goes wrong inside comes out, and leaves every engine paused, as it was.
    with pytest.raises(ZeroDivisionError):
        async with bridge.writing(5):
            assert set((await scene.sample()).policy_version.tolist()) == {4}  # they sample on
            raise ZeroDivisionError
    assert await is_paused(scene, 4)
    assert await digests(scene) == now

    # An engine that is in another state is sent all.
    one = scene.parts.engines[1].endpoint
    await one.load_extension(bridge.extensions()["engine"])  # which knows nothing of what the engine has
    await update(scene, 5)
    assert len(await digests(scene)) == 1
    assert bridge.published.bytes_copied > bridge.update["size"] + 2_000_000
    await bridge.close()
    await bridge.close()


@pytest.mark.slow
async def test_weights_of_16_bits_change_in_few_places_and_travel_from_a_trainer_of_32(open_scene: Any) -> None:
    trainer = {"learning_rate": 1e-5, "dtype": "float32"}
    scene = await open_scene(trainer=trainer, engine={"dtype": "bfloat16"}, max_logprob_diff=0.5)
    for version in range(1, 4):
        await update(scene, version)
        facts = scene.parts.bridge.update
        assert 0 < facts["changed"] < 0.3 * facts["elements"]
        assert facts["size"] <= 1.10 * facts["least"] < 0.3 * 2 * facts["elements"]
        assert len(await digests(scene)) == 1


async def test_a_connection_that_breaks_off_leaves_the_engine_as_it_was(open_scene: Any) -> None:
    scene = await open_scene()
    bridge, [engine] = scene.parts.bridge, scene.parts.engines
    whole = await digests(scene)
    facts = (await scene.parts.trainer.endpoint.call("whole"))[0]
    piece = (await scene.parts.trainer.endpoint.call("read", "whole", 0, 1000))[0]
    await engine.endpoint.call("take", "next", 0, piece)
    for state in ("next", "other"):  # half of it is there, nothing is
        with pytest.raises(WeightsMismatch, match=r"Nothing of it was applied|nothing has arrived"):
            await engine.endpoint.call("check", state, facts["size"], facts["digest"])
    with pytest.raises(WeightsMismatch, match="changes weights of state elsewhere"):
        await engine.endpoint.call("apply", "elsewhere", "next")
    assert await digests(scene) == whole
    await update(scene, 1)  # and what comes next is not mixed with it
    assert len(await digests(scene)) == 1
    state = bridge.update["state"]
    await engine.endpoint.call("apply", "", state)  # a second time: nothing
    assert len(await digests(scene)) == 1


@pytest.mark.parametrize("whose", ["engine", "trainer"])
async def test_a_process_that_is_killed_ends_the_publication_by_its_name(open_scene: Any, whose: str) -> None:
    scene = await open_scene(replicas=1)
    await update(scene, 1)
    killed = scene.parts.engines[1] if whose == "engine" else scene.parts.trainer
    os.kill(killed.behind.child.process.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=rf"{whose}.* was killed by SIGKILL"):
        await scene.parts.bridge.publish(2)
    first = scene.parts.engines[0]
    with pytest.raises(DeadlineExceeded):  # it is paused
        await first.sample(scene.prompt, 1, Sampling(max_tokens=2), [0], 0.3)


async def test_a_run_that_ends_while_an_update_is_applied_leaves_it_applied(open_scene: Any) -> None:
    scene = await open_scene()
    bridge, [engine] = scene.parts.bridge, scene.parts.engines
    sent = await bridge._send_whole([engine], "is sent one")
    await engine.pause()
    asking = asyncio.ensure_future(engine.endpoint.call("apply", "", sent["state"]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await engine.endpoint.call("apply", "", sent["state"])
    assert len(await digests(scene)) == 1


@pytest.mark.slow
async def test_an_engine_that_another_run_has_left_begins_with_the_model_on_its_own_disk(
    open_scene: Any, tmp_path: Path
) -> None:
    scene = await open_scene(bridge={"every": 3}, max_staleness=2)
    bridge, [engine] = scene.parts.bridge, scene.parts.engines
    base = await digests(scene)
    published = []
    for version in (4, 5, 6, 7):
        await update(scene, version)
        published += [version] if bridge.published is not None else []
    assert published == [4, 6]
    await bridge.publish(7)  # as before the run's last evaluation
    assert len(await digests(scene)) == 1
    assert np.max(await differences(scene)) <= 1e-4
    await engine.pause()  # as a run that is killed leaves it

    engine.outlives_run = True
    other = await open_scene()  # whose trainer has the base model
    other.parts.bridge = DeltaBridge(DeltaBridgeOptions(), RunContext(tmp_path, bridge._model))
    await engine.endpoint.load_extension(bridge.extensions()["engine"])
    await other.parts.trainer.endpoint.load_extension(bridge.extensions()["trainer"])
    await other.parts.bridge.connect(other.parts.trainer.endpoint, [engine])
    assert (await engine.endpoint.call("digest"))[0] in base
    assert set((await scene.sample()).policy_version.tolist()) == {0}


class ByDirectory:
    """Like an engine with a separate server: it has no model in this process, and loads directories."""

    def __init__(self, engine: Any) -> None:
        self.load_weights = engine.load_weights


def by_directory(engine: Any) -> Any:
    from atropos_bridge_delta.engine_extension import EngineExtension

    return EngineExtension(ByDirectory(engine))


@pytest.mark.slow
async def test_an_engine_that_loads_directories_reads_a_copy_beside_it(open_scene: Any, tmp_path: Path) -> None:
    scene = await open_scene()
    [engine], trainer, options = scene.parts.engines, scene.parts.trainer, DeltaBridgeOptions()
    for is_known in (True, False):  # whether the engine's machine has the run's model under the same path
        model = scene.parts.bridge._model if is_known else tmp_path / "missing"
        scene.parts.bridge = bridge = DeltaBridge(options, RunContext(tmp_path, model))
        await engine.endpoint.load_extension(f"{__file__}:by_directory")
        await trainer.endpoint.load_extension(bridge.extensions()["trainer"])
        await bridge.connect(trainer.endpoint, [engine])
        for version in (1, 2):
            await update(scene, version)
            assert len(await digests(scene)) == 1  # of the directory
            assert np.max(await differences(scene)) <= 1e-4  # of what the engine computes with
        pid = engine.behind.child.process.pid
        assert len(copies := list(Path(tempfile.gettempdir()).glob(f"atropos-delta-*-{pid}-*"))) == 1
        await bridge.close()
        await bridge.close()
        assert not copies[0].exists()


async def test_where_no_engine_tells_its_dtype_the_option_does(tmp_path: Path) -> None:
    import torch

    from atropos_core.processes.endpoints import LocalEndpoint

    trainer = LocalEndpoint(type("Holder", (), {"model": torch.nn.Linear(100, 100)})())
    sizes = {}
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        bridge = DeltaBridge(DeltaBridgeOptions(dtype=dtype), RunContext(tmp_path, tmp_path))
        await trainer.load_extension(bridge.extensions()["trainer"])
        await bridge.connect(trainer, [])
        sizes[dtype] = (await trainer.call("whole"))[0]["least"]
    assert sizes == {"auto": 40_400, "float32": 40_400, "bfloat16": 20_200, "float16": 20_200}


def test_falling_further_behind_than_staleness_allows_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"fall 3 versions behind") as found:
        build(DeltaBridgeOptions(every=4), RunContext(tmp_path, tmp_path, max_staleness=2))
    assert found.value.remedy == "Set training.max_staleness=3, or bridge.every=3."
    build(DeltaBridgeOptions(every=4), RunContext(tmp_path, tmp_path, max_staleness=3))


async def test_ends_with_other_tensors_are_refused_by_the_name_of_the_first(open_scene: Any) -> None:
    scene = await open_scene()
    described = (await scene.parts.engines[0].endpoint.call("open"))[0]
    named, dtype, _shape = described[0]
    with pytest.raises(WeightsMismatch, match=rf"'{named}' is \[.*\] in the trainer, and \[3\] at the other end"):
        await scene.parts.trainer.endpoint.call("open", [[named, dtype, [3]], *described[1:]], "auto")
    with pytest.raises(WeightsMismatch, match=rf"'{named}' is \[.*\] in the engine, and nothing at the other end"):
        await scene.parts.engines[0].endpoint.call("begin", described[1:], "", "", "{}")


async def test_an_update_that_failed_half_way_is_the_last(open_scene: Any) -> None:
    """The engines' weights are unknown then, so no later change may be sent to them."""
    scene = await open_scene()
    trainer = scene.parts.trainer.endpoint
    await trainer.load_extension(f"{__file__}:WithoutRoom")
    await scene.parts.bridge.connect(trainer, scene.parts.engines)
    with pytest.raises(AtroposError, match="cannot write an update"):
        await scene.parts.bridge.publish(1)
    with pytest.raises(AtroposError, match="failed half-way"):
        await scene.parts.bridge.publish(1)


def WithoutRoom(holder: Any) -> Any:
    """On a machine whose disk is full as soon as it is written."""
    from atropos_bridge_delta.trainer_extension import TrainerExtension

    class Full(TrainerExtension):
        def _anew(self, kind: str) -> Any:
            return open("/dev/full", "wb")

    return Full(holder)


def test_the_supervisors_part_imports_neither_torch_nor_numpy_arrays_of_weights() -> None:
    import subprocess
    import sys

    program = "import sys, atropos_bridge_delta.plugin, atropos_bridge_delta.bridge; print({'torch', 'safetensors'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
