"""The bridge between real processes: engines "hf" in some, trainer "grpo" in another, in one group over gloo."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_bridge_nccl import BROKE_OFF
from atropos_bridge_nccl.bridge import NcclBridge
from atropos_bridge_nccl.config import NcclBridgeOptions
from atropos_bridge_nccl.plugin import build
from atropos_core.errors import DeadlineExceeded, FitError, ProcessDied, WeightsMismatch
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.types import Sampling
from atropos_testing import bridge_contract
from tests.scenes import differences, update

test_contract = bridge_contract("nccl", engine="hf", trainer="grpo")


async def is_paused(scene: Any, engine: Any) -> bool:
    with pytest.raises(DeadlineExceeded):
        await engine.sample(scene.prompt, 1, Sampling(max_tokens=2), [0], 0.3)
    return True


def pid_of(component: Any) -> int:
    return int(component.behind.child.process.pid)


def listening(pid: int) -> set[int]:
    """Ports of TCP at which a process listens."""
    text = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[3].rpartition(":")[2]) for line in text.splitlines() if f"pid={pid}," in line}


@pytest.mark.slow
async def test_after_each_broadcast_every_engine_samples_from_the_weights_of_the_trainer(open_scene: Any) -> None:
    scene = await open_scene(replicas=1, bridge={"every": 2}, max_staleness=1)
    bridge, [first, second] = scene.parts.bridge, scene.parts.engines
    probe = (await scene.batch(0)).tokens[:40]
    [start] = await first.logprobs([probe])
    published = []
    for version in (1, 2, 3, 4):
        await update(scene, version)
        published += [version] if bridge.published is not None else []
    assert published == [1, 2, 4]
    assert np.max(await differences(scene)) <= 1e-4
    [end], [same] = await first.logprobs([probe]), await second.logprobs([probe])
    assert np.array_equal(end, same), "both have received the same bits"
    assert np.abs(end - start).max() > 0.5
    assert (bridge.published.version, bridge.published.bytes_copied) == (4, 2 * 4 * 766_080)
    await update(scene, 5)
    assert bridge.published is None
    assert set((await scene.sample()).policy_version.tolist()) == {4}
    await bridge.publish(5)  # as before the run's last evaluation
    assert np.max(await differences(scene)) <= 1e-4
    assert set((await scene.sample()).policy_version.tolist()) == {5}
    ports = listening(pid_of(scene.parts.trainer))
    assert ports, "the trainer listens"

    # Meanwhile another run's group meets at its own port.
    other = await open_scene()
    assert not ports & listening(pid_of(other.parts.trainer))
    await update(other, 1)
    assert np.max(await differences(other)) <= 1e-4

    # And whatever goes wrong inside comes out, and leaves every engine paused, as it was.
    with pytest.raises(ZeroDivisionError):
        async with bridge.writing(6):
            assert set((await scene.sample()).policy_version.tolist()) == {5}  # they sample on
            raise ZeroDivisionError
    for engine in scene.parts.engines:
        assert await is_paused(scene, engine)
        await engine.resume(5)
    assert np.max(await differences(scene)) <= 1e-4
    await bridge.close()
    await bridge.close()


@pytest.mark.slow
async def test_what_is_in_flight_goes_on_under_the_new_weights(open_scene: Any) -> None:
    scene = await open_scene()
    [engine], trainer = scene.parts.engines, scene.parts.trainer
    for version in range(1, 11):
        batch = await scene.batch(version)
        sampling = asyncio.ensure_future(engine.sample(scene.prompt, 8, Sampling(max_tokens=64), range(8), 60))
        await asyncio.sleep(0.01 * version)
        await trainer.step(batch, lambda version=version: scene.parts.bridge.writing(version))
        made = await sampling
        mixed = [one for one in made if set(one.policy_version.tolist()) == {version - 1, version}]
        for completion in mixed:
            [own] = await trainer.logprobs([np.concatenate([scene.prompt, completion.tokens])])
            new = completion.policy_version == version
            assert np.abs(own[len(scene.prompt) :] - completion.logprobs)[new].max() <= 1e-4
        if mixed:
            return
    raise AssertionError("nothing was in flight at any update")


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["engine", "trainer"])
async def test_a_process_that_is_killed_in_a_broadcast_ends_it_by_its_name(open_scene: Any, whose: str) -> None:
    scene = await open_scene(replicas=1, bridge={"deadline_s": 60})
    await update(scene, 1)
    killed = scene.parts.engines[1] if whose == "engine" else scene.parts.trainer
    delay = random.Random(whose).uniform(0, 0.02)
    asyncio.get_running_loop().call_later(delay, os.kill, pid_of(killed), signal.SIGKILL)
    began = asyncio.get_running_loop().time()
    with pytest.raises(ProcessDied, match=rf"{whose}.* was killed by SIGKILL"):
        for _ in range(1000):
            await scene.parts.bridge.publish(2)
    assert asyncio.get_running_loop().time() - began < 50, "before its deadline"
    assert await is_paused(scene, scene.parts.engines[0])


@pytest.mark.slow
async def test_an_engine_that_is_stuck_is_named_at_the_deadline(open_scene: Any) -> None:
    scene = await open_scene(replicas=1, bridge={"deadline_s": 2})
    bridge, [first, second] = scene.parts.bridge, scene.parts.engines
    await update(scene, 1)
    await second.pause()
    os.kill(pid_of(second), signal.SIGSTOP)
    second.pause = _nothing  # it is paused, and a call would wait for its process
    began = asyncio.get_running_loop().time()
    try:
        with pytest.raises(DeadlineExceeded, match=r"waits for engine 1 in vain|engine-n0: .* is stopped") as caught:
            await bridge._publish(2)
        assert "a broadcast of weights broke off" in f"{caught.value}{''.join(getattr(caught.value, '__notes__', ()))}"
        assert 2 <= asyncio.get_running_loop().time() - began < 40
        assert await is_paused(scene, first)
    finally:
        os.kill(pid_of(second), signal.SIGKILL)


async def _nothing() -> None:
    """In place of a call to a process that is stopped."""


async def test_ends_with_other_tensors_are_refused_before_anything_is_replaced(open_scene: Any, tmp_path: Path) -> None:
    scene = await open_scene()
    [engine], trainer = scene.parts.engines, scene.parts.trainer.endpoint
    described = (await engine.endpoint.call("open"))[0]["tensors"]
    named, dtype, _shape = described[0]
    with pytest.raises(WeightsMismatch, match=rf"'{named}' is \[.*\] in the trainer, and \[3\] at the other end"):
        await trainer.call("open", [[named, dtype, [3]], *described[1:]], "", "")
    (tmp_path / "other").mkdir()
    for path in Path(scene.parts.bridge._model).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    header = json.dumps({named: {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "other/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(WeightsMismatch, match=rf"'{named}' is \[.*\] in the trainer, and \[3\] among the weights in"):
        await trainer.call("open", None, "", str(tmp_path / "other"))
    # A version that the trainer does not send: nothing is received.
    probe = scene.prompt[:20]
    [before] = await engine.logprobs([probe])
    await engine.pause()
    ends = [trainer.call("send", 8), engine.endpoint.call("receive", 9, described)]
    with pytest.raises(WeightsMismatch, match="the trainer sends as 8, and this engine as 9"):
        await asyncio.gather(*ends)
    await engine.resume(0)
    [after] = await engine.logprobs([probe])
    assert np.array_equal(before, after)


async def test_an_end_that_never_comes_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    import torch

    trainer = LocalEndpoint(type("Holder", (), {"model": torch.nn.Linear(2, 2)})())
    await trainer.load_extension("atropos_bridge_nccl.trainer_extension:TrainerExtension")
    opened = (await trainer.call("open", None, "", ""))[0]
    where = {
        "size": 2,
        "backend": "gloo",
        "number": 1,
        "deadline_s": 1.0,
        "host": opened["host"],
        "port": opened["port"],
    }
    with pytest.raises(FitError, match=rf"rank 0 of 2 cannot join the others at 127.0.0.1:{opened['port']} over gloo"):
        await trainer.call("join", where)


def test_a_first_broadcast_that_fails_names_where_the_ends_were_to_meet() -> None:
    """As NCCL's does if two processes are on one GPU."""
    import torch

    from atropos_bridge_nccl.group import Group
    from atropos_torch_models.network import LOOPBACK, listen

    listening, cpu = listen(LOOPBACK), torch.device("cpu")
    host, port = listening.getsockname()[:2]
    where = {"host": host, "port": port, "size": 2, "backend": "gloo", "number": 1, "deadline_s": 2.0}
    silent = Group.__new__(Group)
    silent._timeout = timedelta(seconds=2)
    with ThreadPoolExecutor(1) as others:
        meeting = others.submit(silent._meet, where, 0, listening)
        with pytest.raises(
            FitError, match=rf"rank 1 of 2 cannot join the others at {host}:{port} over gloo: {BROKE_OFF}"
        ):
            Group(where, 1, cpu)
        meeting.result()


