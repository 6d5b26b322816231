"""The worked cases of docs/debugging.md and docs/reward-hacking.md print what the pages show."""

from __future__ import annotations

import re

import pytest

from atropos_debugging.bisection import STAGES
from tests.conftest import REPOSITORY
from tests.pages.blocks import BLOCKS

PAGES = ("docs/debugging.md", "docs/reward-hacking.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_worked_case_prints_what_the_page_shows(atropos, tmp_path, page):
    printed = ""
    for block in (one for one in BLOCKS if one.page == page):
        if block.language:
            (tmp_path / block.first.removeprefix("# ")).write_text(block.text)
        elif block.first.startswith("atropos "):
            printed = ""
            for command in block.commands:
                ended = atropos(*command.split()[1:], cwd=tmp_path)
                assert ended.code == (1 if command.startswith("atropos bisect") else 0), ended.out + ended.err
                printed += ended.out + ended.err
        else:
            assert " ".join(block.text.split()) in " ".join(printed.split()), printed


def test_the_table_of_stages_has_all_of_them_in_their_order():
    text = (REPOSITORY / PAGES[0]).read_text().split("## `atropos bisect`")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(STAGES)
