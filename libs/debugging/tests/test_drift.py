"""Two runs that are not deterministic, compared by their metrics: honest seeds, and planted differences."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_core.errors import DataError
from atropos_debugging.drift import change_point, drifts, effective_steps, student_p
from tests.conftest import TOY
from tests.e2e.runs import finish

STEPS, HONEST, MORE = 30, 3, 6
RUN = (
    "--model", "toy", "--deterministic", "--steps", str(STEPS), "--set", "trainer.learning_rate=20.0",
    "--set", "evaluation.problems=0", "--set", "training.groups_per_step=8", "--set", "training.group_size=8",
    "--set", "sampling.max_tokens=16", "--set", f"checkpoint.every={STEPS}",
)  # fmt: skip


def run(folder: Path, name: str, seed: int, *flags: str) -> None:
    environment = folder / ("other/sevens.py:Sevens" if name == "reward" else "sevens.py:Sevens")
    where = ("--env", str(environment), "--dir", str(folder / name), "--seed", str(seed))
    finish(folder / name, "run", *RUN, *where, *flags)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three honest seeds, and three runs with a planted difference."""
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "sevens.py").write_text(TOY)
    (folder / "other").mkdir()
    (folder / "other/sevens.py").write_text(TOY.replace('count("7") / 8', 'count("7") / 4'))
    for number in range(HONEST):
        run(folder, str(number), number + 1)
    run(folder, "rate", 9, "--set", "trainer.learning_rate=100.0")
    run(folder, "temperature", 10, "--set", "sampling.temperature=0.15")
    run(folder, "reward", 11)
    return folder


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run_app(["bisect", str(a), str(b), "--statistics", "--json"])
    return code, json.loads(capsys.readouterr().out)


def alarms(capsys: pytest.CaptureFixture[str], runs: Path, seeds: int) -> list[tuple[int, int]]:
    pairs = combinations(range(seeds), 2)
    return [(a, b) for a, b in pairs if compared(capsys, runs / str(a), runs / str(b))[0]]


def test_runs_of_honest_seeds_are_not_said_to_differ(runs: Path, capsys):
    assert not alarms(capsys, runs, HONEST)


@pytest.mark.long
def test_at_most_one_of_fifteen_pairs_of_honest_seeds_is_said_to_differ(runs: Path, capsys):
    for number in range(HONEST, MORE):
        run(runs, str(number), number + 1)
    found = alarms(capsys, runs, MORE)
    assert len(found) <= 1, found


@pytest.mark.parametrize("name", ["rate", "temperature", "reward"])
def test_a_planted_difference_is_found(runs: Path, capsys, name: str):
    for honest in "012":
        code, found = compared(capsys, runs / honest, runs / name)
        assert code == 1 and not found["alike"]
        assert all(one["p"] < 0.01 for one in found["drifts"])
        assert "evidence and not proof" in found["note"]
        if name == "reward":
            first = next(one for one in found["drifts"] if one["metric"] in ("reward/mean", "reward/max_abs"))
            assert first["b"] > 1.5 * first["a"] and first["step"] <= 5


def test_tables_are_printed_for_people(runs: Path, capsys):
    assert run_app(["bisect", str(runs / "0"), str(runs / "reward"), "--statistics"]) == 1
    text = capsys.readouterr().out
    assert "The runs differ from step" in text and "reward/" in text and "evidence and not proof" in text
    assert run_app(["bisect", str(runs / "0"), str(runs / "0"), "--statistics"]) == 0
    assert "differs by more than the steps of both runs vary" in capsys.readouterr().out
    assert run_app(["bisect", str(runs / "0"), str(runs / "1"), "--statistics", "--tolerance", "0.1"]) == 2
    assert "--tolerance has no effect with --statistics" in capsys.readouterr().err


def test_p_is_students():
    """Table values of two-sided t: 5 % at 10 and at 1 degrees of freedom, 1 % at 1; and the closed forms for 1 and 2."""
    assert student_p(2.2281388519649385, 10) == pytest.approx(0.05, rel=1e-9)
    for t in (0.01, 0.5, 3.0, 40.0):
        assert student_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9)
        assert student_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)


def test_the_change_is_dated_where_it_begins():
    noise = np.random.default_rng(0).normal(size=60)
    assert change_point(np.where(np.arange(60) >= 23, 5.0, 0.0) + noise) in (22, 23, 24)
    assert change_point(noise + 5) == 0


def test_steps_that_depend_on_each_other_count_less():
    noise = np.random.default_rng(2).normal(size=4000)
    assert effective_steps(noise) > 3600
    walk = np.cumsum(noise)
    assert effective_steps(walk) < 200
    smooth = [noise[0]]
    for one in noise[1:]:
        smooth.append(0.5 * smooth[-1] + one)
    assert effective_steps(np.array(smooth)) == pytest.approx(4000 / 3, rel=0.15)


def test_few_steps_are_an_error_that_says_how_many_are_needed():
    rows = {step: {"reward/mean": 0.0} for step in range(12)}
    with pytest.raises(DataError, match="12 steps in common, and a statistical comparison needs 20"):
        drifts(rows, rows)
