"""Several ranks do what one process does: real processes, FSDP2 over gloo on the CPU."""

import asyncio
import os
import shutil
import signal
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from atropos_core.errors import ConfigError, FitError, OutOfMemory, ProcessDied, TrainingDiverged
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedTrainer
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.process_group import ProcessGroup, shares
from atropos_trainer_grpo.ranks import RankedTrainer
from plugins.trainer_grpo.tests.conftest import refuse_memory_beyond
from plugins.trainer_grpo.tests.resumed import optimizer_state
from tests.warm import is_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LORA = {"lora": {"rank": 4}, "learning_rate": 1e-4}
OPTIONS = {
    "full": {"learning_rate": 1e-3, "minibatches": 2, "warmup_steps": 3},
    "tied, kl to a copy, checkpointing": {
        "learning_rate": 1e-3, "kl": {"coefficient": 0.05}, "gradient_checkpointing": True, "tokens_per_microbatch": 64, "minibatches": 2,
    },
    "lora": {**LORA, "minibatches": 2},
    "lora, kl to the base": {**LORA, "kl": {"coefficient": 0.05}, "old_logprobs": "recompute"},
}  # fmt: skip


@asynccontextmanager
async def opened(model, directory, ranks=2, **options):
    """Open a trainer in a separate process, with `ranks` processes in all."""
    directory.mkdir(exist_ok=True)
    build = {
        "kind": "trainer",
        "name": "grpo",
        "options": {"learning_rate": 1e-2, **options},
        "context": {
            "directory": str(directory), "model": str(model), "seed": 0, "transport": None, "devices": ["cpu"] * ranks,
            "threads": 1,
        },
    }  # fmt: skip
    child = await Child.start("trainer", build, directory / "log", threads=1)
    try:
        trainer = HostedTrainer(child)
        await trainer.open()
        yield trainer
    finally:
        await child.close()


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split() if not is_template(child)]


