"""The examples equal the adapter's output, and the one with a tool keeps an environment's contract."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atropos_adapter_skyrl.adapter import SkyRLAdapter
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_core.config.run_file import load, read_file
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
