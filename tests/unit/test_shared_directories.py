"""A test that changes what several tests share fails, and is the only one that does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

pytest_plugins = ["tests.shared_directories"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text("whole")
    return directory


@pytest.fixture(scope="session")
def model_of(tmp_path_factory, share_directory):
    directory = tmp_path_factory.mktemp("made")
    return lambda: directory if (directory / "config.json").exists() else written(directory, share_directory)


def written(directory, share_directory):
    (directory / "config.json").write_text("whole")
    return share_directory(directory)


def test_reads(model, model_of):
    assert (model / "config.json").read_text() == (model_of() / "config.json").read_text()


def test_changes_one(model):
    (model / "config.json").write_text("{}")


def test_adds_to_the_other(model_of):
    (model_of() / "more.json").write_text("{}")


def test_removes(model):
    (model / "config.json").unlink()


def test_changes_a_copy(model, tmp_path):
    (tmp_path / "config.json").write_text("{}")
"""


def test_each_test_that_changes_a_shared_directory_fails_by_name(pytester: pytest.Pytester, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    pytester.makepyfile(TESTS)
    ended = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "0")
    ended.assert_outcomes(passed=5, errors=3)
    for name in ("test_changes_one", "test_adds_to_the_other", "test_removes"):
        ended.stdout.fnmatch_lines([f"ERROR *::{name}*"])
