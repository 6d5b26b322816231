"""The promises of docs/agents.md: its example learns, its reward scores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atropos_agent_api.examples import tools
from atropos_agent_api.examples.calculator import calculate
from atropos_agent_api.grading import Case
from atropos_core.types import Task
from tests.pages.blocks import BLOCKS, the_block

EXAMPLE = Path(__file__).parents[1] / "atropos_agent_api" / "examples" / "calculator.toml"


def trained(folder: Path, *changes: str, seed: int = 0) -> list[dict[str, float]]:
    """The metrics of a run, by step."""
    command = [sys.executable, "-m", "atropos_core", "run", str(EXAMPLE), "--seed", str(seed)]
    command += [word for change in ("run.directory=unused", *changes)[1:] for word in ("--set", change)]
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=1500
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_a_short_run_trains_what_the_agent_called_for(tmp_path: Path) -> None:
    small = ("training.steps=2", "training.groups_per_step=4", "training.group_size=4", "evaluation.problems=8")
    steps = trained(tmp_path, *small)
    assert len(steps) == 3
    assert all(step["agent/programs_failed"] == 0.0 and step["rollouts/failed"] == 0.0 for step in steps[1:])
    assert max(step["agent/calls"] for step in steps[1:]) > 1.0, "the calculator was used"
    assert max(step["alignment/max_abs_logprob_diff"] for step in steps[1:]) < 1e-4
    assert len(list(tmp_path.glob("runs/*/agents/agent/*/account.json"))) > 16


@pytest.mark.long  # one seed, as the page; benchmarks/soak_agents.py has five
def test_the_example_on_the_page_learns(tmp_path: Path) -> None:
    steps = trained(tmp_path, "training.groups_per_step=8")
    before, after = steps[0]["eval/accuracy"], steps[-1]["eval/accuracy"]
    assert after - before >= 0.20, (before, after)


def test_the_reward_on_the_page_scores(tmp_path: Path) -> None:
    block = the_block("docs/agents.md", "from atropos_agent_api.grading")
    names: dict[str, object] = {}
    exec(block.text, names)
    case = Case(Task("1", (), answer="4"), (), "", 0, "", tmp_path)
    grade = names["grade"]
    assert callable(grade) and grade(case) == 0.0
    (tmp_path / "answer.txt").write_text("4\n")
    assert grade(case) == 1.0


@pytest.mark.parametrize(
    ("a", "sign", "b", "result"),
    [(7, "+", 5, "12"), (7, "-", 9, "-2"), (7, "*", 5, "35"), (78, "/", 3, "26"), (1, "/", 0, "?")],
)
def test_the_calculator_calculates(a: int, sign: str, b: int, result: str) -> None:
    assert calculate(a, sign, b) == result


def test_the_run_file_on_the_page_is_the_examples() -> None:
    [block] = [one for one in BLOCKS if one.page == "docs/agents.md" and "examples.calculator:main" in one.text]
    shown = {line.partition(" #")[0].strip() for line in block.text.splitlines() if re.match(r"\w+ = ", line)}
    own = {line.partition(" #")[0].strip() for line in EXAMPLE.read_text().splitlines() if re.match(r"\w+ = ", line)}
    assert shown - {'sandbox = "process"'} <= own


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "12 * 3"}', "36"),
        ('{"expression": "7 / 2"}', "3.5"),
        ('{"expression": "1 / 0"}', "error: division by zero"),
        ('{"expression": "1 + 2 + 3"}', "error: not one operation on two numbers"),
        ('{"sum": "1 + 2"}', 'error: calculate needs {"expression": "..."}'),
        ("[1]", 'error: calculate needs {"expression": "..."}'),
        ("1 + 2", 'error: calculate needs {"expression": "..."}'),
    ],
)
def test_the_tool_of_the_agent_with_tools_answers_every_call(arguments: str, result: str) -> None:
    assert tools.result_of(SimpleNamespace(function=SimpleNamespace(arguments=arguments))) == result
