"""The README's own environment, as it stands there, with the policy that a new user gets."""

from __future__ import annotations

import json
import re

from tests.conftest import REPOSITORY, metrics_of
from tests.pages.blocks import the_block

EXAMPLE = the_block("README.md", "import random")


def test_the_readme_example_learns_visibly(atropos, tmp_path):
    """A third of the steps that the page takes; the whole of it over five seeds is in `make soak`."""
    assert len(EXAMPLE.text.splitlines()) <= 30
    (tmp_path / "sums.py").write_text(EXAMPLE.text)
    few = ("--steps", "14", "--set", "evaluation.problems=200", "--dir", "run")
    ended = atropos("run", "--env", "./sums.py", *few, timeout=230, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err and "warning" not in ended.err, "what a new user tries first is quiet"
    before, *steps = metrics_of(tmp_path / "run")
    assert [one["step"] for one in steps] == list(range(1, 15))
    gain = steps[-1]["eval/accuracy"] - before["eval/accuracy"]
    assert gain >= 0.15, f"{before['eval/accuracy']:.1%} -> {steps[-1]['eval/accuracy']:.1%}"
    assert all(one["rollouts/failed"] == 0 for one in steps)


def test_no_question_of_the_readme_example_is_in_both_splits_and_its_contract_says_so(atropos, tmp_path):
    (tmp_path / "sums.py").write_text(EXAMPLE.text)
    ended = atropos("check", "./sums.py", timeout=230)
    assert ended.code == 0, ended.out
    assert re.search(r"splits\s+ok\s+no test task is also in train, by id or by question", ended.out), ended.out
    assert not re.search(r"\s(note|BROKEN)\s", ended.out), ended.out


def test_the_readme_says_what_its_example_gained():
    """Its figures are those of `python -m benchmarks.soak --only readme`."""
    seeds = json.loads((REPOSITORY / "benchmarks/results/soak_readme.json").read_text())["seeds"]
    [default, *others] = (one["gain_points"] for one in seeds)
    assert [one["seed"] for one in seeds].index(0) == 0 and len(others) == 4 and min(default, *others) >= 15
    readme = re.sub(r"\s+", " ", (REPOSITORY / "README.md").read_text())
    assert f"(+{default:.1f} points, 500 problems)" in readme
    assert f"With four other seeds, accuracy rose by {min(others):.1f} to {max(others):.1f} points" in readme
