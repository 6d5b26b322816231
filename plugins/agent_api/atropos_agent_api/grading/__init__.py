"""Scores of episodes, from what the program left and nothing that it says of itself, in processes that it cannot write to.

A reward of one's own is a function of a `Case`, in "pkg.mod:name" or "./file.py:name":

    from atropos_agent_api.grading import Case

    def grade(case: Case) -> float:
        return float((case.work / "answer.txt").read_text().strip() == case.task.answer)
"""

from atropos_agent_api.grading.case import Case

__all__ = ["Case"]
