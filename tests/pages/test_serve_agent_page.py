"""What docs/agents.md says of programs that take episodes: the command, the loop and the calls by hand, as they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.pages.blocks import the_block
from tests.pages.typed import SMALL, Typed, alike, can_type, typing

pytestmark = pytest.mark.skipif(bool(can_type()), reason=can_type())


@pytest.fixture
def typed(tmp_path) -> Iterator[Typed]:
    with typing(tmp_path) as there:
        yield there


def test_the_command_the_loop_and_the_calls_of_the_page(typed):
    [command] = the_block("docs/agents.md", "atropos serve-agent").commands
    running = typed.begin(f"{command} --steps 1 --dir run {SMALL}")
    [said] = the_block("docs/agents.md", "episodes are offered").text.splitlines()
    typed.says(running, alike(said))
    given = f"export RUN=http://127.0.0.1:8010 TOKEN_FILE={typed.folder}/run/agents/environment.agent.token"
    take, end = the_block("docs/agents.md", "curl -X POST -H").commands
    episode = json.loads(re.findall(r"^\{.*\}$", typed.type(f"{given}; {take}"), re.M)[0])
    assert '"limit":null' in typed.type(f"{given} ID={episode['id']}; {end}")
    (typed.folder / "loop.py").write_text(the_block("docs/agents.md", "import json, os, urllib.request").text)
    loop = typed.begin(f"{given}; python loop.py")
    typed.ends_well(running)
    with pytest.raises(AssertionError, match="ended with 1"):
        typed.ends_well(loop)
    assert "HTTP Error 410: Gone" in loop.read_text()
