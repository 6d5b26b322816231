"""The example with a tool keeps an environment's contract, and its calculator is called once for each call."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.registry import load_reference
from atropos_core.testing import environment_contract

FILE = Path(__file__).parents[1] / "examples/tool/calculator.py"

test_contract = environment_contract(f"{FILE}:Calculator")


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
