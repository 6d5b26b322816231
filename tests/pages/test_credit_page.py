"""docs/credit.md: its tables are what is measured, and its example does what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.cli import run_app
from tests.conftest import REPOSITORY
from tests.pages.blocks import the_block
from tools import make_credit_page

PAGE = "docs/credit.md"


def test_the_tables_of_the_page_are_what_is_measured():
    text = (REPOSITORY / PAGE).read_text()
    assert make_credit_page.page(text) == text, "run `python -m tools.make_credit_page`"


def test_the_command_of_the_page_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bars.py").write_text(the_block(PAGE, "# bars.py").text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    command = the_block(PAGE, "atropos bias").text.split()
    assert run_app(command[1:]) == 0
    shown = the_block(PAGE, "estimator  ").text.splitlines()
    assert shown == [line.rstrip() for line in capsys.readouterr().out.splitlines()[: len(shown)]]
