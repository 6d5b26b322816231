"""The bridge between two real processes: engine "hf" in one, a stand-in for a trainer in the other."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import ProcessDied
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling, tokens
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.memory import blocked_bytes
from tests.shared_memory import SharedFiles
from tests.warm.requests import start_template

PROMPT = tokens([5, 9, 33, 12, 40])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def rollup(pid: int) -> dict[str, int]:
    """Kilobytes of a process, by kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def mapping(pid: int) -> tuple[str, int]:
    """Device and inode, and the kilobytes, of the one shared segment that a process maps."""
    found = [
        line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:atropos-weights" in line
    ]
    assert len(found) == 1
    start, end = (int(part, 16) for part in found[0][0].split("-"))
    return f"{found[0][3]} {found[0][4]}", (end - start) // 1024


async def test_what_the_trainer_writes_the_engine_samples_from(connected: Any, tiny: Path) -> None:
    start_template()  # with --warm, this process keeps a connection to it
    opened, files = descriptors(), SharedFiles()
    run = await connected(tiny)
    assert descriptors() == opened + 2  # the two sockets
    engine_pid, trainer_pid = (child.process.pid for child in run.children)
    assert mapping(engine_pid) == mapping(trainer_pid)

    (before,) = await run.engine.logprobs([PROMPT])
    async with run.bridge.writing(1):
        await run.children[1].peer.call("scale", 1.5)
    assert (run.bridge.published.version, run.bridge.published.bytes_copied) == (1, 0)
    assert 0 < run.bridge.published.seconds < 60
    (after,) = await run.engine.logprobs([PROMPT])
    assert np.abs(after - before).max() > 1e-2
    async with run.bridge.writing(2):
        await run.children[1].peer.call("scale", 1 / 1.5)
    (again,) = await run.engine.logprobs([PROMPT])
    np.testing.assert_allclose(again, before, atol=1e-5)
    (completion,) = await run.engine.sample(PROMPT, 1, Sampling(4), [0], 30)
    assert set(completion.policy_version.tolist()) == {2}
    # In the same two processes: the time of a publication leaves out what happens inside.
    async with run.bridge.writing(3):
        await asyncio.sleep(4.0)
    assert run.bridge.published.version == 3
    assert run.bridge.published.seconds < 3.9

    # And an exception while writing propagates, and leaves the engine paused.
    with pytest.raises(ZeroDivisionError):
        async with run.bridge.writing(4):
            raise ZeroDivisionError
    assert run.bridge.published.version == 3
    waiting = asyncio.ensure_future(run.engine.sample(PROMPT, 1, Sampling(2), [0], 30))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()

    files.look()
    for child in run.children:
        await child.close()
    assert not files.left()


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_end_leaves_no_segment_and_the_other_goes_on(connected: Any, tiny: Path, victim: int) -> None:
    files = SharedFiles()
    run = await connected(tiny)
    files.look()
    dead, alive = run.children[victim], run.children[1 - victim]
    dead.process.popen.send_signal(signal.SIGKILL)
    with pytest.raises(ProcessDied, match="SIGKILL"):
        await dead.peer.call("call_extension", "read_sentinel", 0, deadline_s=60)
    value = await alive.peer.call("call_extension", "read_sentinel", victim, deadline_s=60)
    assert value > 0  # the weights and sentinels are still there
    for child in run.children:
        await child.close()
    assert not files.left()
    assert all(child.process.popen.poll() is not None for child in run.children)
    for child in run.children:
        assert not Path(f"/proc/{child.process.pid}").exists()


async def test_both_processes_together_hold_one_copy(
    connected: Any, make_model: Any, tiny: Path, tmp_path: Path
) -> None:
    async def measured(model: Path) -> tuple[int, list[dict[str, int]]]:
        run = await connected(model)
        pids = [child.process.pid for child in run.children]
        await run.children[1].peer.call("fault_in")
        await run.engine.logprobs([PROMPT])
        assert mapping(pids[0]) == mapping(pids[1])
        return mapping(pids[0])[1], [rollup(pid) for pid in pids]

    _, without = await measured(tiny)
    shape = dict(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8
    )
    large = make_model(tmp_path / "large", head_dim=64, **shape)
    matrices = blocked_bytes(HFOptions(), Workload(RunContext(large, large), 1, 1, 8, 1))
    segment, found = await measured(large)
    assert segment > 90_000  # 25 M parameters
    shared = sum(process["Pss_Shmem"] for process in found)
    assert 0.99 * segment < shared < 1.02 * segment + 1000
    private = [large["Private_Dirty"] - small["Private_Dirty"] for large, small in zip(found, without, strict=True)]
    blocked = matrices // 1024  # the engine's second copy of the matrices, in oneDNN's order, and nothing else
    print(f"segment {segment} kB, PSS of shared memory {shared} kB, private beyond a tiny model's {private} kB")
    assert blocked > 0.9 * segment
    # What libraries hold differs between the measurements, by up to 28 MB. One more copy is 98 MB.
    assert abs(private[0] - blocked) < segment / 2
    assert private[1] < segment / 4


def test_the_supervisors_part_imports_no_torch() -> None:
    import subprocess
    import sys

    program = "import sys, atropos_bridge_ipc.plugin, atropos_engine_hf.plugin; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_vllms_plugin_does_nothing_unless_a_run_asks_for_it() -> None:
    import subprocess
    import sys

    program = (
        "import sys\nfrom atropos_bridge_ipc.vllm.entry import register\n"
        "register()\nprint({'vllm', 'torch'} & set(sys.modules))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ATROPOS_WEIGHT_TRANSFER"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.strip() == "set()"
