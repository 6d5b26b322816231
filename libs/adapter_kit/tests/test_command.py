"""`atropos adapter`, over an adapter that is installed as a user would install one."""

from __future__ import annotations

import os

from tests.conftest import plant

ADAPTER = """
from atropos_core import hookimpl
from atropos_core.interfaces import Finding
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import Provider


class Shown(Options):
    shout: bool = False


class Paper:
    def __init__(self, options, context):
        self.options, self.context = options, context

    def export(self, run, out):
        text = f"{run.model} {sorted(run.environment)} x {run.training.group_size}"
        (out / "paper.txt").write_text(text.upper() if self.options.shout else text)
        return [out / "paper.txt"]

    def versions(self):
        return {"paper": "1.2"}

    def doctor(self):
        sound = Finding("pencil", True, f"sharp, for {self.context.model.name}")
        return [sound, Finding("rubber", False, "lost", "Buy one.")] if self.options.shout else [sound]


@hookimpl
def atropos_adapters():
    yield Provider("paper", "environments on paper", Shown, Paper)
"""


def on_paper(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    plant(site, "adapter_paper", ADAPTER)
    return {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_the_list_shows_adapters_and_the_package_that_each_is_from(atropos, tmp_path):
    ended = atropos("adapter", "list", **on_paper(tmp_path))
    assert ended.code == 0, ended.err
    assert "environments on paper" in ended.out and "adapter_paper" in ended.out


def test_export_gives_the_adapter_the_run_file_with_flags_over_it(atropos, sevens, tmp_path):
    (tmp_path / "run.toml").write_text('model = "toy"\n[environment.sevens]\nuse = "./sevens.py:Sevens"\n')
    arguments = ("adapter", "paper", "run.toml", "--set", "training.group_size=3", "--out", "made")
    ended = atropos(*arguments, **on_paper(tmp_path))
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["made/paper.txt"]
    assert (tmp_path / "made/paper.txt").read_text() == "toy ['sevens'] x 3"


def test_a_model_of_the_hub_is_not_downloaded_for_an_export(atropos, sevens, tmp_path):
    arguments = ("adapter", "paper", "--env", sevens, "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--out", "made")
    ended = atropos(*arguments, **on_paper(tmp_path))
    assert ended.code == 0, ended.err
    assert (tmp_path / "made/paper.txt").read_text().startswith("Qwen/Qwen2.5-0.5B-Instruct")


def test_options_of_the_adapter_are_checked_and_reach_it(atropos, sevens, tmp_path):
    arguments = ("adapter", "paper", "--env", sevens, "--model", "toy", "--out", "made")
    installed = on_paper(tmp_path)
    wrong = atropos(*arguments, "--option", "shoot=true", **installed)
    assert wrong.code == 2 and "Did you mean 'shout'?" in wrong.err and not (tmp_path / "made").exists()
    assert atropos(*arguments, "--option", "shout=true", **installed).code == 0
    assert (tmp_path / "made/paper.txt").read_text().startswith("TOY")


def test_two_transforms_that_make_advantages_are_refused(atropos, sevens, tmp_path):
    out = tmp_path / "out"
    second = ("--set", "transform.second.use=group_advantage")
    ended = atropos("adapter", "paper", "--env", sevens, "--out", str(out), *second, **on_paper(tmp_path))
    assert ended.code == 2 and "transform.group_advantage has no effect" in ended.err
    assert not out.exists()


def test_a_folder_that_holds_something_is_refused(atropos, sevens, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made/mine").write_text("")
    ended = atropos("adapter", "paper", "--env", sevens, "--model", "toy", "--out", "made", **on_paper(tmp_path))
    assert ended.code == 1 and "made is not empty" in ended.err


def test_the_doctor_says_versions_and_findings_and_ends_with_1_where_something_is_broken(atropos, tmp_path):
    installed = on_paper(tmp_path)
    sound = atropos("adapter", "paper", "doctor", **installed)
    assert sound.code == 0 and "1.2" in sound.out and "sharp, for toy_model" in sound.out
    broken = atropos("adapter", "paper", "doctor", "--option", "shout=true", **installed)
    assert broken.code == 1 and "Buy one." in broken.out


def test_what_belongs_to_a_run_is_refused_by_the_list_and_the_doctor(atropos, tmp_path):
    installed = on_paper(tmp_path)
    flags = ("--env", "a", "--reward", "exact", "--steps", "3", "--seed", "0", "--set", "seed=1", "--out", "made")
    for command in (("paper", "doctor"), ("list",)):
        ended = atropos("adapter", *command, *flags, **installed)
        message = f"`atropos adapter {' '.join(command)}` does not take --env, --reward, --steps, --seed, --set, --out."
        assert ended.code == 2 and message in ended.err and not ended.out
    listed = atropos("adapter", "list", "run.toml", "--model", "toy", "--option", "shout=true", **installed)
    assert listed.code == 2 and "does not take FILE, --model, --option." in listed.err


def test_without_any_adapter_the_packages_that_offer_one_are_named(atropos):
    disabled = {"ATROPOS_DISABLE_PLUGINS": "adapter_skyrl,adapter_roll"}
    listed = atropos("adapter", "list", **disabled)
    assert listed.code == 0 and "atropos-plugin-adapter-skyrl" in listed.out
    requested = atropos("adapter", "roll", "doctor", **disabled)
    assert requested.code == 2 and "pip install atropos-plugin-adapter-roll" in requested.err


def test_a_wrong_word_gets_one_clear_error(atropos, sevens, tmp_path):
    installed = on_paper(tmp_path)
    near = atropos("adapter", "papre", "--env", sevens, "--out", "made", **installed)
    assert near.code == 2 and "Did you mean 'paper'?" in near.err
    nowhere = atropos("adapter", "paper", "--env", sevens, **installed)
    assert nowhere.code == 2 and "--out DIR" in nowhere.err
    nothing = atropos("adapter", "paper", "--model", "toy", "--out", "made", **installed)
    assert nothing.code == 2 and "no environment" in nothing.err and "Traceback" not in nothing.err
