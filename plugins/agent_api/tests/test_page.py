"""docs/agent-tokens.md: every rule has a picture, and every picture is what a session makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plugins.agent_api.tests.scenarios import SCENARIOS, drawn
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/agent-tokens.md").read_text()
PICTURES = dict(re.findall(r"^## ([^\n]*)\n[^#]*?```text\n(.*?)\n```", PAGE, re.M | re.S))


@pytest.mark.parametrize("rule", SCENARIOS)
async def test_the_picture_of_a_rule_is_what_a_session_makes_of_it(rule: str, tmp_path: Path):
    assert PICTURES[rule] == await drawn(rule, tmp_path)


def test_every_picture_of_the_page_is_drawn():
    assert PICTURES.keys() == SCENARIOS.keys() and PAGE.count("```") == 2 * len(SCENARIOS)
