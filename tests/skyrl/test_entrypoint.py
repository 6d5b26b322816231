"""The command line as SkyRL hands it over, what is exported for it, its checks, and the doctor."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_base
from skyrl.train.utils import validate_cfg

from atropos_adapter_skyrl import advantages
from atropos_adapter_skyrl.adapter import arguments
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.entrypoint import AtroposExp, check, split
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.config import Layer, load
from atropos_core.errors import ConfigError
from tests.conftest import REPOSITORY
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


def test_skyrls_own_main_hands_over_before_it_parses_and_a_wrong_option_is_named(monkeypatch):
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
        ({"trainer.placement.colocate_all": "true"}, "colocate_all=false"),
        ({"trainer.policy.model.lora.rank": 8}, "lora.rank=0"),
        ({"generator.vision_language_generator": "true"}, "vision_language_generator=false"),
        (
            {"trainer.algorithm.advantage_estimator": "atropos", "generator.step_wise_trajectories": "true"},
            "advantage_estimator=grpo",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_what_to_set(tmp_path, change, wanted):
    options = SkyRLOptions(source="rings", rings=tmp_path, run=tmp_path / "run.toml")
    check(config(tmp_path), options)
    with pytest.raises(ConfigError, match=wanted):
        check(config(tmp_path, **change), options)


def test_the_experiment_trains_from_an_exported_run_file_in_a_task_of_ray(exported, tmp_path, monkeypatch):
    """All but the GPU workers: SkyRL's experiment, its tokenizer, data loader and trainer, in a process of Ray's."""
    options = SkyRLOptions(run=exported / "run.toml")
    cfg = config(tmp_path, **{"trainer.eval_interval": 2, "generator.n_samples_per_prompt": 4})

    @ray.remote(num_cpus=1)
    def trained(cfg, options):
        advantages.register()
        experiment = AtroposExp(cfg, options)
        client = TableClient()
        generator = experiment.get_generator(cfg, experiment.tokenizer, client)
        trainer = experiment.get_trainer(
            cfg=cfg, tracker=experiment.get_tracker(), tokenizer=experiment.tokenizer,
            train_dataset=experiment.train_dataset, eval_dataset=experiment.eval_dataset, inference_engine_client=client,
            generator=generator, colocate_pg=None,
        )  # fmt: skip
        trainer.dispatch = TableDispatch(cfg, client, 1.0)
        asyncio.run(trainer.train())
        return trainer.global_step, len(experiment.eval_dataset), client.weight_version

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
    )
    try:
        assert ray.get(trained.remote(cfg, options), timeout=100) == (2, 8, 3)
    finally:
        ray.shutdown()


def test_the_experiment_without_an_engine_of_skyrls_starts_none(exported, tmp_path):
    options = SkyRLOptions(
        run=exported / "run.toml", source="rings", rings=tmp_path / "rings", engines=("http://127.0.0.1:9",)
    )
    experiment = AtroposExp(config(tmp_path), options)
    assert experiment.get_inference_client() is None
    generator = experiment.get_generator(experiment.cfg, experiment.tokenizer, None)
    assert type(generator.source.inner).__name__ == "RingGroups"


@pytest.mark.parametrize(("tasks", "each"), [(None, 4), (3, 3)])
def test_evaluation_problems_are_shared_among_environments_and_tasks_bounds_each(exported, tmp_path, tasks, each):
    run = exported / "run.toml"
    run.write_text(run.read_text() + f'\n[environment.more]\nuse = "{tmp_path}/sevens.py:Sevens"\n')
    experiment = AtroposExp(config(tmp_path, **{"trainer.eval_interval": 2}), SkyRLOptions(run=run, tasks=tasks))
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
from atropos_core.registry import RunContext


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
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(REPOSITORY)}
    options = SkyRLOptions(run=exported / "run.toml")
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHING], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            model = Path(child.stdout.readline().strip()) / "model.safetensors"
            AtroposExp(config(tmp_path), options)
            assert model.is_relative_to(scratch) and model.exists(), "its owner lives"
        finally:
            child.kill()
    AtroposExp(config(tmp_path), options)
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


def test_the_doctor_plays_an_episode_through_skyrls_classes(atropos):
    ended = atropos("adapter", "skyrl", "doctor")
    assert ended.code == 0, ended.out + ended.err
    assert "0.3.0" in ended.out and "4 plays of one task" in ended.out
