"""SkyRL's own RayPPOTrainer.train(), unmodified, on a CPU: over our environments run by its engines."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

import numpy as np

from atropos_adapter_skyrl import advantages
from atropos_adapter_skyrl.weights import Publisher
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import WeightsMismatch
from atropos_core.types import Episode
from tests.skyrl.parts import CONTEXT, Adder, Sevens, TableClient, TableDispatch, config, trainer_of
from tests.skyrl.test_generator import here

STEPS = 30
RATE = 3.0
SEVENS = 2.0  # the logit of a seven at the start, over that of anything else
START = np.exp(SEVENS) / (99 + np.exp(SEVENS))  # its chance


class Seen:
    """What was true of each step, seen by a callback of SkyRL's."""

    def __init__(self, dispatch):
        self.dispatch, self.expected, self.logged = dispatch, [], []

    def check_rise(self, steps):
        """The exact expectation: what it was at the start, at nearly every step, and at the end."""
        expected = [*self.expected, self.dispatch.expected_sevens()]
        first_ends = (1 - START) / 99  # the chance that the reply is over after one token, which is no seven
        assert len(expected) == steps + 1
        assert expected[0] == pytest.approx((START + (1 - first_ends) * START) / 2)
        assert sum(after < before for before, after in pairwise(expected)) <= 3
        assert expected[-1] > 0.85, expected

    def attach(self, trainer):
        from skyrl.train.utils.callbacks import TrainingCallback

        seen = self

        class Watch(TrainingCallback):
            def on_step_start(self, trainer, callback_input, control):
                seen.expected.append(seen.dispatch.expected_sevens())

            def on_log(self, trainer, callback_input, control):
                seen.logged.append(dict(callback_input.logs))

        trainer.add_callback(Watch())
        return self


async def test_the_exact_expected_reward_rises_over_thirty_steps_and_every_step_samples_from_the_last_weights(tmp_path):
    cfg = config(tmp_path, **{"trainer.max_training_steps": STEPS, "trainer.epochs": 8})
    client, environment = TableClient(), Sevens()
    dispatch = TableDispatch(cfg, client, RATE, SEVENS)
    trainer = trainer_of(cfg, here(client, sevens=environment), {"sevens": environment}, dispatch, client=client)
    seen = Seen(dispatch).attach(trainer)
    await trainer.train()
    seen.check_rise(STEPS)
    train = [one for one in seen.logged if "atropos/min_policy_version" in one]
    assert [one["atropos/max_policy_version"] for one in train] == list(range(STEPS))
    assert [one["atropos/min_policy_version"] for one in train] == list(range(STEPS))
    assert max(one["policy/rollout_train_logprobs_abs_diff_max"] for one in train) < 1e-5
    assert client.weight_version == STEPS + 1, "SkyRL's own sync ran as ever"
    assert (environment.opened, environment.closed) == (1, 1)


async def test_step_by_step_training_runs_and_moves_the_policy_the_right_way(tmp_path):
    cfg = config(
        tmp_path,
        **{
            "generator.step_wise_trajectories": True, "trainer.max_training_steps": 6,
            "trainer.algorithm.loss_reduction": "token_mean",
            "trainer.eval_interval": 2, "trainer.eval_before_train": True,
        },
    )  # fmt: skip
    client, environment = TableClient(), Adder()
    dispatch = TableDispatch(cfg, client, 60.0)
    trainer = trainer_of(cfg, here(client, adder=environment), {"adder": environment}, dispatch, client=client)
    seen = Seen(dispatch).attach(trainer)
    await trainer.train()
    rewards = [one["atropos/mean_reward"] for one in seen.logged if "atropos/mean_reward" in one]
    assert len(rewards) == 4, "16 tasks by 4, one epoch"
    assert sum("eval/all/avg_score" in one for one in seen.logged) == 3
    assert all(batch.batch_size == 4 * 8 * 3 for batch in dispatch.batches)
    digits = dispatch.table.detach()[2, 4:14].mean() - dispatch.table.detach()[2].mean()
    assert digits > 0


class Given(Sevens):
    """Its advantages are its own: 1 on a seven, -1 elsewhere."""

    async def rollout(self, task, policy, *, seed):
        from dataclasses import replace

        episode = await super().rollout(task, policy, seed=seed)
        [rollout] = episode.rollouts
        own = np.where(rollout.sampled, np.where(rollout.tokens == 11, 1.0, -1.0), 0.0).astype(np.float32)
        return Episode((replace(rollout, advantages=own),), episode.score)


