"""Which part of a reply is its answer, and which answers are right."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atropos_core.builtin.numbers import only_value, stated_answer
from atropos_core.errors import DataError
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k
from atropos_env_gsm8k.grading import Grader, lenient_answer
from tests.tricky_answers import NUMBERS

REAL = Path(__file__).parents[4] / "shared/data/gsm8k"


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    made = Grader(deadline_s=10.0)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("so 3+4=7\n#### 7", "7", "7"),
        ("\\boxed{7}", "7", "7"),
        ("\\boxed{\\frac{14}{2}} and done", "\\frac{14}{2}", "\\frac{14}{2}"),
        ("#### 6\nno: \\boxed{7}", "7", "7"),
        ("\\boxed{6}\n#### 7", "7", "7"),
        ("the answer is 1,234.", None, "1234"),
        ("it is 3\\pi", None, None),
        ("it is 3 or 7", None, "7"),
        ("#### ", None, None),
        ("\\boxed{7", None, "7"),
        ("none at all", None, None),
        ("", None, None),
    ],
)
def test_answers_are_found_strictly_and_leniently(text, strict, lenient):
    assert stated_answer(text) == strict
    assert lenient_answer(text) == lenient


async def test_answers_of_the_table_of_tricky_pairs_are_graded_right(grader):
    graded = [
        (
            answer,
            reply,
            await grader.equals(stated_answer(f"#### {reply}"), answer),
            await grader.equals(lenient_answer(reply), answer),
        )
        for answer, reply, _ in NUMBERS
    ]
    assert graded == [(answer, reply, right, right) for answer, reply, right in NUMBERS]


async def test_expressions_go_to_math_verify(grader):
    assert await grader.equals("\\frac{14}{2}", "7")
    assert await grader.equals("x = 7", "7")
    assert not await grader.equals("\\frac{15}{2}", "7")
    assert not await grader.equals("7 or 8 or 9+", "4")
    assert await grader.equals("7²", "49")
    assert await grader.equals("6!", "720")
    assert not await grader.equals("3t", "3"), "a variable"
    assert not await grader.equals("\\frac{6}{2}ab", "3")
    assert await grader.equals("3-5 = -2", "-2")
    assert not await grader.equals("72 or 73", "72"), "one answer, not two"


async def test_an_expression_that_takes_for_ever_is_wrong_at_its_deadline_and_the_next_one_is_graded():
    grader = Grader(deadline_s=4.0)
    try:
        assert await grader.equals("2^3 - 1", "7")
        began = time.monotonic()
        assert not await grader.equals("9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 1", "7")
        assert time.monotonic() - began < 40
        assert await grader.equals("2^3 - 1", "7")
    finally:
        await grader.close()


async def test_every_problem_of_gsm8k_grades_its_own_answer_right_and_the_number_after_it_wrong():
    if not (REAL / "train.jsonl").exists():
        pytest.skip(f"the GSM8K files are not at {REAL}")
    environment = Gsm8k(Gsm8kOptions(source="path", path=str(REAL)))
    await environment.open()
    tasks = [task for split in ("train", "test") for task in environment.tasks(split)]
    assert len(tasks) == 8792
    for task in tasks:
        number = only_value(task.data["number"])
        right = await environment.score(task, {"role": "assistant", "content": task.answer})
        worked = task.answer.rpartition("####")[0]
        wrong = await environment.score(task, {"role": "assistant", "content": f"{worked}#### {number + 1}"})
        assert (right.correct, right.metrics["accuracy_strict"], right.metrics["accuracy_lenient"]) == (
            True,
            1.0,
            1.0,
        ), task.id
        assert (wrong.correct, wrong.metrics["accuracy_strict"], wrong.metrics["accuracy_lenient"]) == (
            False,
            0.0,
            0.0,
        ), task.id
    await environment.close()


def test_a_folder_that_is_missing_names_the_other_sources(tmp_path):
    with pytest.raises(DataError, match=r"train\.jsonl does not exist") as raised:
        Gsm8k(Gsm8kOptions(source="path", path=str(tmp_path))).tasks("train")
    assert "generated" in raised.value.remedy
    assert "hub" in raised.value.remedy


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"question": "q"}', "needs the keys"),
        ('{"question": "q", "answer": "no number"}', "does not end in `#### number`"),
        ("", "is empty"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, line, message):
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        Gsm8k(Gsm8kOptions(source="path", path=str(tmp_path))).tasks("train")


def test_every_row_that_cannot_be_read_is_listed_up_to_twenty(tmp_path):
    good, bad = '{"question": "q", "answer": "#### 1"}', '{"question": "q", "answer": "no number"}'
    (tmp_path / "train.jsonl").write_text("\n".join([good, *[bad] * 22, '{"question": "q"}', good]) + "\n")
    with pytest.raises(DataError) as raised:
        Gsm8k(Gsm8kOptions(source="path", path=str(tmp_path))).tasks("train")
    lines = str(raised.value).splitlines()
    assert lines[0] == "gsm8k: 23 of 25 problems of the train split cannot be read"
    assert lines[1].startswith("  the answer of problem train-1 does not end in") and "train-20" in lines[20]
    assert lines[21] == "  and 3 more" and "#### number" in raised.value.remedy


def test_the_hub_source_loads_a_data_set_with_the_datasets_library(tmp_path):
    pytest.importorskip("datasets", reason="the extra [hub] is not installed")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: t.jsonl\n---\n"
    )
    (tmp_path / "t.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    [task] = Gsm8k(Gsm8kOptions(source="hub", dataset=str(tmp_path))).tasks("train")
    assert task.data["number"] == "2"


def test_a_hub_that_cannot_be_reached_is_an_error_that_names_the_other_sources(monkeypatch):
    pytest.importorskip("datasets", reason="the extra [hub] is not installed")
    with pytest.raises(DataError, match="the hub did not give openai/gsm8k") as raised:
        Gsm8k(Gsm8kOptions(source="hub")).tasks("train")
    assert 'source = "path"' in raised.value.remedy
    assert 'source = "generated"' in raised.value.remedy
