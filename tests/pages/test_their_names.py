"""Names of other projects on docs/coming-from stand in the source of those projects, where an environment here has it."""

from __future__ import annotations

import re

import pytest

from tests.pages.their_names import ELSEWHERE, PACKAGES, PAGES, rows, sources


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_theirs_stands_in_their_source(page):
    folders = sources(page)
    if not any(folder.name == PACKAGES[page][0] for folder in folders):
        pytest.skip(f"no .venv-* of this checkout has {PACKAGES[page][0]}; THEIR_SOURCE=FOLDER names one that does")
    text = "\n".join(path.read_text(errors="replace") for folder in folders for path in folder.rglob("*.py"))
    words = set(re.findall(r"\w+", text))
    named = {name for row in rows(page) for name in row.theirs} - ELSEWHERE.get(page, set())
    absent = {name for name in named if not (name in text if "/" in name else set(name.split(".")) <= words)}
    assert absent == set()