async def test_advantages_of_the_environment_reach_the_loss_token_by_token_through_the_registry(tmp_path):
    advantages.register()
    advantages.register()  # twice does no harm
    cfg = config(tmp_path, **{"trainer.algorithm.advantage_estimator": "atropos", "trainer.max_training_steps": 1,
                              "trainer.algorithm.loss_reduction": "token_mean"})  # fmt: skip
    client, environment = TableClient(), Given()
    dispatch = TableDispatch(cfg, client, 60.0)
    trainer = trainer_of(cfg, here(client, given=environment), {"given": environment}, dispatch, client=client)
    seen = Seen(dispatch).attach(trainer)
    await trainer.train()
    [batch] = dispatch.batches
    responses = batch["sequences"][:, -batch.metadata["response_length"] :]
    mask = batch["response_mask"]
    wanted = np.where(responses == 11, 1.0, -1.0) * mask.numpy() / int(mask.sum())
    np.testing.assert_allclose(batch["advantages"].numpy(), wanted, rtol=1e-5)
    assert seen.logged[0]["atropos/mean_reward"] == pytest.approx(float((responses[mask > 0] == 11).sum()) / 2 / 32)


async def test_two_epochs_evaluation_between_and_dynamic_sampling_see_fresh_rollouts_each_time(tmp_path):
    """SkyRL's ids repeat in all three; the seed of a rollout tells whether it was run for this very call."""

    class Tracked(Sevens):
        def __init__(self):
            super().__init__(8)
            self.seeds: list[int] = []

        async def rollout(self, task, policy, *, seed):
            self.seeds.append(seed)
            return await super().rollout(task, policy, seed=seed)

    cfg = config(
        tmp_path,
        **{
            "trainer.epochs": 12, "trainer.max_training_steps": 6, "trainer.eval_interval": 1,
            "trainer.eval_before_train": True, "trainer.algorithm.dynamic_sampling.type": "filter",
            "trainer.algorithm.dynamic_sampling.max_sample_batches": 20,
        },
    )  # fmt: skip
    client, environment = TableClient(), Tracked()
    dispatch = TableDispatch(cfg, client, 5.0)
    dispatch.table.data[:, 11] = 3.0  # a group of eight may be flat, and often is not
    trainer = trainer_of(cfg, here(client, tracked=environment), {"tracked": environment}, dispatch, client=client)
    seen = Seen(dispatch).attach(trainer)
    calls: list[list[int]] = []
    generate = trainer.generator.generate

    async def counted(batch):
        before = len(environment.seeds)
        output = await generate(batch)
        calls.append(environment.seeds[before:])
        versions = {version for row in output["policy_versions"] for version in row}
        assert versions == {trainer.generator.source.version}, "nothing that was sampled for an earlier call"
        return output

    trainer.generator.generate = counted
    await trainer.train()
    finished = [seed for call in calls for seed in call]
    assert len(calls) > 6 + 7 and len(set(finished)) == len(finished) == len(environment.seeds)
    assert sum("eval/all/avg_score" in one for one in seen.logged) == 7


class Refusing(ToyEngine):
    async def load_weights(self, directory):
        raise WeightsMismatch("a tensor of another shape")


class Nowhere(TableDispatch):
    def save_hf_model(self, model, directory, tokenizer):
        """As where SkyRL's workers write on another machine."""


@pytest.mark.parametrize(
    ("engine", "dispatch", "cause"),
    [(Refusing, TableDispatch, "a tensor of another shape"), (ToyEngine, Nowhere, "SkyRL did not write its policy to")],
)
async def test_weights_that_do_not_reach_an_engine_end_the_training_and_everything_is_closed(
    tmp_path, engine, dispatch, cause
):
    cfg, environment = config(tmp_path), Sevens()
    publisher = Publisher([engine(ToyEngineOptions(), CONTEXT)])
    trainer = trainer_of(
        cfg, here(sevens=environment), {"sevens": environment}, dispatch(cfg, None, 1.0), publisher=publisher
    )
    with pytest.raises(WeightsMismatch, match=cause):
        await trainer.train()
    assert trainer.global_step == 0 and (environment.opened, environment.closed) == (1, 1)