def test_falling_further_behind_than_staleness_allows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"fall 3 versions behind"):
        build(NcclBridgeOptions(every=4), RunContext(tmp_path, tmp_path, max_staleness=2))


def test_the_supervisors_part_imports_no_torch() -> None:
    program = "import sys, atropos_bridge_nccl.plugin, atropos_bridge_nccl.bridge; print({'torch'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"


async def test_ends_on_cpus_meet_over_gloo_all_on_gpus_over_nccl_and_others_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for devices, backend in (
        (("cpu", ["cpu"]), "gloo"),
        (("cuda", ["cuda", "cuda"]), "nccl"),
        (("cpu", ["cuda"]), "gloo"),
    ):
        trainer, engine = End(devices[0]), End(devices[1])
        engine.endpoint = engine  # type: ignore[attr-defined]
        await NcclBridge(NcclBridgeOptions(), RunContext(tmp_path, tmp_path)).connect(trainer, [engine])  # type: ignore[arg-type, list-item]
        assert (trainer.where["backend"], trainer.where["size"]) == (backend, 1 + len(devices[1]))
        assert ("pass host memory and gloo" in "".join(capsys.readouterr())) is (devices[0] != devices[1][0])


class End:
    """Of a machine with GPUs, which there need not be: what it tells of its devices."""

    host = ""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.where: dict[str, Any] = {}

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> tuple[Any, list[int]]:
        if method == "join":
            self.where = arguments[0]
        told = {"tensors": [], "device": self._device, "devices": self._device, "host": "127.0.0.1", "port": 1}
        return (told if method == "open" else None), []
