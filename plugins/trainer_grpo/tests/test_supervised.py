"""Supervised steps: the loss and gradient of a language model, their own rate, and a clean beginning for what follows."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import ConfigError, DataError
from atropos_core.training.batch import to_batch
from atropos_core.types import UNKNOWN_VERSION, Draw, Episode, Rollout, ScoredGroup, Task
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.plugin import supervised_rate
from plugins.trainer_grpo.tests.conftest import VOCABULARY
from plugins.trainer_grpo.tests.test_ranks import opened

NOISY = {  # options of a run that a supervised step must not feel
    "entropy_coefficient": 0.1, "whiten_advantages": True, "epochs": 2, "minibatches": 2, "average": "sequence", "clip_low": 0.1,
}  # fmt: skip


def rows(seed=0, count=7):
    """Supervised rows of several replies each, with prompts in common."""
    random = np.random.default_rng(seed)
    prompt, made = random.integers(2, VOCABULARY, 5), []
    for _ in range(count):
        tokens = np.concatenate([prompt, random.integers(2, VOCABULARY, random.integers(2, 30))]).astype(np.int32)
        trained = (np.arange(len(tokens)) >= len(prompt)) & (random.random(len(tokens)) < 0.8)
        trained[-1] = True
        none, versions = np.zeros(len(tokens), np.bool_), np.full(len(tokens), UNKNOWN_VERSION, np.int32)
        made.append(
            Rollout(tokens, none, trained, None, versions, 1.0, advantages=trained.astype(np.float32), sft=True)
        )
    return made


def batch_of(rollouts, version=1):
    groups = [
        ScoredGroup(
            Draw(-1, "warmup", "train", at, 0), Task(str(at), ()), (Episode((one,), 0.0),), np.zeros(1, np.float32)
        )
        for at, one in enumerate(rollouts)
    ]
    return to_batch(groups, version)


def theirs(directory, rollouts):
    """Loss and gradient by transformers: its own cross-entropy over labels, on padded rows."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    longest = max(len(one.tokens) for one in rollouts)
    ids, labels = torch.zeros(len(rollouts), longest, dtype=torch.long), torch.full((len(rollouts), longest), -100)
    attention = torch.zeros_like(ids)
    for at, one in enumerate(rollouts):
        ids[at, : len(one.tokens)], attention[at, : len(one.tokens)] = torch.from_numpy(one.tokens).long(), 1
        labels[at, : len(one.tokens)] = torch.where(torch.from_numpy(one.trained), ids[at, : len(one.tokens)], -100)
    loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.named_parameters()}


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


async def gradient(trainer, batch):
    """The gradient that a supervised step leaves to the optimizer."""
    found = {}

    def look(optimizer, *_):
        found.update({name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()})

    handle = trainer._optimizer._adam.register_step_pre_hook(look)
    metrics = await trainer.supervised_step(batch, 0.0)
    handle.remove()
    return metrics, found


@pytest.mark.parametrize("tokens_per_microbatch", [16, 40, 16384])
async def test_loss_and_gradient_are_those_of_transformers_however_the_batch_is_cut(
    open_trainer, model_of, tokens_per_microbatch
):
    trainer = await open_trainer(tokens_per_microbatch=tokens_per_microbatch, max_grad_norm=1e9, **NOISY)
    metrics, found = await gradient(trainer, batch_of(rows()))
    loss, wanted = theirs(model_of(), rows())
    assert metrics["warmup/loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["tokens"] == sum(one.trained.sum() for one in rows())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


async def test_the_rate_is_the_given_one_and_a_rule_for_some_parameters_still_holds(open_trainer):
    trainer = await open_trainer(
        learning_rate=0.5, schedule="linear", steps=9, learning_rates=[{"pattern": "embed", "factor": 0.0}]
    )
    before = weights(trainer)
    metrics = await trainer.supervised_step(batch_of(rows()), 1e-3)
    after = weights(trainer)
    assert metrics["learning_rate"] == 1e-3
    for name in before:  # Adam's first step is the rate, whatever the gradient
        moved = float((after[name] - before[name]).abs().max())
        assert moved == 0 if "embed" in name else 0.9e-3 < moved < 1.1e-3, name


async def test_updates_by_rewards_begin_anew_after_supervised_ones(open_trainer, make_batch, gate, tmp_path):
    options = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2, "steps": 5}
    warm = await open_trainer(**options)
    for step in (1, 2, 3):
        await warm.supervised_step(batch_of(rows(step), step), 1e-2)
    (exported := tmp_path / "policy").mkdir()
    await warm.save(exported)
    metrics = await warm.step(make_batch(version=4), gate)
    fresh = await open_trainer(exported, **options)
    assert (await fresh.step(make_batch(version=4), gate))["learning_rate"] == metrics["learning_rate"] == 0.5e-2
    for name, value in weights(fresh).items():
        assert torch.equal(weights(warm)[name], value), name


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4, "dropout": 0.1}}], ids=["full", "lora"])
@pytest.mark.parametrize("saved_after", [1, 2])
async def test_a_checkpoint_within_or_after_supervised_steps_resumes_to_the_same_bits(
    open_trainer, make_batch, gate, tmp_path, options, saved_after
):
    async def steps(trainer, first):
        for step in range(first, 4):
            if step < 3:
                await trainer.supervised_step(batch_of(rows(step), step), 1e-2)
            else:
                await trainer.step(make_batch(version=step), gate)

    whole = await open_trainer(**options)
    await steps(whole, 1)
    first = await open_trainer(**options)
    for step in range(1, saved_after + 1):
        await first.supervised_step(batch_of(rows(step), step), 1e-2)
    (saved := tmp_path / "saved").mkdir()
    await first.save(saved)
    again = await open_trainer(**options)
    await again.restore(saved)
    await steps(again, saved_after + 1)
    for name, value in weights(whole).items():
        assert torch.equal(weights(again)[name], value), name


async def test_supervised_rows_in_a_step_by_rewards_are_refused(open_trainer, gate):
    trainer = await open_trainer()
    with pytest.raises(DataError, match="a step that learns from rewards has no loss of imitation"):
        await trainer.step(batch_of(rows()), gate)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_ranks_take_the_supervised_steps_of_one_process(open_trainer, model_of, tmp_path):
    one = await open_trainer(learning_rate=1e-2)
    async with opened(model_of(), tmp_path / "ranks") as ranks:
        for step in (1, 2):
            batch = batch_of(rows(step), step)
            alone, together = await one.supervised_step(batch, 1e-3), await ranks.supervised_step(batch, 1e-3)
            assert together["warmup/loss"] == pytest.approx(alone["warmup/loss"], abs=1e-5)
        sequences = [row.tokens for row in rows(9)]
        for mine, other in zip(await one.logprobs(sequences), await ranks.logprobs(sequences), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-4)


def test_an_adapter_has_ten_times_the_rate_of_a_whole_model_and_a_reference_is_refused():
    assert supervised_rate(GrpoOptions(), ["checkpoint"]) == 2e-5
    assert supervised_rate(GrpoOptions(), ["adapter"]) == supervised_rate(GrpoOptions(lora={}), ["checkpoint"]) == 2e-4
    with pytest.raises(ConfigError, match="trainer.kl keeps the policy near the model that the run began with"):
        supervised_rate(GrpoOptions(kl={}), ["checkpoint"])
