"""Standard output on a full disk: a command whose output is all that it makes says so; a run goes on, and so does one whose reader goes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_core.console.terminal import reader_gone

ATROPOS = (sys.executable, "-m", "atropos_core")


@pytest.mark.parametrize("command", [("plugins",), ("plugins", "--json"), ("config", "show", "--env", "gsm8k")])
def test_what_could_not_be_written_ends_with_an_error(command: tuple[str, ...], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*ATROPOS, *command], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "could not be written to standard output: No space left on device." in ended.stderr


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen([*ATROPOS, "plugins"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_a_run_goes_on_without_it(tmp_path: Path, sevens: str) -> None:
    small = ("--steps", "1", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=2", "--dir", "run")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*ATROPOS, "run", "--env", sevens, "--model", "toy", *small],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run/summary.json").is_file()


def test_an_error_of_a_disk_is_no_terminal_that_was_closed(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    os.close(ours)
    with (tmp_path / "log").open("w") as file, open(theirs, "w") as terminal:
        with pytest.raises(OSError) as closed:
            os.write(terminal.fileno(), b"x")
        assert closed.value.errno == errno.EIO and reader_gone(closed.value, terminal.fileno())
        assert not reader_gone(closed.value, file.fileno())
        assert reader_gone(BrokenPipeError(errno.EPIPE, ""), file.fileno())
        assert not reader_gone(OSError(errno.ENOSPC, ""), terminal.fileno())
