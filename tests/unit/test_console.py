"""What is printed is what was said."""

from __future__ import annotations

import pytest

from atropos_core import console


@pytest.mark.parametrize("cell", ["[bold]reward[/]", "adapter :bug: lora", "\\[trainer]"])
def test_a_table_shows_its_cells_as_they_are(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("path", "value"), [("a", cell)])
    assert cell in capsys.readouterr().out


def test_a_line_shows_its_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("[a] :bug:")
    console.warn("[a] :bug:")
    said = capsys.readouterr()
    assert said.out == "[a] :bug:\n" and said.err == "warning [a] :bug:\n"
