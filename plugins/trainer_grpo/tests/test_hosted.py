"""The trainer in a real child process, behind core's hosting."""

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import OutOfMemory, TrainingDiverged
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedTrainer
from plugins.trainer_grpo.tests.conftest import refuse_memory_beyond


@asynccontextmanager
async def hosted(model, directory, **options):
    directory.mkdir(exist_ok=True)
    build = {
        "kind": "trainer",
        "name": "grpo",
        "options": {"learning_rate": 1e-2, **options},
        "context": {
            "directory": str(directory), "model": str(model), "seed": 0, "deterministic": True,
            "transport": "checkpoint", "devices": ["cpu"], "threads": 1,
        },
    }  # fmt: skip
    child = await Child.start("trainer", build, directory / "log", threads=1)
    try:
        yield HostedTrainer(child)
    finally:
        await child.close()


async def test_a_hosted_trainer_does_what_one_in_this_process_does(open_trainer, make_batch, model_of, gate, tmp_path):
    here = await open_trainer()
    async with hosted(model_of(), tmp_path / "child") as there:
        info = await there.open()
        assert (info.architecture, info.threads) == ("Qwen3ForCausalLM", 1)
        for seed in range(2):
            batch = make_batch(seed)
            mine, theirs = await here.step(batch, gate), await there.step(batch, gate)
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-6)
            assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert gate.entered == 4
        sequence = np.arange(2, 20, dtype=np.int32)
        assert (await there.logprobs([sequence]))[0] == pytest.approx((await here.logprobs([sequence]))[0], abs=1e-4)
        (tmp_path / "saved").mkdir()
        await there.save(tmp_path / "saved")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        for one, other in zip(here.model.parameters(), saved.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)  # Adam normalises tiny gradients
        await there.restore(tmp_path / "saved")
        await there.step(make_batch(3), gate)
    assert there.child.process.popen.returncode is not None


async def test_errors_keep_their_class_across_the_process_boundary(make_batch, model_of, gate, tmp_path):
    batch = make_batch()
    async with hosted(model_of(), tmp_path / "child") as trainer:
        await trainer.open()
        with pytest.raises(TrainingDiverged):
            await trainer.step(replace(batch, advantages=np.where(batch.trained, 3e38, 0).astype(np.float32)), gate)
        assert gate.entered == 0


async def test_an_allocation_that_the_system_refuses_torch_is_an_error_of_that_name(
    make_batch, model_of, gate, tmp_path
):
    async with hosted(model_of(), tmp_path / "child") as trainer:
        await trainer.open()
        await trainer.step(make_batch(), gate)
        refuse_memory_beyond(trainer.child.process.pid, 32 << 20)
        with pytest.raises(
            OutOfMemory, match=r"trainer was refused memory: RuntimeError: .*can't allocate memory"
        ) as raised:
            await trainer.logprobs([np.full(1 << 18, 2, np.int32)])
        assert "atropos_trainer_grpo" in str(raised.value) and "ulimit -v" in str(raised.value)
        await trainer.step(make_batch(1), gate)


@pytest.mark.parametrize("before_writing", [True, False], ids=["in a forward pass", "in the optimiser"])
async def test_an_allocation_that_is_refused_inside_an_update_is_an_error_of_that_name_too(
    make_batch, large_model, tmp_path, before_writing
):
    @asynccontextmanager
    async def writing():
        seen.append("entered")
        if not before_writing:  # Adam's moments are made in the first update: twice the parameters
            refuse_memory_beyond(pid, 4 << 20)
        try:
            yield
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    seen: list[str] = []
    async with hosted(large_model, tmp_path / "child") as trainer:
        pid = trainer.child.process.pid
        await trainer.open()
        if before_writing:
            refuse_memory_beyond(pid, 4 << 20)
        with pytest.raises(OutOfMemory, match=r"trainer was refused memory: RuntimeError: .*can't allocate") as raised:
            await trainer.step(make_batch(), writing)
        assert seen == ([] if before_writing else ["entered", "RemoteError"]), "the bridge is told"
        assert ("logprobs.py" if before_writing else "optimizer.py") in str(raised.value), "where that was"
