"""A model that cannot be trained is refused before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_core.config.run_file import FLAG, Layer, load, nest
from atropos_core.errors import ConfigError
from atropos_core.launch.model_checks import check_model
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import load_plugins


@pytest.mark.parametrize("other", [(), ("config.json",)])
@pytest.mark.parametrize(
    ("place", "text", "base", "run"),
    [
        ("runs/r/checkpoints/step-000002/policy", {"base_model_name_or_path": "/models/base"}, "/models/base", "{}/runs/r"),
        ("exported", {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B", "RUN"),
        ("odd", {"base_model_name_or_path": None}, "a base model that its", "RUN"),
        ("broken", [], "a base model that its", "RUN"),
    ],
)  # fmt: skip
def test_an_adapter_as_the_model_is_refused_with_the_command_that_merges_it(tmp_path, place, text, base, run, other):
    directory: Path = tmp_path / place
    directory.mkdir(parents=True)
    for name in ("adapter_config.json", *other):
        (directory / name).write_text(json.dumps(text))
    plugins = load_plugins()
    layers = [Layer("run.toml", {"model": str(directory), "environment": {"gsm8k": {}}}), Layer(FLAG, nest([]))]
    plan = make_plan(load(layers).config, plugins.resolve_model(str(directory)), plugins)
    with pytest.raises(ConfigError) as refused:
        check_model(plan, tmp_path / "run")
    said = str(refused.value)
    assert f"{directory} is a LoRA adapter of {base}" in said
    assert f"`atropos export {run.format(tmp_path)} --as hf --merged --out MODEL`, then --model MODEL" in said
