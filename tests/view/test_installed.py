"""Why the other tests of this folder were not run, where they were not."""

from __future__ import annotations

import pytest


def test_the_pages_tests_are_run_by_make_test_view():
    pytest.importorskip("playwright", reason="needs .venv-view: `make test-view` installs it")
