"""Draws in turn, and a file that holds whole lines only."""

from __future__ import annotations

import resource
import signal

import pytest

from atropos_core.errors import DataError, RunDirectoryError
from atropos_trajectory_api.roles.processing import Lines, draws
from tests.unit.parts import Words


def test_environments_take_turns_through_their_tasks_and_begin_again():
    drawn = draws({"a": Words(2), "b": Words(3)}, 7, "train", seed=1)
    assert [(draw.environment, draw.index) for draw in drawn] == [
        ("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 2), ("a", 1)
    ]  # fmt: skip
    assert len({draw.seed for draw in drawn}) == 7, "a task that comes again is run otherwise"
    assert [draw.id for draw in drawn] == list(range(7))


def test_an_environment_without_tasks_is_named():
    with pytest.raises(DataError, match="'b' has no test tasks"):
        draws({"a": Words(1), "b": Words(0)}, 1, "test", seed=1)


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "lines"
    lines = Lines(path)
    lines.write("whole\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RunDirectoryError, match="cannot be written: File too large"):
            lines.write("x" * 2000 + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    lines.write("another\n")
    lines.close()
    assert path.read_text() == "whole\nanother\n"
    assert lines.count == 2
