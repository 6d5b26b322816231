"""The table of answers and replies in the README of env_dataset, against all the graders that it names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from atropos_core.builtin.numbers import answer_value, is_same, last_value, stated_answer
from atropos_env_gsm8k.grading import Grader
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "plugins/env_dataset/README.md"
VERL = Path(os.environ.get("THEIR_SOURCE", "/none")) / "verl/utils/reward_score/gsm8k.py"


def rows() -> list[tuple[str, str, list[bool]]]:
    """Answer, reply, and what each column says of it."""
    lines = PAGE.read_text().split("| answer | reply |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(cell[0].strip("`"), cell[1].strip("`"), [bool(int(one)) for one in cell[2:8]]) for cell in cells]


def test_the_table_has_what_differs():
    assert len(rows()) > 15
    assert all(len(set(said)) == 2 for _, reply, said in rows() if reply not in ("71.9999999", "2 million"))


async def test_our_graders_say_what_the_table_says():
    pytest.importorskip("math_verify")
    from atropos_env_dataset.math_answers import equal

    grader = Grader(10.0)
    try:
        found = [
            (
                answer,
                reply,
                [
                    is_same(last_value(reply), answer_value(answer)),
                    await grader.equals(stated_answer(f"#### {reply}"), answer),
                    equal(answer, reply),
                ],
            )
            for answer, reply, _ in rows()
        ]
    finally:
        await grader.close()
    assert found == [(answer, reply, said[:3]) for answer, reply, said in rows()]


def test_math_verify_says_what_the_table_says():
    pytest.importorskip("math_verify")
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    found = [verify(parse(f"\\boxed{{{a}}}", [LatexExtractionConfig()]), parse(reply)) for a, reply, _ in rows()]
    assert list(zip(rows(), found, strict=True)) == [(row, row[2][5]) for row in rows()]


def test_verls_grader_says_what_the_table_says():
    if not VERL.exists():
        pytest.skip("THEIR_SOURCE=FOLDER names a checkout of verl")
    spec = importlib.util.spec_from_file_location("verls_gsm8k", VERL)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    for answer, reply, said in rows():
        found = [
            theirs.compute_score(f"#### {reply}", answer, "strict"),
            theirs.compute_score(reply, answer, "flexible"),
        ]
        assert [bool(one) for one in found] == said[3:5], (answer, reply)
