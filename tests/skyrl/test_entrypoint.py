"""The command line as SkyRL passes it on, what is exported for it, its checks, and the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_base
from skyrl.train.utils import validate_cfg

from atropos_adapter_skyrl.adapter import arguments
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.entrypoint import AtroposExp, check, split, task_of_ray
from atropos_adapter_skyrl.source import RolloutsFailed
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.config.run_file import Layer, load
from atropos_core.errors import ConfigError
from tests.conftest import REPOSITORY
from tests.shared_memory import SHM, SharedFiles
from tests.skyrl.elsewhere import python_path
from tests.skyrl.parts import TableClient, TableDispatch, config

RUN = """
model = "toy"
[training]
steps = 3
groups_per_step = 4
group_size = 4
[sampling]
max_tokens = 2
[environment.sevens]
use = "{}/sevens.py:Sevens"
[evaluation]
problems = 8
"""


@pytest.fixture
def exported(atropos, tmp_path):
    from tests.skyrl.elsewhere import SEVENS

    (tmp_path / "sevens.py").write_text(SEVENS)
    (tmp_path / "mine.toml").write_text(RUN.format(tmp_path))
    ended = atropos("adapter", "skyrl", "mine.toml", "--out", "made", "--set", "seed=5")
    assert ended.code == 0, ended.err
    return tmp_path / "made"


def given_by(script: Path, folder: Path) -> list[str]:
    """The words that `python` is started with, by a shell."""
    stand_in = folder / "bin/python"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    shell = {**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    words = subprocess.run(
        [script, "more=1"], env=shell, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[:2] == ["-m", "skyrl.train.entrypoints.main_base"] and words[-1] == "more=1"
    return words[2:-1]


def test_skyrl_itself_accepts_every_argument_of_the_launch_script(exported, tmp_path):
    options, theirs = split(given_by(exported / "skyrl.sh", tmp_path))
    assert not [one for one in theirs if one.startswith(("atropos.", "trainer.override_entrypoint"))]
    assert options.run == Path("run.toml").resolve() and options.source == "here"
    cfg = SkyRLTrainConfig.from_cli_overrides(theirs)
    check(cfg, options)
    validate_cfg(cfg)
    assert (cfg.trainer.max_training_steps, cfg.trainer.seed, cfg.trainer.policy.model.path) == (3, 5, str(TOY_MODEL))
    assert (cfg.generator.n_samples_per_prompt, cfg.generator.sampling_params.max_generate_length) == (4, 2)
    assert cfg.generator.eval_sampling_params.temperature == 0.0 and cfg.trainer.eval_interval == 3


@pytest.mark.parametrize("name", ["gsm8k", "tool"])
def test_the_example_configurations_are_accepted_by_skyrl(name, tmp_path):
    options, theirs = split(given_by(REPOSITORY / f"plugins/adapter_skyrl/examples/{name}/skyrl.sh", tmp_path))
    cfg = SkyRLTrainConfig.from_cli_overrides(theirs)
    check(cfg, options)
    validate_cfg(cfg)
    assert cfg.trainer.policy.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_skyrls_own_main_passes_on_before_it_parses_and_a_wrong_option_is_named(monkeypatch):
    flag = "trainer.override_entrypoint=atropos_adapter_skyrl.entrypoint"
    monkeypatch.setattr(sys, "argv", ["main_base", flag, "atropos.sauce=api"])
    with pytest.raises(ConfigError, match=r"atropos.sauce.*Did you mean 'source'"):
        main_base.main()
    monkeypatch.setattr(sys, "argv", ["main_base", flag, "trainer.placement.colocate_all=true"])
    with pytest.raises(ConfigError, match=r"atropos.run is missing(.|\n)*num_workers=0"):
        main_base.main()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"trainer.placement.colocate_all": True}, "colocate_all=false"),
        ({"trainer.policy.model.lora.rank": 8}, "lora.rank=0"),
        ({"generator.vision_language_generator": True}, "vision_language_generator=false"),
        (
            {"trainer.algorithm.advantage_estimator": "atropos", "generator.step_wise_trajectories": True},
            "advantage_estimator=grpo",
        ),
        (
            {"trainer.algorithm.loss_reduction": "sequence_mean", "generator.step_wise_trajectories": True},
            "counts an episode once for each reply: set trainer.algorithm.loss_reduction=token_mean",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_what_to_set(tmp_path, change, wanted):
    options = SkyRLOptions(source="rings", rings=tmp_path, run=tmp_path / "run.toml")
    check(config(tmp_path), options)
    with pytest.raises(ConfigError, match=wanted):
        check(config(tmp_path, **change), options)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, "has no effect with the estimator grpo"),
        ({"trainer.algorithm.advantage_estimator": "rloo"}, "has no effect with the estimator rloo"),
        (
            {"trainer.algorithm.advantage_estimator": "gae", "generator.step_wise_trajectories": True},
            "takes only the reward of a trajectory's last step",
        ),
    ],
)
def test_turn_rewards_that_skyrl_would_not_read_are_refused(tmp_path, change, wanted):
    options = SkyRLOptions(source="rings", rings=tmp_path, run=tmp_path / "run.toml", turn_rewards=True)
    check(config(tmp_path, **{"trainer.algorithm.advantage_estimator": "reinforce++"}), options)
    with pytest.raises(ConfigError, match=wanted):
        check(config(tmp_path, **change), options)


class OnATable(AtroposExp):
    """All but the GPU workers: SkyRL's experiment, its tokenizer, data loader and trainer."""

    def get_inference_client(self):
        return TableClient()

    def _setup_trainer(self):
        client = self.get_inference_client()
        self.trainer = self.get_trainer(
            cfg=self.cfg, tracker=self.get_tracker(), tokenizer=self.tokenizer,
            train_dataset=self.train_dataset, eval_dataset=self.eval_dataset, inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client), colocate_pg=None,
        )  # fmt: skip
        self.trainer.dispatch = TableDispatch(self.cfg, client, 1.0)
        return self.trainer


