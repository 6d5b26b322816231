"""The layers of a run file: what naming a component means, in a file and by a flag."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from atropos_core.config.error_text import ALIASES
from atropos_core.config.run_file import FLAG, Layer, RunConfig, anchored, load, nest, parse_flag, read_file
from atropos_core.errors import ConfigError
from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_trainer_grpo.config import GrpoOptions


def named(section: str, file: str | None, *flags: str) -> list[str]:
    layers = [] if file is None else [Layer("run.toml", tomllib.loads(file))]
    layers.append(Layer(FLAG, nest(map(parse_flag, flags))))
    return list(getattr(load(layers).config, section))


DEFAULTS = {
    "transform": ["group_advantage", "drop_flat"],
    "sink": ["console", "jsonl"],
    "reward": ["environment"],
    "teacher": [],
}


@pytest.mark.parametrize("section", DEFAULTS)
def test_a_component_that_is_named_is_added_in_every_spelling(section: str):
    table, flag, option = f'[{section}.x]\nuse = "y"\n', f"{section}.x.use=y", f"{section}.x.size=1"
    for file, flags in ((table, ()), (f"[{section}.x]\n", ()), (None, (flag,)), (None, (option,)), (table, (option,))):
        assert named(section, file, *flags) == ["x", *DEFAULTS[section]]
    assert named(section, table, f"{section}.z.use=z") == ["z", "x", *DEFAULTS[section]]


@pytest.mark.parametrize("section", [section for section, names in DEFAULTS.items() if names])
def test_none_takes_a_component_out_of_the_defaults_a_preset_and_a_file(section: str):
    first, *others = DEFAULTS[section]
    out = f'[{section}.{first}]\nuse = "none"\n'
    assert named(section, out) == named(section, None, f"{section}.{first}.use=none") == others
    assert named(section, f"[{section}.x]\n", f"{section}.x.use=none") == DEFAULTS[section]
    assert named(section, out, f"{section}.{first}.use={first}") == DEFAULTS[section]


def test_transforms_run_in_the_order_of_a_file_and_new_ones_before_the_others():
    assert named("transform", "[transform.a]\n[transform.b]\n") == ["a", "b", "group_advantage", "drop_flat"]
    assert named("transform", "[transform.group_advantage]\n[transform.b]\n") == ["group_advantage", "b", "drop_flat"]
    assert named("transform", "[transform.drop_flat]\n[transform.group_advantage]\n") == [
        "drop_flat",
        "group_advantage",
    ]
    whole = "[transform.a]\n[transform.drop_flat]\n[transform.group_advantage]\n"
    options = ("transform.group_advantage.divide_by_std=false", "transform.a.size=2", "transform.z.use=z")
    assert named("transform", whole, *options) == ["z", "a", "drop_flat", "group_advantage"]


def test_a_saved_run_file_means_its_components_and_no_others():
    saved = Layer("config.toml", {"sink": {"csv": {}}, "reward": {"x": {}}, "teacher": {}}, whole=True)
    flag = Layer(FLAG, {"sink": {"wandb": {}}})
    config = load([Layer("preset", {"sink": {"other": {}}}), saved, flag]).config
    assert list(config.sink) == ["wandb", "csv"] and list(config.reward) == ["x"]
    assert list(config.transform) == ["group_advantage", "drop_flat"]  # a section that it does not have


@pytest.mark.parametrize(
    "file, flags, says",
    [
        (None, ["sink.cosnole.use=none"], r"sink\.cosnole cannot be left out \(from flag\).*\n?.*console, jsonl"),
        (None, ["teacher.x.use=none"], r"teacher\.x cannot be left out .*\n?.*The run has no teacher"),
        ('[sink.jsonl]\nuse = "none"', ["sink.jsonl.tokens=false"], r"sink\.jsonl\.tokens has no effect \(from flag\)"),
        ('[sink.jsonl]\nuse = "none"\ntokens = false', [], r"sink\.jsonl\.tokens has no effect \(from run\.toml\)"),
    ],
)
def test_leaving_out_what_has_no_effect_is_refused(file: str | None, flags: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        named(flags[0].partition(".")[0] if flags else "sink", file, *flags)


class Passed(Options):
    given: dict[str, Any]
    folder: AbsolutePath


def test_code_a_model_and_other_paths_begin_at_the_folder_of_their_file(tmp_path: Path, monkeypatch):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/run.toml").write_text(
        'model = "./llama"\n[reward.x]\nuse = "./mine.py:Mine"\nmodel = "../other"\nurl = "./data"\n'
        '[environment.gsm8k]\nsource = "path"\npath = "data"\n[engine]\nmodel = "tiny"\n'
    )
    monkeypatch.chdir(tmp_path)
    values = read_file(Path("below/run.toml")).values
    assert values["model"] == str(tmp_path / "below/llama")
    assert values["reward"]["x"] == {
        "use": f"{tmp_path}/below/mine.py:Mine", "model": str(tmp_path / "other"), "url": "./data"
    }  # fmt: skip
    assert values["engine"]["model"] == "tiny"
    path = load([read_file(Path("below/run.toml"))]).config.environment["gsm8k"].options["path"]
    assert Gsm8kOptions(source="path", path=path).path == tmp_path / "below/data", (
        "an option that is a path knows its folder"
    )
    assert type(Passed(given={"a": [path]}, folder=path).given["a"][0]) is str, "and what is passed on is a plain text"
    assert Gsm8kOptions(source="path", path="data").path == tmp_path / "data", "else where the command is typed"
    assert anchored({"model": "./llama"}, Path())["model"] == str(tmp_path / "llama"), "as a flag has it"
    named = anchored({"use": "atroposlib:./env.py:Words"}, Path("/runs"))["use"]
    assert named == "atroposlib:/runs/env.py:Words", "what a component takes after its name is a place as well"


@pytest.mark.parametrize(("alias", "path"), ALIASES.items())
def test_every_name_that_another_library_has_for_a_key_leads_to_one_that_is_there(alias: str, path: str) -> None:
    section, *keys = path.split(".")
    found: Any = GrpoOptions if section == "trainer" else RunConfig.model_fields[section].annotation
    for key in keys:
        annotation = found.model_fields[key].annotation  # KeyError: there is none
        found = next((one for one in get_args(annotation) if hasattr(one, "model_fields")), annotation)
