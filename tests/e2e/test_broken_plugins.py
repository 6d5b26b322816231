"""Plugins that are broken in five ways: each is named, and everything else goes on working."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from atropos_core import __version__
from atropos_core.plugins.provider import CORE_API
from tests.conftest import plant

REWARD = """
from atropos_core import hookimpl
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import Provider

def build(options, context):
    BUILD

@hookimpl
def HOOK():
    return [Provider("NAME", "a planted reward", NoOptions, build, core_api="API")]
"""


def reward(name: str, *, hook: str = "atropos_rewards", build: str = "return None", api: str = CORE_API) -> str:
    return REWARD.replace("NAME", name).replace("HOOK", hook).replace("BUILD", build).replace("API", api)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    folder = tmp_path / "installed"
    folder.mkdir()
    plant(folder, "reward_raises", "raise RuntimeError('no licence found')\n")
    plant(folder, "reward_misspelt", reward("misspelt", hook="atropos_rewardz"))
    plant(folder, "reward_twice_a", reward("twice"))
    plant(folder, "reward_twice_b", reward("twice"))
    plant(folder, "reward_old", reward("old", api=">=7"))
    plant(folder, "reward_unbuilt", reward("unbuilt", build="raise OSError('no GPU in the cellar')"))
    plant(
        folder, "reward_wrong", "from atropos_core import hookimpl\n@hookimpl\ndef atropos_rewards():\n    return [3]\n"
    )
    return folder


def test_the_listing_shows_each_broken_plugin_with_why_and_all_others(atropos, planted):
    ended = atropos("plugins", PYTHONPATH=str(planted))
    assert ended.code == 0
    text = " ".join(ended.out.split())
    assert "reward_raises (reward_raises 1.0): RuntimeError: no licence found" in text
    assert "reward_misspelt (reward_misspelt 1.0): PluginValidationError: unknown hook 'atropos_rewardz'" in text
    assert "reward 'twice' is offered by both reward_twice_a and reward_twice_b" in text
    assert f"reward 'old' of reward_old needs atropos-core >=7; this is {__version__}" in text
    assert "reward_wrong (reward_wrong 1.0): PluginError: atropos_rewards() gave 3, which is not a Provider" in text
    assert "gsm8k" in text
    assert "unbuilt" in text, "what fails only when it is built is listed"


RUN = ("run", "--model", "toy", "--steps", "1", "--dir", "run", "--set", "evaluation.problems=2")


def test_a_run_that_names_none_of_them_goes_on_with_a_warning_for_each(atropos, sevens, planted):
    ended = atropos(*RUN, "--env", sevens, PYTHONPATH=str(planted))
    assert ended.code == 0, ended.err
    for name in ("reward_raises", "reward_misspelt", "reward_wrong"):
        assert ended.err.count(f"plugin {name!r} does not load") == 1


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "raises",
            "plugin 'reward_raises', which should offer a reward named 'raises', does not load: no licence found",
        ),
        ("misspelt", "does not load: unknown hook 'atropos_rewardz'"),
        ("twice", "two plugins offer a reward named 'twice': reward_twice_a and reward_twice_b."),
        ("old", f"needs atropos-core >=7; this is {__version__}"),
        ("unbuilt", "could not be built: OSError: no GPU in the cellar"),
    ],
)
def test_a_run_that_names_one_fails_from_the_original_error(atropos, sevens, planted, name, wanted):
    ended = atropos(*RUN, "--env", sevens, "--reward", name, PYTHONPATH=str(planted))
    assert ended.code == 2
    assert wanted in " ".join(ended.err.split())


def test_a_blocked_plugin_is_shown_as_blocked_and_settles_a_contest(atropos, sevens, planted):
    blocked = {"ATROPOS_DISABLE_PLUGINS": "reward_twice_b,reward_raises", "PYTHONPATH": str(planted)}
    ended = atropos("plugins", **blocked)
    assert "reward_twice_b (reward_twice_b 1.0): by ATROPOS_DISABLE_PLUGINS" in " ".join(ended.out.split())
    assert "offered by both" not in ended.out
    assert "no licence found" not in ended.out


def test_a_plugin_adds_a_command_and_a_broken_one_leaves_the_rest(atropos, tmp_path):
    command = "from atropos_core import hookimpl\n@hookimpl\ndef atropos_commands(app):\n    "
    plant(tmp_path, "command_hello", command + "app.command('hello')(lambda: print('hello from a plugin'))\n")
    plant(tmp_path, "command_bad", command + "raise KeyError('oh')\n")
    ended = atropos("hello", PYTHONPATH=str(tmp_path))
    assert ended.code == 0, ended.err
    assert "hello from a plugin" in ended.out
    assert "command_bad" in ended.err


def test_what_is_installed_changes_no_bit_of_a_deterministic_run_that_names_none_of_it(atropos, sevens, tmp_path):
    names = ",".join(sorted(entry.name for entry in entry_points(group="atropos")))
    assert {"curriculum", "distillation", "normalization", "reward_ensemble", "sinks"} <= set(names.split(","))
    run = (
        "run",
        "--model",
        "toy",
        "--env",
        sevens,
        "--deterministic",
        "--steps",
        "6",
        "--set",
        "evaluation.problems=4",
    )
    assert atropos(*run, "--dir", "all").code == 0
    assert atropos(*run, "--dir", "none", ATROPOS_DISABLE_PLUGINS=names).code == 0
    for file in (
        "checkpoints/step-000006/policy/table.npy",
        *(f"rollouts/step-{step:06d}.jsonl" for step in range(1, 7)),
    ):
        assert (tmp_path / "all" / file).read_bytes() == (tmp_path / "none" / file).read_bytes(), file
