"""Functions that the tests of the preloaded sandbox run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

IMPORTED_IN = os.getpid()
calls = 0


def tells(task: dict[str, Any]) -> None:
    """Report what belongs to this process and what does not."""
    global calls
    calls += 1
    print(
        IMPORTED_IN,
        os.getpid(),
        calls,
        os.getcwd(),
        os.environ["HOME"],
        os.environ.get("SECRET_OF_OURS"),
        task["prompt"],
    )


async def is_a_coroutine(task: dict[str, Any]) -> None:
    print("awaited")


def exits(task: dict[str, Any]) -> None:
    sys.exit(3)


def raises(task: dict[str, Any]) -> None:
    raise ValueError("there is no such thing")


def forks_and_stays(task: dict[str, Any]) -> None:
    """A daemon made with only fork, one made with exec, and a program that does not end."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("up", flush=True)
    time.sleep(60)


def prints_for_ever(task: dict[str, Any]) -> None:
    while True:
        print("x" * 1000)
