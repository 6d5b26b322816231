"""The examples equal the adapter's output, and the one with a tool keeps an environment's contract."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atropos_adapter_skyrl.adapter import SkyRLAdapter, arguments
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_core.config.run_file import Layer, load, read_file
from atropos_core.errors import ConfigError
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.references import load_reference
from atropos_testing import environment_contract

EXAMPLES = Path(__file__).parents[1] / "examples"
FILE = EXAMPLES / "tool/calculator.py"

test_contract = environment_contract(f"{FILE}:Calculator")


@pytest.mark.parametrize(
    ("name", "options"),
    [("gsm8k", {}), ("tool", {"source": "rings", "rings": "rings", "engines": ["http://127.0.0.1:8001"]})],
)
def test_the_examples_are_what_the_adapter_writes(name, options, tmp_path):
    folder, run = EXAMPLES / name, load([read_file(EXAMPLES / name / "run.toml")]).config
    assert run.model is not None
    adapter = SkyRLAdapter(SkyRLOptions.model_validate(options), RunContext(tmp_path, Path(run.model)))
    for path in adapter.export(run, tmp_path):
        written = path.read_text().replace(f"atropos.rings={Path('rings').resolve()}", "atropos.rings=rings")
        written = written.replace(
            f"{folder / 'calculator.py'}:", "./calculator.py:"
        )  # a relative path is relative to its file
        assert written == (folder / path.name).read_text(), path.name
        assert os.access(path, os.X_OK) == os.access(folder / path.name, os.X_OK) == (path.suffix == ".sh")


def test_min_p_reaches_skyrl_for_training_and_for_evaluations(tmp_path):
    given = {"environment": {"gsm8k": {}}, "sampling": {"min_p": 0.1}, "evaluation": {"temperature": 1.0, "min_p": 0.2}}
    run = load([Layer("test", given)]).config
    made = arguments(run, SkyRLOptions(), "tiny")
    assert (made["generator.sampling_params.min_p"], made["generator.eval_sampling_params.min_p"]) == (0.1, 0.2)
    assert made["generator.sampling_params.top_k"] == -1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"warmup": {"data": "rows.jsonl"}}, r"warmup(.|\n)*Run the warm start first"),
        ({"sampling": {"stop": ["\n"]}}, "sampling.stop is not carried over"),
        ({"reward": {"environment": {"gold": {}}, "exact": {}}}, r"\[reward.environment.gold\] is not carried over"),
    ],
)
def test_what_skyrl_would_train_without_is_refused(values, says):
    run = load([Layer("test", {"environment": {"gsm8k": {}}, **values})]).config
    with pytest.raises(ConfigError, match=says):
        arguments(run, SkyRLOptions(), "tiny")


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("2*(3+4)", "14"),
        ("-7/2", "-3.5"),
        ("1/0", "error: ZeroDivisionError"),
        ("__import__('os')", "error: ValueError"),
        ("2**9", "error: ValueError"),
        ("(", "error: SyntaxError"),
    ],
)
def test_the_calculator_computes_or_says_what_is_wrong(expression, wanted):
    answer = load_reference(f"{FILE}:answer")
    assert answer({"expression": expression}) == wanted
    assert answer("no mapping").startswith("error") and answer({}).startswith("error")
