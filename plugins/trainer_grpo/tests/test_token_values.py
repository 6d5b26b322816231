"""The values that the trainer reports for each token of its last batch, for sinks that record them."""

from dataclasses import replace

import numpy as np
import pytest

from plugins.trainer_grpo.tests.test_hosted import hosted
from plugins.trainer_grpo.tests.test_ranks import opened
from plugins.trainer_grpo.tests.test_update import on_policy


async def expected_of(trainer, batch):
    """Return the current policy's logprobs, from separate passes; NaN for tokens that were not sampled."""
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    logprobs = np.concatenate(await trainer.logprobs(list(sequences)))
    return np.where(batch.sampled, logprobs, np.nan).astype(np.float32)


async def test_before_a_step_there_is_nothing_to_say(open_trainer):
    assert await (await open_trainer()).token_values() == {}


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4, "dropout": 0.5}}], ids=["full", "dropout"])
async def test_the_logprobs_are_those_of_the_policy_before_the_update(open_trainer, make_batch, gate, options):
    trainer = await open_trainer(learning_rate=0.05, **options)
    batch = await on_policy(trainer, make_batch())
    expected = await expected_of(trainer, batch)
    await trainer.step(batch, gate)
    values = await trainer.token_values()
    assert values["trainer_logprobs"] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.array_equal(values["advantages"], batch.advantages)
    if not options:
        assert np.isfinite(values["entropy"]).tolist() == batch.sampled.tolist()
        assert (values["entropy"][batch.sampled] > 0).all()
    assert np.nanmax(np.abs(await expected_of(trainer, batch) - expected)) > 1e-3, "the policy has moved since"


async def test_of_later_minibatches_only_what_was_computed_before_any_step_is_reported(open_trainer, make_batch, gate):
    trainer = await open_trainer(minibatches=3, learning_rate=0.05)
    batch = await on_policy(trainer, make_batch(groups=6))
    expected = await expected_of(trainer, batch)
    await trainer.step(batch, gate)
    found = (await trainer.token_values())["trainer_logprobs"]
    there = np.isfinite(found)
    assert batch.sampled.sum() / 3 < there.sum() < batch.sampled.sum() / 2
    assert found[there] == pytest.approx(expected[there], abs=1e-5)


async def test_recomputed_ones_are_there_for_all_of_them_and_then_there_is_no_entropy(open_trainer, make_batch, gate):
    trainer = await open_trainer(minibatches=3, learning_rate=0.05, old_logprobs="recompute")
    batch = await on_policy(trainer, make_batch(groups=6))
    expected = await expected_of(trainer, batch)
    await trainer.step(batch, gate)
    values = await trainer.token_values()
    assert values["trainer_logprobs"] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.isnan(values["entropy"]).all()


async def test_advantages_are_those_that_the_loss_took(open_trainer, make_batch, gate):
    trainer = await open_trainer(whiten_advantages=True)
    batch = make_batch()
    await trainer.step(batch, gate)
    found = (await trainer.token_values())["advantages"][batch.trained]
    assert found.mean() == pytest.approx(0, abs=1e-5) and found.std() == pytest.approx(1, abs=1e-2)
    assert not np.allclose(found, batch.advantages[batch.trained])


async def test_the_order_is_that_of_the_batch_that_was_given(open_trainer, make_batch, gate):
    """The trainer puts the sequences of a group next to each other."""
    trainer = await open_trainer()
    batch = await on_policy(trainer, make_batch())
    shuffled = batch.select(np.random.default_rng(0).permutation(batch.sequences))
    expected = await expected_of(trainer, shuffled)
    await trainer.step(shuffled, gate)
    values = await trainer.token_values()
    assert values["trainer_logprobs"] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.array_equal(values["advantages"], shuffled.advantages)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_they_come_from_another_process_and_from_several_ranks(
    open_trainer, make_batch, model_of, gate, tmp_path, ranks
):
    here = await open_trainer(model_of())
    batch = await on_policy(here, make_batch())
    await here.step(batch, gate)
    mine = await here.token_values()
    if ranks == 1:
        async with hosted(model_of(), tmp_path / "child") as there:
            await there.open()
            await there.step(batch, gate)
            theirs = await there.token_values()
    else:
        async with opened(model_of(), tmp_path / "child", ranks) as there:
            await there.step(batch, gate)
            theirs = await there.token_values()
    assert theirs.keys() == mine.keys()
    for name, values in mine.items():
        assert theirs[name] == pytest.approx(values, abs=1e-5, nan_ok=True), name


async def test_a_sequence_without_logprobs_of_its_sender_has_none_of_the_trainers(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    batch = make_batch()
    batch = replace(batch, has_logprobs=np.arange(batch.sequences) != 4)
    await trainer.step(batch, gate)
    silent = np.repeat(np.arange(batch.sequences) == 4, batch.lengths)
    found = (await trainer.token_values())["trainer_logprobs"]
    assert np.isfinite(found).tolist() == (batch.sampled & ~silent).tolist()