def test_the_experiment_trains_from_an_exported_run_file_in_a_task_of_ray(exported, tmp_path):
    options = SkyRLOptions(run=exported / "run.toml")
    cfg = config(tmp_path, **{"trainer.eval_interval": 2, "generator.n_samples_per_prompt": 4})

    @ray.remote(num_cpus=1)
    def trained(cfg, options):
        files = SharedFiles()
        with task_of_ray():
            experiment = OnATable(cfg, options)
            experiment.run()
            files.look()
        client = experiment.trainer.inference_engine_client
        return (experiment.trainer.global_step, len(experiment.eval_dataset), client.weight_version), files.seen

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": python_path(REPOSITORY)}},
    )
    try:
        numbers, seen = ray.get(trained.remote(cfg, options), timeout=200)
    finally:
        ray.shutdown()
    assert numbers == (2, 8, 3)
    assert not [file.name for file in SHM.iterdir() if file.stat().st_ino in seen], (
        "Ray has killed what would remove them"
    )


def test_the_experiment_without_an_engine_of_skyrls_starts_none(exported, tmp_path):
    options = SkyRLOptions(
        run=exported / "run.toml", source="rings", rings=tmp_path / "rings", engines=("http://127.0.0.1:9",)
    )
    with closing(AtroposExp(config(tmp_path), options)) as experiment:
        assert experiment.get_inference_client() is None
        generator = experiment.get_generator(experiment.cfg, experiment.tokenizer, None)
        assert type(generator.source.inner).__name__ == "RingGroups"


KEEPING = """
import asyncio
from pathlib import Path

from atropos_core import Environment, Task

HERE = Path(__file__).parent


class Keeping(Environment):
    helper = None

    def tasks(self, split):
        assert self.helper is not None, "open() comes first"
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},)) for n in range(64)]

    async def open(self):
        self.asked = asyncio.Queue()
        self.helper = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            (await self.asked.get()).set_result(7)

    async def ask(self):
        answer = asyncio.get_running_loop().create_future()
        await self.asked.put(answer)
        return await answer

    async def score(self, task, reply):
        if (HERE / "broken").exists():
            raise ValueError("the tool is away")
        return float(await self.ask())

    async def close(self):
        assert await self.ask() == 7
        self.helper.cancel()
        with (HERE / "closed").open("a") as file:
            file.write("closed\\n")
        if (HERE / "stuck").exists():
            raise OSError("what was opened does not close")
"""


