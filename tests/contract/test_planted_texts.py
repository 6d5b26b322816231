"""Every bug that benchmarks/planted_bugs.py would plant still finds its place: its text stands in its file once."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.conftest import REPOSITORY

BUGS = [
    pytest.param(bug, id=f"{path.stem}: {bug['what']}")
    for path in sorted((REPOSITORY / "benchmarks/bugs").glob("*.toml"))
    for bug in tomllib.loads(path.read_text())["bug"]
]


@pytest.mark.parametrize("bug", BUGS)
def test_the_text_of_a_planted_bug_stands_in_its_file_once_and_its_tests_are_there(bug):
    assert (REPOSITORY / bug["file"]).read_text().count(bug["old"]) == 1
    assert bug["new"] != bug["old"]
    for test in bug["tests"]:
        file, *within = test.split()[0].split("::")
        assert (REPOSITORY / file).exists(), test
        text = (REPOSITORY / file).read_text()
        for name in within:
            assert re.search(rf"(def|class) {re.escape(name.partition('[')[0])}\b|^{re.escape(name)} = ", text, re.M), (
                test
            )
