"""The process that waits for a command's own, and a signal that goes to both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import os, signal, sys, time
from atropos_core.cli.guarded import guarded

def work():
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    time.sleep(60)
    return 0

sys.exit(guarded("check", work))
"""


def started() -> tuple[subprocess.Popen[str], int]:
    guard = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert guard.stdout is not None
    return guard, int(guard.stdout.readline())


def ended(waits_s: float) -> tuple[int, str]:
    """The command's process has SIGINT at once, the one that waits for it after a while: what a terminal sends to both comes to one of
    them first."""
    guard, command = started()
    os.kill(command, signal.SIGINT)
    time.sleep(waits_s)
    if guard.poll() is None:
        os.kill(guard.pid, signal.SIGINT)
    _, said = guard.communicate(timeout=30)
    return guard.returncode, said


def test_ctrl_c_that_the_command_has_first_is_an_interrupt() -> None:
    assert ended(0.1) == (130, "Interrupted ended by SIGINT, before it was done.\n")


def test_ctrl_c_is_an_interrupt_if_the_command_has_ended_before_its_guard_looks() -> None:
    guard, command = started()
    os.kill(guard.pid, signal.SIGSTOP)
    os.kill(guard.pid, signal.SIGINT)
    os.kill(command, signal.SIGINT)
    until = time.monotonic() + 30
    while Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(guard.pid, signal.SIGCONT)
    _, said = guard.communicate(timeout=30)
    assert (guard.returncode, said) == (130, "Interrupted ended by SIGINT, before it was done.\n")


def test_a_signal_to_the_command_alone_is_none() -> None:
    code, said = ended(2.0)
    assert code == 130 and "was killed by SIGINT" in said