@pytest.fixture
def keeping(exported, tmp_path, monkeypatch):
    """An experiment whose environments have a helper in the event loop that opened them."""
    (tmp_path / "sevens.py").write_text(KEEPING.replace("Keeping", "Sevens"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return lambda **changes: OnATable(config(tmp_path, **changes), SkyRLOptions(run=exported / "run.toml", attempts=1))


def test_an_environment_is_closed_where_it_was_opened_and_nothing_is_left(keeping, tmp_path):
    experiment = keeping()
    experiment.run()
    assert experiment.trainer.global_step == 2
    assert (tmp_path / "closed").read_text() == "closed\n" * 2, (
        "the one that says the tasks, and the one that runs them"
    )
    assert list((tmp_path / "tmp").glob("atropos-*")) == []
    experiment.close()


def test_what_does_not_close_is_reported_and_hides_neither_a_training_nor_why_one_failed(keeping, tmp_path, capsys):
    (tmp_path / "stuck").touch()
    experiment = keeping()
    experiment.run()
    assert experiment.trainer.global_step == 2
    assert "environment 'sevens'" in (printed := capsys.readouterr().err) and "does not close" in printed
    (tmp_path / "broken").touch()
    with pytest.raises(RolloutsFailed, match="the tool is away"):
        keeping().run()
    assert "does not close" in capsys.readouterr().err
    assert list((tmp_path / "tmp").glob("atropos-*")) == []


def test_an_experiment_that_cannot_begin_leaves_nothing(keeping, tmp_path):
    with pytest.raises(ConfigError, match="64 tasks are fewer than"):
        keeping(**{"trainer.train_batch_size": 65, "trainer.policy_mini_batch_size": 65})
    assert (tmp_path / "closed").read_text() == "closed\n"
    assert list((tmp_path / "tmp").glob("atropos-*")) == []


@pytest.mark.parametrize(("tasks", "each"), [(None, 4), (3, 3)])
def test_evaluation_problems_are_shared_among_environments_and_tasks_bounds_each(exported, tmp_path, tasks, each):
    run = exported / "run.toml"
    run.write_text(run.read_text() + f'\n[environment.more]\nuse = "{tmp_path}/sevens.py:Sevens"\n')
    cfg = config(tmp_path, **{"trainer.eval_interval": 2})
    with closing(AtroposExp(cfg, SkyRLOptions(run=run, tasks=tasks))) as experiment:
        evaluated = experiment.eval_dataset
        assert Counter(evaluated[at]["env_class"] for at in range(len(evaluated))) == {"sevens": each, "more": each}
        assert len(experiment.train_dataset) == 2 * (tasks or 64)


PUBLISHING = """
import asyncio, time
from pathlib import Path
from atropos_adapter_skyrl.weights import Publisher
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.plugins.provider import RunContext


def save(directory):
    Path(directory).mkdir()
    (Path(directory) / "model.safetensors").write_bytes(bytes(1000))
    print(directory, flush=True)
    time.sleep(120)


engine = ToyEngine(ToyEngineOptions(), RunContext(directory=Path("."), model=TOY_MODEL))
asyncio.run(Publisher([engine]).publish(1, save))
"""


def test_a_model_that_a_killed_training_was_sending_is_removed_by_the_next(exported, tmp_path, monkeypatch):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": python_path(REPOSITORY)}
    options = SkyRLOptions(run=exported / "run.toml")
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHING], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            model = Path(child.stdout.readline().strip()) / "model.safetensors"
            AtroposExp(config(tmp_path), options).close()
            assert model.is_relative_to(scratch) and model.exists(), "its owner lives"
        finally:
            child.kill()
    AtroposExp(config(tmp_path), options).close()
    assert not model.parent.parent.exists()


def test_groups_of_the_api_get_one_size_and_one_sampling_also_in_an_evaluation():
    run = load([Layer("test", {"environment": {"a": {"use": "a"}}})]).config
    made = arguments(
        run, SkyRLOptions(source="api", url="http://127.0.0.1:8000", engines=("http://127.0.0.1:8001",)), "m"
    )
    assert made["generator.eval_n_samples_per_prompt"] == made["generator.n_samples_per_prompt"]
    assert made["generator.eval_sampling_params.temperature"] == made["generator.sampling_params.temperature"] == 1.0
    options, _ = split([f"{key}={json.dumps(value)}" for key, value in made.items() if key.startswith("atropos.")])
    assert options.engines == ("http://127.0.0.1:8001",) and options.url == "http://127.0.0.1:8000"


def test_the_doctor_runs_an_episode_through_skyrls_classes(atropos):
    ended = atropos("adapter", "skyrl", "doctor")
    assert ended.code == 0, ended.out + ended.err
    assert "0.3.0" in ended.out and "4 rollouts of one task" in ended.out and "not known" not in ended.out
    assert not ended.out.rstrip().endswith("up to 0.00"), "a group that is not flat"
