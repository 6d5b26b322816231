"""`conftest.py` of the repository, on a small repository: the order of the files, `--quick`, what is recorded, and signals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tests.conftest

REPOSITORY = tests.conftest.REPOSITORY
FILES = ("long", "medium", "new", "short")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(REPOSITORY / "conftest.py", tmp_path)
    for name in FILES:
        made = "import time\n\ndef test_one():\n    time.sleep({})\n\ndef test_two():\n    pass\n"
        (tmp_path / f"tests/test_{name}.py").write_text(made.format(0.2 if name == "new" else 0))
    seconds = {
        "tests/test_medium.py": 9.0,
        "tests/test_long.py": 20.0,
        "tests/test_short.py": 0.5,
        "tests/test_gone.py": 3.0,
    }
    (tmp_path / "tests/seconds.json").write_text(json.dumps(seconds))
    return tmp_path


def ran(folder: Path, *arguments: str) -> list[str]:
    """The files in the order in which their tests ran."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = [line.partition("::")[0] for line in ended.stdout.splitlines() if " PASSED " in line]
    assert passed[0::2] == passed[1::2], "the tests of a file follow each other"
    return [Path(file).stem.removeprefix("test_") for file in passed[0::2]]


def test_the_longest_file_runs_first(repository):
    assert ran(repository) == ["long", "medium", "short", "new"]


def test_quick_leaves_out_what_took_long_and_takes_what_is_new(repository):
    assert ran(repository, "--quick") == ["short", "new"]


def test_what_files_took_is_recorded_for_those_that_ran(repository):
    ran(repository, "--record-seconds", "tests/test_new.py", "tests/test_medium.py")
    recorded = json.loads((repository / "tests/seconds.json").read_text())
    assert list(recorded) == ["tests/test_long.py", "tests/test_short.py", "tests/test_new.py"]
    assert recorded["tests/test_long.py"] == 20.0 and recorded["tests/test_new.py"] >= 0.2


SIGNALLED = """
import signal, subprocess, sys, pytest

@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_child_ends_by_it_and_this_process_does_not(name):
    number = getattr(signal, name)
    signal.raise_signal(number)
    ended = subprocess.run([sys.executable, "-c", f"import signal; signal.raise_signal({int(number)})"], capture_output=True)
    assert ended.returncode == -number, "a Python that SIGINT ends does it by SIGINT as well"
"""


def test_where_the_suite_began_with_signals_ignored_its_children_do_not(repository):
    (repository / "tests/test_signalled.py").write_text(SIGNALLED)

    def ignore():
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_signalled.py"]
    ended = subprocess.run(command, cwd=repository, preexec_fn=ignore, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_recorded_file_is_there():
    gone = [
        file
        for file in json.loads((REPOSITORY / "tests/seconds.json").read_text())
        if not (REPOSITORY / file).is_file()
    ]
    assert gone == [], "take their lines out of tests/seconds.json"
