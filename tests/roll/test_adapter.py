"""The adapter itself: what it writes as ROLL reads it, what it finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import atropos_adapter_roll.env  # noqa: F401 - registers
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from tests.conftest import REPOSITORY
from tests.roll.driver import OurTraj
from tests.roll.environments import HERE

EXAMPLES = REPOSITORY / "plugins/adapter_roll/examples"


@pytest.fixture(scope="module", autouse=True)
def _one_ray_for_every_doctor(request):
    if "ROLL_SOURCE" in os.environ:
        request.getfixturevalue("roll")


def adapter(**options):
    offer = load_plugins().registry.find("adapter", "roll")
    return offer.provider.build(offer.provider.options(**options), RunContext(Path("."), Path(".")))


@pytest.mark.parametrize("name", ["gsm8k", "tools"])
def test_an_example_makes_environments_that_run_as_omegaconf_gives_it_to_roll(name):
    config = OmegaConf.load(EXAMPLES / name / "roll.yaml")
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert resolved["actor_train"]["device_mapping"] == "list(range(0,1))"
    assert type(resolved["actor_train"]["training_args"]["learning_rate"]) is float
    assert resolved["actor_infer"]["strategy_args"]["strategy_config"]["max_model_len"] == resolved["sequence_length"]
    for use in ("train", "val"):
        managed = resolved[f"{use}_env_manager"]
        assert managed["group_filter_cls"] == "atropos_adapter_roll.group.GroupFilter"
        [tag] = managed["tags"]
        custom = config.custom_envs[tag]
        entry = {**custom, "tag": tag, "group_id": 0, "env_id": 0, "group_seed": 1, "config": {**custom.env_config}}
        worker = SimpleNamespace(group_filter_cls=managed["group_filter_cls"], group_size=managed["group_size"])
        seen: list = []
        member = OurTraj(worker, None, OmegaConf.create(entry), recorded(seen))
        rollout = member.run_episode(seed=3)
        assert rollout.meta_info["atropos"]["failed"] == ""
        assert [message["role"] for message in seen[0]] == ["system", "user"]
        assert seen[0][0]["content"] not in seen[0][1]["content"], "the environment's system message appears once"
        member.env.close()


@pytest.mark.parametrize("model", [None, "tiny"])
def test_the_command_on_the_page_names_a_model_that_roll_can_load(atropos, tmp_path, model):
    page = (REPOSITORY / "docs/roll.md").read_text()
    [command] = re.findall(r"^atropos (adapter roll .*--out .*)$", page, re.M)
    ended = atropos(*command.split(), *(("--model", model) if model else ()))
    assert ended.code == 0, ended.err
    [written] = tmp_path.rglob("roll.yaml")
    made = OmegaConf.to_container(OmegaConf.load(written), resolve=True, throw_on_missing=True)
    assert made["pretrain"] == made["reward_pretrain"]
    if model:
        assert (Path(made["pretrain"]) / "config.json").is_file(), "ROLL knows no name of ours"
    else:
        assert made["pretrain"] == "Qwen/Qwen2.5-0.5B-Instruct", "a model of the hub is named, and not looked for"
    assert made["eval_steps"] == made["max_steps"] > 0


def recorded(seen):
    return lambda messages: seen.append(messages) or "#### 0"


def test_versions_name_what_is_installed():
    found = adapter().versions()
    assert found["gem-llm"] == "0.1.0"
    assert found["ray"] == "2.56.0"


def test_the_doctor_runs_an_episode_through_gem():
    findings = {finding.subject: finding for finding in adapter().doctor()}
    assert findings["gem-llm"].ok
    assert findings["an episode"].ok
    assert "3 replies, reward 1" in findings["an episode"].detail
    assert not [one for subject, one in findings.items() if subject.startswith("ROLL") and one.ok is False]
    assert all(finding.remedy for finding in findings.values() if not finding.ok)


def test_the_doctor_runs_the_environment_that_it_is_given_and_says_what_fails():
    [finished] = [one for one in adapter(trial_environment="gsm8k").doctor() if one.subject == "an episode"]
    assert (finished.ok, finished.detail) == (True, "gsm8k by gem.make: 1 replies, reward 0")
    [failed] = [one for one in adapter(trial_environment=f"{HERE}:Raises").doctor() if one.subject == "an episode"]
    assert failed.ok is False
    assert "a tool divided by zero" in failed.detail
    [unknown] = [one for one in adapter(trial_environment="gsm9k").doctor() if one.subject == "an episode"]
    assert "Did you mean 'gsm8k'" in unknown.detail


def test_the_doctors_ray_is_its_own_where_others_have_a_cluster() -> None:
    """RAY_ADDRESS names it to whoever does not say that they want their own; here nobody is at that address."""
    program = "from atropos_adapter_roll.through_roll import a_ray\nwith a_ray(): print('its own')"
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert ended.returncode == 0 and "its own" in ended.stdout, ended.stderr
