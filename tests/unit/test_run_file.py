"""The layers of a run file: what naming a component means, in a file and by a flag."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from atropos_core.config.error_text import ALIASES
from atropos_core.config.run_file import FLAG, Layer, RunConfig, anchored, load, nest, parse_flag, read_file
from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.provider import Options
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_trainer_grpo.config import GrpoOptions


def named(section: str, file: str | None, *flags: str) -> list[str]:
    layers = [] if file is None else [Layer("run.toml", tomllib.loads(file))]
    layers.append(Layer(FLAG, nest(map(parse_flag, flags))))
    return list(getattr(load(layers).config, section))


@pytest.mark.parametrize("section", ["transform", "sink", "reward", "teacher"])
def test_a_flag_that_names_a_component_means_what_the_table_means(section: str):
    assert named(section, None, f"{section}.x.use=y") == named(section, f'[{section}.x]\nuse = "y"\n') == ["x"]


def test_a_flag_beside_a_file_that_lists_components_is_one_more():
    assert named("transform", "[transform.a]\n[transform.b]\n", "transform.x.use=y") == ["a", "b", "x"]


def test_a_flag_for_an_option_of_a_default_component_leaves_the_others_alone():
    assert named("transform", None, "transform.group_advantage.divide_by_std=false") == ["group_advantage", "drop_flat"]
    assert named("sink", None, "sink.jsonl.rollouts_every=5") == ["console", "jsonl"]


def test_default_components_that_are_named_beside_an_own_one_stay():
    assert named("sink", None, "sink.csv.use=csv", "sink.jsonl.rollouts_every=5") == ["csv", "jsonl"]


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
