"""The reward of these tests: whether the program left the right answer in its work directory."""

from __future__ import annotations

from atropos_agent_api.grading.case import Case


def grade(case: Case) -> float:
    path = case.work / "answer.txt"
    return float(path.is_file() and path.read_text().strip() == case.task.answer)
