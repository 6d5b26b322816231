"""Prompts that give their own answer away, and those that only hold it by chance."""

from __future__ import annotations

import pytest

from atropos_core.types import Task
from atropos_testing.answers_in_prompts import check_leaks
from atropos_testing.report import Report

CITIES = ("Paris", "Rome", "Oslo", "Bern", "Lima", "Cairo", "Quito", "Seoul")


def found(*prompts: str) -> tuple[bool | None, str]:
    """Of tasks with these prompts, `{}` in which is their own answer."""
    tasks = [
        Task(str(number), ({"role": "user", "content": prompts[number % len(prompts)].format(answer)},), answer)
        for number, answer in enumerate(CITIES * 5)
    ]
    report = Report(("no leaks",))
    check_leaks(report, tasks)
    return report.findings[0].ok, report.findings[0].detail


@pytest.mark.parametrize("says", ["Which city? The answer is {}.", "Which city? (label: {})", "Reply with {}."])
def test_a_prompt_that_names_its_answer_as_the_answer_is_a_leak_also_in_one_task_of_eight(says: str):
    for prompts in ((says,), (says, *("Which city?",) * 7)):
        ok, detail = found(*prompts)
        assert ok is False and "is named as the answer in the prompt" in detail


def test_a_list_to_choose_from_is_none():
    choice = ", ".join(CITIES)
    assert found(f"Which city: {choice}?")[0] is True
    assert found(f"Which city? The answer is one of {choice}.")[0] is True
