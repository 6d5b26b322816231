"""docs/records.md: its tables name what a run writes, its reader reads it, and its audit audits it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from atropos_records.rollout_records import RolloutRecords
from tests.conftest import REPOSITORY, TOY
from tests.e2e.runs import finish
from tests.pages.blocks import the_block

PAGE = "docs/records.md"
TYPES = {"I64": "int64", "I32": "int32", "F32": "float32", "BOOL": "bool"}
BY_OTHERS = {"teacher_logprobs", "ref_logprobs"}  # that nobody gives in a run without a teacher
OF_SOME = {"scored_reward", "failed", "where", "tools", "turn_rewards", "turn_order"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "sevens.py").write_text(TOY)
    finish(folder / "mine", "run", "--model", "toy", "--env", f"{folder}/sevens.py:Sevens", "--steps", "3", "--dir",
           str(folder / "runs/mine"), "--set", "evaluation.problems=4", "--set", "trainer.learning_rate=20.0")  # fmt: skip
    return folder


def section(title: str) -> str:
    return (REPOSITORY / PAGE).read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_reader_on_the_page_reads_a_run(folder):
    block = the_block(PAGE, "from pathlib import Path")
    ended = subprocess.run([sys.executable, "-c", block.text], cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    flat = [line for line in lines if line.endswith("flat transform.drop_flat")]
    assert flat
    apart = [float(line.split()[-1]) for line in lines[1:] if line not in flat and not line.startswith(("[", " "))]
    assert apart and max(apart) < 1e-4


def test_the_audit_on_the_page_finds_nothing_wrong(folder, atropos):
    command = the_block(PAGE, "atropos audit runs/mine").commands[0].split()[1:]
    ended = atropos(*command, cwd=folder)
    assert ended.code == 0, ended.out + ended.err
    assert "what could be checked is as it should be" in ended.out


def test_the_table_of_columns_is_what_is_written(folder):
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \[([SN][ +1]*)\] \|", section("Columns over all tokens"), re.M)
    step = RolloutRecords(folder / "runs/mine").step(3)
    with safe_open(step.tokens_path, framework="numpy") as file:
        size = {"S": step.tokens.sequences, "S + 1": step.tokens.sequences + 1, "N": step.tokens.tokens}
        for name, kind, axis in rows:
            if name not in BY_OTHERS:
                part = file.get_slice(name)
                assert (TYPES[part.get_dtype()], part.get_shape()) == (kind, [size[axis]]), name
        assert set(file.keys()) == {name for name, _, _ in rows} - BY_OTHERS


def test_the_table_of_fields_is_what_is_written(folder):
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section("One line per episode"), re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    lines = (folder / "runs/mine/rollouts/step-000003.jsonl").read_text().splitlines()
    assert {name for line in lines for name in json.loads(line)} == named - OF_SOME
