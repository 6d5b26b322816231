"""A run file as ROLL's YAML."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from atropos_adapter_roll.adapter import RollAdapter
from atropos_adapter_roll.config import AdapterOptions, EnvOptions, read_env_options
from atropos_adapter_roll.recipe import recipe, shares, to_yaml
from atropos_core.config.run_file import Layer, RunConfig, load, read_file
from atropos_core.errors import ConfigError
from atropos_core.plugins.provider import RunContext

PLUGIN = Path(__file__).parents[1]


def run_file(**values):
    return load([Layer("test", {"environment": {"gsm8k": {}}, **values})]).config


def made_of(run, **options):
    return recipe(run, AdapterOptions(**options), run.model)


def adapter(options=None, model="tiny"):
    return RollAdapter(options or AdapterOptions(), RunContext(Path("."), Path(model)))


def test_a_run_file_becomes_rolls_keys():
    run = run_file(
        model="Qwen/Qwen2.5-0.5B-Instruct", training={"groups_per_step": 6, "group_size": 4, "steps": 9},
        sampling={"max_tokens": 100, "temperature": 0.7}, trainer={"use": "grpo", "learning_rate": 3e-6},
        evaluation={"every": 5, "problems": 100},
    )  # fmt: skip
    made = made_of(run, reward={"format": {"markers": ["\\boxed{}"]}})
    assert (made["max_steps"], made["rollout_batch_size"], made["sequence_length"]) == (9, 24, 1124)
    assert made["atropos"]["learning_rate"] == 3e-6
    train = made["train_env_manager"]
    assert (train["num_env_groups"], train["group_size"], train["num_groups_partition"]) == (6, 4, [6])
    assert train["max_env_num_per_worker"] % train["group_size"] == 0, "a group stays in one worker"
    assert train["group_filter_cls"] == "atropos_adapter_roll.group.GroupFilter"
    assert made["val_batch_size"] % made["val_env_manager"]["num_env_groups"] == 0
    env = made["custom_envs"]["gsm8k_train"]
    assert env["env_type"] == "atropos"
    assert env["env_config"]["system"] == env["agent_system_template"] != ""
    assert made["custom_envs"]["gsm8k_val"]["env_config"]["split"] == "test"
    assert isinstance(read_env_options(env["env_config"]), EnvOptions)


@pytest.mark.parametrize(
    ("evaluation", "every"), [({}, 9), ({"every": 4}, 4), ({"problems": 0}, 0), ({"every": 4, "problems": 0}, 0)]
)
def test_roll_validates_wherever_the_run_file_evaluates(evaluation, every):
    made = made_of(run_file(training={"steps": 9}, evaluation=evaluation))
    assert made["eval_steps"] == every
    if every:
        assert (made["val_batch_size"], made["val_env_manager"]["num_env_groups"]) == (512, 64)


def test_the_weight_of_the_environments_own_score_is_carried_over():
    run = run_file(reward={"environment": {"weight": 0.5}})
    for weight, scaled in ((1.0, 0.5), (3.0, 1.5)):
        made = made_of(run, reward={"environment": weight})
        for use in ("train", "val"):
            env = made["custom_envs"][f"gsm8k_{use}"]["env_config"]
            assert read_env_options(env).reward.environment == scaled


def test_a_weight_of_nothing_is_refused_where_right_answers_come_first():
    run = run_file(reward={"environment": {"weight": 0}})
    with pytest.raises(ConfigError, match="does not rank a right answer first"):
        made_of(run, manager="native")


def test_the_yaml_names_every_section_of_which_nothing_is_carried_over(tmp_path):
    written = adapter().export(run_file(), tmp_path)[0].read_text()
    comment = written[: written.index("\nseed:")]
    assert all(line.startswith("#") for line in comment.splitlines())
    carried = {
        "model",
        "seed",
        "training",
        "sampling",
        "environment",
        "reward",
        "evaluation",
        "checkpoint",
        "transform",
    }
    refused = {"teacher", "warmup"}
    for name in set(RunConfig.model_fields) - carried - refused:
        assert re.search(rf"\b{name}\b", comment), name


def test_the_yaml_says_what_was_meant():
    values = {
        "a": {"rate": 1e-06, "big": 1e22, "text": "yes: ${x}\n\"q\" \\boxed{} # no", "none": None},
        "list": [1, True, 2.5, "x"], "empty": {}, "unicode": "é",
    }  # fmt: skip
    read = yaml.safe_load(to_yaml(values))
    values["a"]["text"] = values["a"]["text"].replace("${", "\\${")
    assert read == values


def test_environments_share_the_groups_by_weight_and_each_has_one():
    assert shares([1, 1], 5) in ([3, 2], [2, 3])
    assert shares([3, 1], 8) == [6, 2] or sum(shares([3, 1], 8)) == 8
    assert shares([1000, 1, 1], 10) == [8, 1, 1]
    assert shares([0, 0], 4) == [2, 2]
    with pytest.raises(ConfigError, match="cannot share 1 groups"):
        shares([1, 1], 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"environment": {}}, r"no environment(.|\n)*Add one: --env gsm8k\."),
        ({"reward": {"numeric": {}}}, r"reward.numeric(.|\n)*Remove it, and see `reward` of the adapter's options"),
        (
            {"teacher": {"big": {"use": "distillation", "model": "tiny-teacher"}}},
            r"teacher(.|\n)*Remove \[teacher\]\.",
        ),
        ({"warmup": {"data": "rows.jsonl"}}, r"warmup(.|\n)*Run the warm start first"),
        ({"sampling": {"min_p": 0.1}}, r"sampling.min_p=0.1(.|\n)*no min_p(.|\n)*Remove it; sampling.top_p"),
        ({"sampling": {"stop": ["\n"]}}, r"sampling.stop(.|\n)*Remove it, and set stop_strings"),
    ],
)
def test_what_roll_cannot_take_over_is_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        made_of(run_file(**values))


def test_an_environment_in_a_file_is_named_wherever_ray_starts_its_workers(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from atropos_core import Environment, Task\n\nclass Mine(Environment):\n"
        "    def tasks(self, split):\n        return [Task('a', ({'role': 'user', 'content': 'x'},))]\n"
        "    async def score(self, task, reply):\n        return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    made = made_of(run_file(environment={"mine": {"use": "./mine.py:Mine"}}))
    env = made["custom_envs"]["mine_train"]
    assert env["env_config"]["environment"] == f"{tmp_path}/mine.py:Mine"
    assert (env["agent_system_template"], "system" in env["env_config"]) == ("", False)


def test_data_of_a_run_file_is_named_wherever_ray_starts_its_workers(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "run.toml").write_text('[environment.gsm8k]\nsource = "path"\npath = "."\n')
    made = made_of(load([read_file(tmp_path / "run.toml")]).config)
    assert made["custom_envs"]["gsm8k_train"]["env_config"]["options"] == {"source": "path", "path": str(tmp_path)}


@pytest.mark.parametrize("name", ["gsm8k", "tools"])
def test_the_examples_are_what_the_adapter_writes_today(name, tmp_path):
    folder = PLUGIN / "examples" / name
    options = AdapterOptions.model_validate(tomllib.loads((folder / "adapter.toml").read_text()))
    run = load([read_file(folder / "run.toml")]).config
    for path in adapter(options, run.model).export(run, tmp_path):
        assert path.read_text() == (folder / path.name).read_text(), path.name


def test_the_script_asks_for_roll_where_it_is_not_named(tmp_path):
    adapter().export(run_file(), tmp_path / "out")
    environment = {key: value for key, value in os.environ.items() if key != "ROLL"}
    ended = subprocess.run([tmp_path / "out/run.sh"], env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode != 0
    assert "set ROLL to the directory of a checkout" in ended.stderr


@pytest.mark.parametrize(
    "deadline", ["open_deadline_s", "step_deadline_s", "action_deadline_s", "episode_deadline_s", "cleanup_deadline_s"]
)
def test_every_deadline_is_below_the_one_after_which_roll_calls_an_episode_hung(deadline):
    assert getattr(EnvOptions(environment="x"), deadline) < 3600
    with pytest.raises(ConfigError, match=f"env_config.{deadline}"):
        read_env_options({"environment": "x", deadline: 3600})


def test_a_misspelt_key_is_named_with_the_near_miss():
    with pytest.raises(ConfigError, match="Did you mean 'observation'"):
        read_env_options({"environment": "x", "observations": "delta"})
