"""Rewards that the tests of grading name by file: one that reads files, and some that do what they should not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from atropos_agent_api.grading import Case

IMPORTED_IN = os.getpid()
calls = 0


def file_is_right(case: Case) -> dict[str, Any]:
    """1 where answer.txt is the task's answer."""
    global calls
    calls += 1
    right = (case.work / "answer.txt").read_text().strip() == case.task.answer
    return {"score": float(right), "correct": right, "metrics": {"calls": calls, "imported": IMPORTED_IN}}


async def as_a_coroutine(case: Case) -> bool:
    return case.answer == case.task.answer


def never_ends(case: Case) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (case.work / "pid").write_text(str(child.pid))
    time.sleep(600)
    return 1.0


def raises(case: Case) -> float:
    raise ValueError("there is no such thing")


def ends_its_process(case: Case) -> float:
    os._exit(0)


def gives_text(case: Case) -> Any:
    return "1.0"


def gives_much(case: Case) -> Any:
    return {"score": 1.0, "parts": {str(number): 1.0 for number in range(200_000)}}


NO_FUNCTION = 3


if __name__ == "__main__":  # as a command
    case = json.load(sys.stdin)
    if sys.argv[1] == "raises":
        raise ValueError("there is no such thing")
    if sys.argv[1] == "late":
        time.sleep(600)
    print("a first line")
    answer = Path(case["work"], "answer.txt").read_text().strip()
    print(
        json.dumps({"score": 1.0, "correct": answer == case["task"]["answer"]})
        if sys.argv[1] == "file"
        else sys.argv[1]
    )


def each_call(case):
    calls = sum(message["role"] == "assistant" for message in case.messages)
    return {"score": 3.0, "turns": [0.5 + at for at in range(calls)]}
