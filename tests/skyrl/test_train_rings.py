"""SkyRL's train() over shared memory: `atropos engine` samples, `atropos skyrl-env` runs them, no server and no engine here."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.rings import RingGroups
from atropos_adapter_skyrl.source import RolloutsFailed
from atropos_adapter_skyrl.threaded_source import Aside
from atropos_adapter_skyrl.weights import Publisher
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_trajectory_client.remote_engine import RemoteEngine
from tests.e2e.roles import Role
from tests.skyrl.elsewhere import prepare, python_path
from tests.skyrl.parts import Sevens, TableClient, TableDispatch, config, plain, trainer_of
from tests.skyrl.test_generator import given, here
from tests.skyrl.test_train import RATE, SEVENS, STEPS, Seen

TOKENIZER = ChatTokenizer(TOY_MODEL)


class Place:
    """Processes around one folder of rings."""

    def __init__(self, folder):
        self.folder = folder
        self.roles = []
        self.rings = folder / "rings"

    def start(self, name, *arguments):
        self.roles.append(Role(self.folder, f"{name}-{len(self.roles)}", arguments))
        return self.roles[-1]

    def engine(self):
        role = self.start("engine", "engine", "--model", "toy", "--engine", "table", "--port", "0")
        return role.says(r"(http://[\w.:-]+)").rstrip(".")

    def worker(self, url):
        return self.start(
            "worker", "skyrl-env", "./sevens.py", "--rings", "rings", "--engine-url", url, "--model", "toy"
        )

    def source(self, **options):
        made = {"source": "rings", "rings": self.rings, "deadline_s": 60, **options}
        return RingGroups(SkyRLOptions.model_validate(made))


@pytest.fixture
def place(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    made = Place(tmp_path)
    yield made
    for role in made.roles:
        role.kill()


class FromTheStart(RingGroups):
    """Has its workers come as soon as it is open."""

    start = None

    async def open(self):
        await super().open()
        self.start()


async def test_the_exact_expected_reward_rises_over_thirty_steps_with_evaluation_and_a_killed_worker(place, tmp_path):
    cfg = config(
        tmp_path,
        **{"trainer.max_training_steps": STEPS, "trainer.epochs": 8, "trainer.eval_interval": 10},
    )  # fmt: skip
    url = place.engine()
    source = FromTheStart(place.source()._options)
    source.start = lambda: (place.worker(url), place.worker(url))
    dispatch = TableDispatch(cfg, None, RATE, SEVENS)
    trainer = trainer_of(cfg, Aside(source), {"sevens": Sevens()}, dispatch, publisher=Publisher([RemoteEngine(url)]))
    seen = Seen(dispatch).attach(trainer)
    killing = asyncio.create_task(_kill_one(place, trainer))
    await trainer.train()
    await killing
    seen.check_rise(STEPS)
    train = [one for one in seen.logged if "atropos/min_policy_version" in one]
    for name in ("atropos/min_policy_version", "atropos/max_policy_version"):
        assert [one[name] for one in train] == list(range(STEPS)), "every token says which weights it was sampled from"
    assert sum("eval/all/avg_score" in one for one in seen.logged) == 3
    assert place.roles[2].ends(60) == 0 and "groups were sent" in place.roles[2].text


async def test_epochs_evaluation_and_dynamic_sampling_never_get_what_another_call_requested(place, tmp_path):
    cfg = config(
        tmp_path,
        **{"trainer.max_training_steps": 6, "trainer.epochs": 12, "trainer.eval_interval": 1, "trainer.train_batch_size": 4,
           "trainer.algorithm.dynamic_sampling.type": "filter"},
    )  # fmt: skip
    url = place.engine()
    source = FromTheStart(place.source()._options)
    source.start = lambda: (place.worker(url), place.worker(url))
    environments = {"sevens": Sevens(8)}  # two batches an epoch
    dispatch = TableDispatch(cfg, None, 1.0, SEVENS)  # a third of the groups are flat
    trainer = trainer_of(cfg, source, environments, dispatch, publisher=Publisher([RemoteEngine(url)]))
    calls = []
    generate = trainer.generator.generate

    async def watched(batch):
        output = await generate(batch)
        assert {version for row in output["policy_versions"] for version in row} == {source.version}
        assert output["prompt_token_ids"] == [TOKENIZER.render(prompt).tolist() for prompt in batch["prompts"]]
        calls.append((batch["batch_metadata"].training_phase, json.dumps(plain(output)["response_ids"])))
        return output

    trainer.generator.generate = watched
    await trainer.train()
    assert len({replies for phase, replies in calls if phase == "train"}) == sum(phase == "train" for phase, _ in calls)
    assert sum(phase == "eval" for phase, _ in calls) == 6 and len(calls) > 12
    assert source.exchange.unwanted == 0


async def _kill_one(place, trainer):
    while trainer.global_step < 12:
        await asyncio.sleep(0.005)
    place.roles[1].kill()


async def test_the_rings_and_skyrls_own_engines_give_the_same_rows_of_the_same_seeds(place, tmp_path):
    cfg, environments = config(tmp_path), {"sevens": Sevens()}
    url = place.engine()
    source = place.source()
    place.worker(url).says(f"waiting for SkyRL at {place.rings}")
    await source.open()
    requested, _ = given(cfg, environments, [4, 1, 7, 9])
    far = plain(await AtroposGenerator(source, seed=9).generate(requested))
    near = plain(await AtroposGenerator(here(TableClient(), sevens=Sevens()), seed=9).generate(requested))
    for name in (
        "prompt_token_ids",
        "response_ids",
        "loss_masks",
        "rollout_logprobs",
        "rewards",
        "stop_reasons",
        "policy_versions",
        "env_metrics",
    ):
        assert far[name] == near[name], name
    await source.close()


def test_a_worker_gives_up_where_skyrl_does_not_come(place):
    rings = ("--rings", str(place.rings), "--engine-url", "http://127.0.0.1:9", "--model", "toy", "--wait-s", "0")
    worker = place.start("worker", "skyrl-env", "./sevens.py", *rings)
    assert worker.ends(60) == 1 and "no SkyRL trainer offers work at" in worker.text and "Traceback" not in worker.text


async def test_rollouts_that_fail_over_there_are_raised_with_their_cause(place, tmp_path):
    url = place.engine()
    (tmp_path / "broken").touch()
    source = place.source(attempts=2)
    await source.open()
    place.worker(url)
    with pytest.raises(RolloutsFailed, match=r"failed 2 times(.|\n)*rollout: ValueError: the tool is away"):
        await AtroposGenerator(source).generate(given(config(tmp_path), {"sevens": Sevens()}, [1])[0])
    await source.close()


async def test_many_calls_at_once_while_workers_are_killed_and_replaced(place, tmp_path):
    cfg, environments = config(tmp_path), {"sevens": Sevens()}
    url = place.engine()
    source = place.source()
    await source.open()
    workers = [place.worker(url), place.worker(url)]
    generator = AtroposGenerator(source, seed=3)
    requested = [given(cfg, environments, [row % 64], step=row // 64, n=2)[0] for row in range(240)]

    async def kill():
        await asyncio.sleep(0.1)
        while source.exchange.workers < 2:
            await asyncio.sleep(0.005)
        psutil.Process(workers[0].process.pid).kill()
        place.worker(url)

    outputs, _ = await asyncio.gather(asyncio.gather(*(generator.generate(one) for one in requested)), kill())
    for one, output in zip(requested, outputs, strict=True):
        assert output["prompt_token_ids"] == [TOKENIZER.render(prompt).tolist() for prompt in one["prompts"]]
    await source.close()
