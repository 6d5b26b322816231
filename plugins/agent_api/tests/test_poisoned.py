"""`atropos check` of an environment of agents: poisoned programs, each by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.environment.build import build
from atropos_agent_api.environment.poisoned import NEIGHBOUR, PROGRAMS
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import FitError
from atropos_core.interfaces import Finding
from atropos_core.plugins.provider import RunContext
from atropos_testing import environment_contract
from atropos_testing.replies import EMPTY
from atropos_testing.scripted import ScriptedPolicy

PROGRAM = Path(__file__).with_name("agent_programs.py")
NAMES = [*PROGRAMS, NEIGHBOUR]


async def findings(folder: Path, **options: Any) -> Sequence[Finding]:
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "two and two", "answer": "four"}) + "\n")
    given = {"command": ["unused"], "tasks": str(tasks), "held_out": 0.0, "reward": {"plugin": "exact"}, **options}
    agent = build(AgentOptions.model_validate(given), RunContext(folder, TOY_MODEL, label="environment.mine"))
    try:
        try:
            await agent.open()
        except FitError as error:
            pytest.skip(f"sandbox {options['sandbox']} is not permitted here: {error}")
        [task] = agent.tasks("train")
        return await agent.own_findings(task, ScriptedPolicy(EMPTY, task))
    finally:
        await agent.close()


@pytest.mark.parametrize(("sandbox", "network"), [("process", True), ("bubblewrap", False)])
async def test_no_poisoned_program_gets_a_reward_or_outlives_its_episode(tmp_path, sandbox, network):
    found = await findings(tmp_path, sandbox=sandbox, network=network)
    assert [one.subject for one in found] == NAMES
    assert not [one for one in found if one.ok is False]
    assert all(one.ok for one in found if one.subject in PROGRAMS)
    if sandbox == "bubblewrap":
        assert found[-1].ok, found[-1].detail


async def test_a_reward_that_believes_a_file_is_found_out(tmp_path):
    (tmp_path / "grade.py").write_text(
        "def grade(case):\n    path = case.work / 'reward.txt'\n    return float(path.read_text()) if path.exists() else 0.0\n"
    )
    found = await findings(tmp_path, sandbox="process", network=True, reward={"function": f"{tmp_path}/grade.py:grade"})
    broken = {one.subject: one.detail for one in found if one.ok is False}
    assert list(broken) == ["poison: writes rewards"]
    assert "its reward is 1, but an honest program's with the same reply is 0" in broken["poison: writes rewards"]
    [patched] = [one for one in found if one.subject == "poison: patches its grader"]
    assert patched.ok is None and "it could write" in patched.detail, "as far as sandbox process holds"


@pytest.mark.long
def test_the_whole_contract(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    prompts = {"two and two": "four", "three and three": "six", "one and one": "two", "no and one": "one"}
    tasks.write_text("".join(json.dumps({"prompt": ask, "answer": answer}) + "\n" for ask, answer in prompts.items()))
    command = ["{python}", "-S", str(PROGRAM), "once"]
    options = {"command": command, "tasks": str(tasks), "held_out": 0.3, "reward": {"plugin": "exact"}}
    environment_contract("agent", options=options, tasks=2)()
