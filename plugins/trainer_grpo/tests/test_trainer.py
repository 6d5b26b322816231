"""The trainer as a run uses it: its writes, its refusals, and that it learns."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from atropos_core.errors import TrainingDiverged, WeightsMismatch
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.update import Update


def snapshot(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def unchanged(trainer, before):
    return all(torch.equal(parameter, old) for parameter, old in zip(trainer.model.parameters(), before, strict=True))


async def test_open_says_what_was_opened(open_trainer, model_of):
    trainer = await open_trainer()
    info = await trainer.open()
    assert info.architecture == "Qwen3ForCausalLM"
    assert info.parameters == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert (info.vocabulary, info.dtype, info.device, info.threads) == (37, "float32", "cpu", 1)
    assert info.tokenizer == fingerprint(model_of())


async def test_a_rewarded_token_becomes_likelier_and_a_punished_one_rarer(open_trainer, make_batch, gate):
    trainer = await open_trainer(learning_rate=1e-3)
    batch = make_batch(groups=1, size=2)
    prompt, good, bad = [3, 4, 5], 9, 10
    bandit = replace(
        batch.select([0, 1]),
        tokens=np.array([*prompt, good, *prompt, bad], np.int32),
        offsets=np.array([0, 4, 8]),
        sampled=np.tile([False, False, False, True], 2),
        trained=np.tile([False, False, False, True], 2),
        logprobs=np.zeros(8, np.float32),
        has_logprobs=np.zeros(2, np.bool_),
        policy_version=np.zeros(8, np.int32),
        advantages=np.array([0, 0, 0, 1, 0, 0, 0, -1], np.float32),
    )
    sequences = [bandit.tokens[:4], bandit.tokens[4:]]
    before = [values[-1] for values in await trainer.logprobs(sequences)]
    for _ in range(5):
        await trainer.step(bandit, gate)
    after = [values[-1] for values in await trainer.logprobs(sequences)]
    assert after[0] > before[0] + 0.05
    assert after[1] < before[1] - 0.05


async def test_zero_advantage_leaves_weights_unchanged(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    before = snapshot(trainer)
    batch = make_batch()
    metrics = await trainer.step(replace(batch, advantages=np.zeros_like(batch.advantages)), gate)
    assert metrics["grad_norm"] == 0
    assert gate.entered == 1
    assert unchanged(trainer, before)


async def test_parameters_change_only_inside_writing_which_is_entered_once(open_trainer, make_batch):
    trainer = await open_trainer(epochs=2, minibatches=3)
    before = snapshot(trainer)
    seen = []

    @asynccontextmanager
    async def writing():
        seen.append(unchanged(trainer, before))
        yield
        seen.append(snapshot(trainer))

    metrics = await trainer.step(make_batch(), writing)
    assert len(seen) == 2
    assert seen[0] is True
    assert not unchanged(trainer, before)
    assert unchanged(trainer, seen[1])
    assert metrics["learning_rate"] == 1e-2


async def test_updates_happen_in_the_storage_that_was_there(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    await trainer.step(make_batch(), gate)
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == addresses


async def test_the_event_loop_answers_while_a_step_computes(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    step = asyncio.create_task(trainer.step(make_batch(groups=40), gate))
    turns = 0
    while not step.done():
        await asyncio.sleep(0.001)
        turns += 1
    await step
    assert turns > 5


async def test_a_non_finite_loss_diverges_before_writing_is_entered(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    before = snapshot(trainer)
    batch = make_batch()
    with pytest.raises(TrainingDiverged, match="Bound the rewards"):
        await trainer.step(replace(batch, advantages=np.where(batch.trained, 3e38, 0).astype(np.float32)), gate)
    assert gate.entered == 0
    assert unchanged(trainer, before)
    assert (await trainer.step(batch, gate))["grad_norm"] < 100  # nothing of it is left in the gradients


async def test_divergence_in_a_later_minibatch_leaves_writing_by_the_exception(open_trainer, make_batch, gate):
    trainer = await open_trainer(epochs=9, learning_rate=1e4)
    with pytest.raises(TrainingDiverged):
        batch = make_batch()
        await trainer.step(replace(batch, advantages=-batch.trained.astype(np.float32)), gate)
    assert gate.failed == [TrainingDiverged]


async def test_minibatches_are_the_same_for_the_same_seed_and_cover_every_sequence(open_trainer, make_batch):
    trainer = await open_trainer()
    options = GrpoOptions(epochs=2, minibatches=5)

    def split(seed):
        update = Update(trainer.model, trainer._ready(), options, LOSSES["grpo"], make_batch(groups=5), "cpu", seed)
        return [chosen.tolist() for chosen in update.minibatches()]

    assert split(1) == split(1) != split(2)
    assert sorted(sum(split(1)[:5], [])) == list(range(20))
    assert split(1)[:5] != split(1)[5:]


async def test_warm_up_raises_the_learning_rate_linearly(open_trainer, make_batch, gate):
    trainer = await open_trainer(learning_rate=1.0, warmup_steps=4)
    batch = make_batch()
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    rates = [(await trainer.step(batch, gate))["learning_rate"] for _ in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


async def test_logprobs_of_sequences_that_share_a_beginning_are_those_of_each_alone(open_trainer):
    trainer = await open_trainer()
    shared, rest = np.arange(3, 30, dtype=np.int32), np.random.default_rng(0).integers(2, 30, (4, 9)).astype(np.int32)
    rest[1, :5] = rest[0, :5]  # two that go on together
    sequences = [np.concatenate([shared, row]) for row in rest]
    for temperature in (1.0, 0.7):
        together = await trainer.logprobs(sequences, temperature)
        for sequence, values in zip(sequences, together, strict=True):
            np.testing.assert_allclose(values, (await trainer.logprobs([sequence], temperature))[0], atol=1e-5)


async def test_logprobs_have_a_zero_first_entry_and_survive_short_sequences(open_trainer):
    trainer = await open_trainer(tokens_per_microbatch=6)
    values = await trainer.logprobs([np.array(tokens, np.int32) for tokens in ([5], [5, 6, 7], [], [9, 3])])
    assert [len(row) for row in values] == [1, 3, 0, 2]
    assert all(row[0] == 0 for row in values if len(row))
    assert all((row[1:] < 0).all() for row in values)
    hot = await trainer.logprobs([np.array([5, 6, 7], np.int32)], temperature=100.0)
    assert hot[0][1:] == pytest.approx(-np.log(37), abs=0.2)


async def test_a_skeleton_takes_up_the_weights_that_a_bridge_brings(open_trainer, make_batch, gate):
    owner = await open_trainer()
    skeleton = await open_trainer(transport="posix_shm")
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    with pytest.raises(WeightsMismatch, match="no weights yet"):
        await skeleton.step(make_batch(), gate)
    with pytest.raises(WeightsMismatch, match="Engine and trainer must open the same model"):
        skeleton.weights_moved()
    for name, parameter in owner.model.named_parameters():  # lm_head is tied and not among them
        module, _, leaf = name.rpartition(".")
        setattr(skeleton.model.get_submodule(module), leaf, torch.nn.Parameter(parameter.detach()))
    skeleton.weights_moved()
    await skeleton.step(make_batch(), gate)
    for mine, theirs in zip(skeleton.model.parameters(), owner.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() == theirs.data_ptr()
    sequence = np.arange(2, 20, dtype=np.int32)
    assert np.array_equal((await skeleton.logprobs([sequence]))[0], (await owner.logprobs([sequence]))[0])


async def test_gradient_checkpointing_changes_no_weight_update(open_trainer, make_batch, gate):
    plain, frugal = await open_trainer(), await open_trainer(gradient_checkpointing=True)
    for trainer in (plain, frugal):
        await trainer.step(make_batch(), gate)
    for one, other in zip(plain.model.parameters(), frugal.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


async def test_deterministic_steps_give_identical_weights(open_trainer, make_batch, gate):
    try:
        torch.use_deterministic_algorithms(True)
        trainers = [await open_trainer(), await open_trainer()]
        for trainer in trainers:
            for seed in range(3):
                await trainer.step(make_batch(seed), gate)
    finally:
        torch.use_deterministic_algorithms(False)
    assert unchanged(trainers[0], snapshot(trainers[1]))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
async def test_a_gradient_of_looked_up_rows_alone_is_the_same_gradient(
    open_trainer, make_batch, model_of, gate, kind, tied
):
    """Over micro-batches, of which all but the first add to what is there."""
    moved = []
    for sparse in (True, False):
        trainer = await open_trainer(model_of(kind, tied), tokens_per_microbatch=60, max_grad_norm=1e9)
        embedding = trainer.model.get_input_embeddings()
        assert embedding.sparse is tied
        embedding.sparse = sparse and tied
        for seed in range(3):
            await trainer.step(make_batch(seed), gate)
        moved.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