def runs(pid):
    with suppress(ProcessLookupError, FileNotFoundError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


async def all_ended(pids, within_s=60.0):
    until = time.monotonic() + within_s
    while any(map(runs, pids)):
        assert time.monotonic() < until, f"still there: {[pid for pid in pids if runs(pid)]}"
        await asyncio.sleep(0.05)


def with_a_still_group(batch):
    """Its sequences have no gradient: they are only measured, after the others, by a pass that keeps no graph."""
    still = np.repeat(batch.group == 1, np.diff(batch.offsets))
    return replace(batch, advantages=np.where(still, 0, batch.advantages).astype(np.float32))


async def curve(trainer, make_batch, gate, steps):
    batches = [with_a_still_group(make_batch(seed, version=seed + 1)) for seed in range(steps)]
    return [await trainer.step(batch, gate) for batch in batches]


async def saved(trainer, directory):
    directory.mkdir()
    await trainer.save(directory)
    return directory


def weights_in(directory):
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True, "logprob_chunk": 16}], ids=str)
async def test_two_ranks_train_a_recurrent_model_in_rows_as_one_process_does(
    more, make_batch, tmp_path, gate, model_of
):
    """With fewer sequences for one rank than for the other, which then makes empty passes."""
    config = AutoConfig.for_model(
        "lfm2", vocab_size=37, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = shutil.copytree(model_of(), tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    ended = []
    for ranks in (1, 2):
        async with opened(model, tmp_path / f"run-{ranks}", ranks, tokens_per_microbatch=60, **more) as trainer:
            metrics = await curve(trainer, make_batch, gate, 2)
            ended.append((metrics, weights_in(await saved(trainer, tmp_path / f"saved-{ranks}"))))
    (one, weights), (two, others) = ended
    for mine, theirs in zip(one, two, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for name, values in weights.items():
        torch.testing.assert_close(values, others[name], atol=1e-4, rtol=1e-3, msg=name)


def test_shares_hold_every_sequence_once_and_nearly_as_many_tokens_each():
    random = np.random.default_rng(0)
    for size in (1, 2, 4):
        lengths = random.integers(1, 50, 40)
        order = random.permutation(40)
        parts = shares(lengths, order, size)
        assert np.array_equal(np.concatenate(parts), order)
        assert max(abs(lengths[part].sum() - lengths.sum() / size) for part in parts) <= 50
    assert [len(part) for part in shares(np.array([5]), np.array([0]), 4)].count(1) == 1


def test_all_ranks_make_equally_many_passes():
    lengths = np.array([100, 1, 1, 1])
    one_each = lambda order: [order[i : i + 1] for i in range(len(order))]  # noqa: E731
    passes = [ProcessGroup(rank, 4).passes(lengths, np.arange(4), one_each) for rank in range(4)]
    assert {len(of_rank) for of_rank in passes} == {3}
    assert sorted(int(i) for of_rank in passes for part in of_rank for i in part) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", OPTIONS)
async def test_two_ranks_give_the_loss_curve_of_one_process(open_trainer, make_batch, model_of, gate, tmp_path, name):
    model, options = model_of(tied="tied" in name), OPTIONS[name]
    alone = await curve(await open_trainer(model, **options), make_batch, gate, 10)
    async with opened(model, tmp_path / "run", **options) as trainer:
        together = await curve(trainer, make_batch, gate, 10)
    assert gate.entered == 20
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        for key in one.keys() - {"loss", "grad_norm"}:
            if not key.startswith("time/"):
                assert two[key] == pytest.approx(one[key], abs=1e-4, rel=1e-4), key


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
async def test_the_gradient_is_that_of_one_process(
    open_trainer, make_batch, make_branches, model_of, gate, tmp_path, ranks
):
    options = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "tokens_per_microbatch": 90}

    async def gradient(trainer, directory):
        metrics = await trainer.step(with_a_still_group(make_branches(3)), gate)
        state = optimizer_state(await saved(trainer, directory))
        return metrics["loss"], [entry["exp_avg"] / (1 - 0.9) for entry in state["moments"].values()]

    one = await open_trainer(**options)
    loss, expected = await gradient(one, tmp_path / "one")
    sequences = [np.arange(2, 2 + length, dtype=np.int32) for length in (1, 20, 9)]
    async with opened(model_of(), tmp_path / "run", ranks, **options) as trainer:
        other, given = await gradient(trainer, tmp_path / "several")
        assert other == pytest.approx(loss, abs=1e-6)
        for mine, theirs in zip(expected, given, strict=True):
            torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-4)

        for mine, theirs in zip(await one.logprobs(sequences), await trainer.logprobs(sequences), strict=True):
            assert theirs == pytest.approx(mine, abs=1e-4)
        few = make_batch(9, groups=1, size=2)  # of four ranks, two have no sequence
        for batch in (few, make_batch(10), few):
            mine, theirs = await one.step(batch, gate), await trainer.step(batch, gate)
            # Adam makes whole steps of gradients that are nothing but rounding: 4e-6 after three updates on one kind of CPU
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-5)
        others = children_of(trainer.child.process.pid)
        assert len(others) == ranks - 1
    await all_ended(others)


