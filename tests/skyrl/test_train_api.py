"""SkyRL's train() without any inference engine of its own: workers, engine and server are other processes."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

import httpx
import ray

from atropos_adapter_skyrl.api import ApiGroups
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.source import RolloutsFailed
from atropos_adapter_skyrl.threaded_source import Aside
from atropos_adapter_skyrl.weights import Publisher
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import ConfigError, FitError, LeaseLost
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Sampling
from atropos_trajectory_client.client import Api, SessionSpec
from atropos_trajectory_client.remote_engine import RemoteEngine
from tests.e2e.roles import scene as started
from tests.skyrl.elsewhere import prepare, python_path
from tests.skyrl.parts import Sevens, TableDispatch, config, trainer_of
from tests.skyrl.test_fully_async import BEHIND, FULLY
from tests.skyrl.test_generator import given
from tests.skyrl.test_train import RATE, SEVENS, STEPS, Seen

TOKENIZER = ChatTokenizer(TOY_MODEL)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    with started(tmp_path) as made:
        yield made
    ray.shutdown()  # SkyRL starts one to remove old checkpoints


def engine_of(scene):
    role = scene.start("engine", "engine", "--model", "toy", "--engine", "table", "--port", "0")
    return role.says(r"(http://[\w.:-]+)").rstrip(".")


def source_of(scene, engines=(), *, n=8, deadline_s=60.0, attempts=3, max_staleness=0):
    spec = SessionSpec(
        "skyrl", group_size=n, min_group=n, sampling=Sampling(2), batch_groups=1, tokenizer=TOKENIZER.fingerprint,
        vocabulary=TOKENIZER.vocabulary, model="toy", deadline_s=20.0,
        max_staleness=max_staleness,
    )  # fmt: skip
    return ApiGroups(Api(scene.url), spec, engines, deadline_s=deadline_s, attempts=attempts)


def worker_of(scene):
    return scene.start("worker", "env", "./sevens.py", "--api", scene.url, "--concurrency", "8")


def status(scene):
    return httpx.get(f"{scene.url}/v1/status", headers={"accept": "application/json"}).json()


async def test_the_exact_expected_reward_rises_over_thirty_steps_with_engine_and_workers_elsewhere(scene, tmp_path):
    cfg = config(tmp_path, **{"trainer.max_training_steps": STEPS, "trainer.epochs": 8, "trainer.ckpt_interval": 10})
    url = engine_of(scene)
    worker_of(scene)
    environments = {"sevens": Sevens()}
    dispatch = TableDispatch(cfg, None, RATE, SEVENS)
    source = source_of(scene, [url])
    trainer = trainer_of(cfg, Aside(source), environments, dispatch, publisher=Publisher([RemoteEngine(url)]))
    seen = Seen(dispatch).attach(trainer)
    await trainer.train()
    seen.check_rise(STEPS)
    train = [one for one in seen.logged if "atropos/min_policy_version" in one]
    for name in ("atropos/min_policy_version", "atropos/max_policy_version"):
        assert [one[name] for one in train] == list(range(STEPS)), "every token says which weights it was sampled from"
    assert max(one["policy/rollout_train_logprobs_abs_diff_max"] for one in train) < 1e-5, "and they were those"
    assert source.dropped == 0
    hub = status(scene)["hub"]
    assert hub["committed"] == 4 * STEPS and hub["held_bytes"] == 0, hub


async def test_a_fully_asynchronous_training_commits_what_a_checkpoint_holds_and_nothing_that_was_only_generated(
    scene, tmp_path
):
    cfg = config(
        tmp_path, **FULLY, **{"trainer.max_training_steps": 10, "trainer.epochs": 8, "trainer.ckpt_interval": 4}
    )
    url = engine_of(scene)
    worker_of(scene)
    dispatch = TableDispatch(cfg, None, 1.0, SEVENS)
    source = source_of(scene, [url], max_staleness=BEHIND)
    trainer = trainer_of(cfg, Aside(source), {"sevens": Sevens()}, dispatch, publisher=Publisher([RemoteEngine(url)]))
    committed, ahead = [], []
    save, step_ended = dispatch.save_checkpoint, source.step_ended

    def counted(*args):
        is_due = step_ended(*args)
        ahead.append(len(source._leased))  # generated, for a later step
        return is_due

    def saved(*args):
        committed.append((trainer.global_step, status(scene)["hub"]["committed"]))
        save(*args)

    dispatch.save_checkpoint, source.step_ended = saved, counted
    await trainer.train()
    assert [step for step, _ in committed] == [4, 8, 11] and committed[0][1] == 0, committed
    assert status(scene)["hub"]["committed"] == 4 * 10, "of more that were generated"
    assert max(ahead) > 0, ahead
    ray.shutdown()  # SkyRL starts one to remove old checkpoints


async def test_a_hub_that_fills_between_two_checkpoints_has_skyrl_save_one(tmp_path, monkeypatch):
    """The interval alone would save after an epoch of 16 steps; the hub holds the groups of five."""
    prepare(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    with started(tmp_path, "--hub-sequences", "160") as scene:
        cfg = config(tmp_path, **{"trainer.max_training_steps": 12, "trainer.ckpt_interval": 1000})
        url = engine_of(scene)
        worker_of(scene)
        source = source_of(scene, [url], deadline_s=20.0, attempts=1)
        trainer = trainer_of(
            cfg, Aside(source), {"sevens": Sevens()}, TableDispatch(cfg, None, 1.0),
            publisher=Publisher([RemoteEngine(url)]),
        )  # fmt: skip
        await trainer.train()
        saved = sorted(
            int(path.name.removeprefix("global_step_")) for path in (tmp_path / "ckpts").glob("global_step_*")
        )
        assert trainer.global_step == saved[-1] == 12 and saved[0] <= 5 and len(saved) >= 3, saved
        hub = status(scene)["hub"]
        assert hub["committed"] == 4 * 12 and hub["held_bytes"] == 0, hub
    ray.shutdown()  # SkyRL starts one to remove old checkpoints


@pytest.mark.parametrize("wrapped", [Aside, lambda source: source], ids=["aside", "in SkyRL's own loop"])
async def test_a_training_step_longer_than_the_lease_does_not_lose_it(tmp_path, monkeypatch, wrapped):
    """SkyRL waits for its workers inside its event loop: nothing else there runs meanwhile."""
    prepare(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    with started(tmp_path, "--lease-s", "3") as scene:
        cfg = config(tmp_path, **{"trainer.max_training_steps": 2, "trainer.epochs": 8})
        url = engine_of(scene)
        worker_of(scene)

        class Slow(TableDispatch):
            def optim_step(self, model):
                time.sleep(5.0)
                return super().optim_step(model)

        source = wrapped(source_of(scene, [url]))
        publisher = Publisher([RemoteEngine(url)])
        trainer = trainer_of(cfg, source, {"sevens": Sevens()}, Slow(cfg, None, 1.0), publisher=publisher)
        if wrapped is Aside:
            await trainer.train()
            assert trainer.global_step == 2 and status(scene)["hub"]["committed"] == 4 * 2
        else:
            with pytest.raises(LeaseLost):
                await trainer.train()


async def test_groups_that_failed_are_requested_again_and_raised_in_the_end(scene, tmp_path):
    cfg = config(tmp_path)
    url = engine_of(scene)
    (tmp_path / "flaky").touch()
    worker_of(scene)
    source = source_of(scene, [url], n=4, attempts=8)
    await source.open()
    generator = AtroposGenerator(source, seed=2)
    requested, _ = given(cfg, {"sevens": Sevens()}, list(range(8)))
    output = await generator.generate(requested)
    assert len(output["response_ids"]) == 32 and output["rollout_metrics"]["atropos/requeued"] > 0
    (tmp_path / "broken").touch()
    source._attempts = 2
    with pytest.raises(RolloutsFailed, match=r"failed 2 times(.|\n)*the tool is away"):
        await generator.generate(given(cfg, {"sevens": Sevens()}, [1])[0])
    await source.close()


async def test_a_group_that_nobody_runs_is_late_and_raised(scene, tmp_path):
    cfg = config(tmp_path)
    source = source_of(scene, n=4, deadline_s=0.5, attempts=2)
    await source.open()
    with pytest.raises(RolloutsFailed, match=r"failed 2 times(.|\n)*no group came from http(.|\n)*within 0.5 s"):
        await AtroposGenerator(source).generate(given(cfg, {"sevens": Sevens()}, [1])[0])
    await source.close()


async def test_many_calls_at_once_get_each_their_own_and_what_an_earlier_run_left_matches_none(scene, tmp_path):
    cfg = config(tmp_path)
    url = engine_of(scene)
    worker_of(scene)
    first = source_of(scene, [url], n=2)
    await first.open()
    requested = [given(cfg, {"sevens": Sevens()}, [row], n=2)[0] for row in range(24)]
    gone = asyncio.gather(*(AtroposGenerator(first, seed=1).generate(one) for one in requested[:8]))
    await gone
    await first.close()  # nothing was committed: all of it is served again to the next session
    source = source_of(scene, [url], n=2)
    await source.open()
    generator = AtroposGenerator(source, seed=1)
    outputs = await asyncio.gather(*(generator.generate(one) for one in requested))
    for one, output in zip(requested, outputs, strict=True):
        assert output["prompt_token_ids"] == [TOKENIZER.render(prompt).tolist() for prompt in one["prompts"]]
    assert source.dropped == 8, "those of the run before"
    await source.close()


async def test_what_the_api_cannot_carry_is_refused_with_what_to_do(scene, tmp_path):
    source = source_of(scene, n=4)
    await source.open()
    generator = AtroposGenerator(source)
    more = {"repetition_penalty": 1.1}  # SkyRL itself passes on no other option of this name
    cfg = config(tmp_path, **{"generator.sampling_params.additional_kwargs": more})
    with pytest.raises(
        ConfigError, match=r"repetition_penalty = 1.1 has no effect: it reaches only SkyRL's own engines"
    ):
        await generator.generate(given(cfg, {"sevens": Sevens()}, [1])[0])
    cfg = config(tmp_path, **{"generator.sampling_params.temperature": 0.5})
    with pytest.raises(ConfigError, match=r"all groups are 4 rollouts(.|\n)*eval_n_samples_per_prompt"):
        await generator.generate(given(cfg, {"sevens": Sevens()}, [1])[0])
    await source.close()
    with pytest.raises(FitError, match=r"no engine would be sent SkyRL's weights(.|\n)*atropos.engines="):
        Publisher([])
