"""The JSON Schema of run files takes what a run takes, and refuses wrong keys and values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from atropos_config.schema import run_file_schema
from atropos_core.cli.options import configure
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import AtroposError
from atropos_core.plugins.manager import load_plugins
from tests.conftest import REPOSITORY
from tests.pages.blocks import BLOCKS

SCHEMA = run_file_schema(load_plugins().registry)
VALIDATOR = Draft202012Validator(SCHEMA)


def tables(text: str) -> dict[str, Any] | None:
    """A run file's; None where it is another TOML file."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    return found if found and set(found) <= set(RunConfig.model_fields) else None


def is_valid(path: Path) -> bool:
    from atropos_core.launch.plan import make_plan

    try:
        loaded, model, plugins = configure(path, download=False)
        make_plan(loaded.config, model, plugins)
    except AtroposError as error:
        return "there is no environment to train on" in str(error)
    return True


RUN_FILES = [
    *((str(block), block.text) for block in BLOCKS if block.language == "toml" and tables(block.text)),
    *(
        (str(path.relative_to(REPOSITORY)), path.read_text())
        for folder in ("tests", "benchmarks", "docs", "libs", "plugins")
        for path in sorted((REPOSITORY / folder).rglob("*.toml"))
        if tables(path.read_text())
    ),
]


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


def test_every_valid_run_file_of_pages_and_tests_is_taken(tmp_path):
    taken = 0
    for where, text in RUN_FILES:
        (tmp_path / "run.toml").write_text(text)
        if is_valid(tmp_path / "run.toml"):
            errors = [f"{where}: {error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(tables(text))]
            assert errors == []
            taken += 1
    assert taken > 15, f"of {len(RUN_FILES)}"


def test_a_resolved_run_is_taken(tmp_path):
    from atropos_core.config.run_file import flatten, nest, to_toml
    from atropos_core.launch.plan import make_plan

    loaded, model, plugins = configure(None, env=["gsm8k"], model="tiny")
    values = make_plan(loaded.config, model, plugins).resolved()
    assert nest(flatten(values)) == values
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(to_toml(values)))] == []


WRONG = {
    "a key": "stepz = 1",
    "a section's key": "[training]\nsteps_ = 1",
    "an option of the default component": "[trainer]\nlearning_rte = 1e-6",
    "an option of another component": '[engine]\nuse = "toy"\nkv_cache_gb = 1',
    "an option under a name": "[environment.gsm8k]\nsorce = 'path'",
    "an option under use": '[environment.mine]\nuse = "gsm8k"\nsorce = "path"',
    "a component": '[sink.mine]\nuse = "cvs"',
    "a name that is no component": "[sink.cvs]",
    "a text for a number": '[training]\nsteps = "many"',
    "a number out of bounds": "[training]\nsteps = -1",
    "a choice": '[environment.gsm8k]\nsource = "web"',
    "a nested key": "[trainer.lora]\nrnk = 4",
    "an option that is missing": '[engine]\nuse = "remote"',
    "a key of health": "[health.length]\nratios = 3",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused(text):
    assert list(VALIDATOR.iter_errors(tomllib.loads(text)))


@pytest.mark.parametrize(
    "text",
    [
        '[environment.mine]\nuse = "./mine.py:Mine"\nweight = 1\nsize = 3',
        '[environment."./mine.py:Mine"]\nsize = 3',
        "[trainer]\nlearning_rate = 1e-6",
        '[environment.agent]\ncommand = ["x"]\ntasks_from = "gsm8k"\nsandbox = "local"',
        '[reward.two]\nuse = "ensemble"\n[reward.two.members.exact]\n[reward.two.members.numeric]\ntolerance = 1',
    ],
)
def test_what_may_be_said_in_several_ways_is_taken(text):
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))] == []


def test_every_option_in_it_says_what_it_means_and_its_default():
    rate = SCHEMA["$defs"]["trainer.grpo"]["properties"]["clip_low"]
    assert rate["description"].startswith("ratios below") and "default" in rate
    assert "config show" in SCHEMA["$comment"]