@pytest.mark.parametrize(
    "kind",
    ["full", pytest.param("bfloat16", marks=pytest.mark.long), "lora", pytest.param("experts", marks=pytest.mark.long)],
)
async def test_a_checkpoint_of_two_ranks_is_one_processs_and_back(
    open_trainer, make_batch, model_of, gate, tmp_path, kind
):
    dropping = {**LORA, "lora": {"rank": 4, "dropout": 0.2}}
    options = (
        dropping if kind == "lora" else {"weight_decay": 0.01, "dtype": "bfloat16" if kind == "bfloat16" else "auto"}
    )
    family = "qwen3_moe" if kind == "experts" else "qwen3"
    model = model_of(family, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    async with opened(model, tmp_path / "run", **options) as trainer:
        await curve(trainer, make_batch, gate, 2)
        first = await saved(trainer, tmp_path / "first")
        await trainer.step(make_batch(2, version=3), gate)
        after = await saved(trainer, tmp_path / "after")
        one = await open_trainer(model, **options)
        await one.restore(first)
        again = await saved(one, tmp_path / "again")
        await trainer.restore(again)
        back = await saved(trainer, tmp_path / "back")
        theirs = await trainer.step(make_batch(2, version=3), gate)
        resumed = await saved(trainer, tmp_path / "resumed")
    mine = await one.step(make_batch(2, version=3), gate)
    if kind != "lora":  # there each rank has its own dropout
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=5e-3 if kind == "bfloat16" else 1e-6)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=2e-2 if kind == "bfloat16" else 1e-4)
    for one_of, other in ((first, again), (first, back), (after, resumed)):
        expected, given = weights_in(one_of), weights_in(other)
        assert expected.keys() == given.keys()
        assert all(torch.equal(expected[name], given[name]) for name in expected)
        states = [optimizer_state(path) for path in (one_of, other)]
        assert states[0]["updates"] == states[1]["updates"]
        for place, entry in states[0]["moments"].items():
            assert all(torch.equal(values, states[1]["moments"][place][name]) for name, values in entry.items())
        for mine, theirs in zip(states[0]["masters"], states[1]["masters"], strict=True):
            assert (mine is None) == (theirs is None) == (kind != "bfloat16")
            assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("while_stepping", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_killed_rank_ends_the_run_with_its_name_and_leaves_nothing(
    make_batch, model_of, gate, tmp_path, while_stepping
):
    async with opened(model_of(), tmp_path / "run", 3, tokens_per_microbatch=1) as trainer:
        await trainer.step(make_batch(), gate)
        ranks = children_of(trainer.child.process.pid)
        assert len(ranks) == 2
        began = time.monotonic()
        if while_stepping:
            step = asyncio.ensure_future(trainer.step(make_batch(1, groups=200), gate))
            await asyncio.sleep(0.5)
            assert not step.done()
            os.kill(ranks[0], signal.SIGKILL)
            with pytest.raises(ProcessDied, match="trainer rank [12] .* was killed by SIGKILL"):
                await step
        else:
            os.kill(ranks[1], signal.SIGKILL)
            await asyncio.wait_for(trainer.child.peer.lost.wait(), 30)
            assert "trainer rank" in str(trainer.child.peer.error)
            assert "was killed by SIGKILL" in str(trainer.child.peer.error)
        assert time.monotonic() - began < 60
        await all_ended(ranks)


async def test_what_all_ranks_refuse_alike_is_raised_once_and_they_go_on_until_the_trainer_is_killed(
    make_batch, model_of, gate, tmp_path
):
    batch = make_batch()
    async with opened(model_of(), tmp_path / "run") as trainer:
        with pytest.raises(TrainingDiverged):
            await trainer.step(replace(batch, advantages=np.where(batch.trained, 3e38, 0).astype(np.float32)), gate)
        assert gate.entered == 0
        await trainer.step(batch, gate)
        ranks = children_of(trainer.child.process.pid)
        assert len(ranks) == 1
        os.kill(trainer.child.process.pid, signal.SIGKILL)
        await all_ended(ranks)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_refused_memory_inside_an_update_is_an_error_of_that_name_and_leaves_nothing(
    make_batch, large_model, gate, tmp_path, rank
):
    async with opened(large_model, tmp_path / "child") as trainer:
        first = trainer.child.process.pid
        pids = [first, *children_of(first)]
        refuse_memory_beyond(pids[rank], 4 << 20)
        with pytest.raises(OutOfMemory, match=f"rank {rank} was refused memory: .*can't allocate memory") as raised:
            await trainer.step(make_batch(), gate)
        assert "update.py" in str(raised.value), "where that was"
        await all_ended(pids)


@pytest.mark.parametrize("transport", ["posix_shm", "cuda_ipc", "copy"])
def test_weights_that_are_divided_are_not_shared(model_of, tmp_path, transport):
    context = RunContext(tmp_path, model_of(), transport=transport, devices=("cpu", "cpu"))
    with pytest.raises(FitError, match="--bridge checkpoint"):
        RankedTrainer(GrpoOptions(), context)


@pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda:0", "cuda:0")])
def test_devices_that_cannot_be_ranks_are_refused(model_of, tmp_path, devices):
    with pytest.raises(ConfigError, match="trainer.devices"):
        RankedTrainer(GrpoOptions(), RunContext(tmp_path, model_of(), devices=devices))
