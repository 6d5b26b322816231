"""`zscore` in runs: what it says at the start, and that a resume in the middle changes no number."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish

TIMES = (
    "time/", "tokens/s", "trajectories/s", "bridge/publish_s",
    "health/slow_disk", "health/throughput", "health/silence",  # which look at times
    "rescore/", "health/reward_d",  # a look that would take too large a share of the time is left out
)  # fmt: skip
RUN = """
model = "toy"
deterministic = true
[training]
steps = 8
groups_per_step = 4
[evaluation]
problems = 4
[checkpoint]
every = 2
[trainer]
learning_rate = 20.0
[engine]
latency_s = 0.02
[environment.sevens]
use = "{sevens}"
"""
ZSCORE = """
[transform.zscore]
warm_up = 40
half_life = 50.0
"""
ADVANTAGE = """
[transform.group_advantage]
divide_by_std = {divides}
"""


@pytest.fixture
def described(sevens: str, tmp_path: Path):
    def write(*transforms: str) -> str:
        """A run file with these transforms, in this order."""
        text = RUN.format(sevens=tmp_path / "sevens.py:Sevens") + "".join(transforms)
        (tmp_path / "run.toml").write_text(text)
        return str(tmp_path / "run.toml")

    return write


def numbers(run: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in metrics_of(run)]


def table(run: Path, step: int) -> np.ndarray:
    return np.load(run / f"checkpoints/step-{step:06d}/policy/table.npy")


def test_a_run_killed_in_the_middle_and_resumed_gives_the_same_numbers(described, tmp_path):
    file = described(ZSCORE, ADVANTAGE.format(divides="false"))
    finish(tmp_path / "whole", "run", file, "--dir", str(tmp_path / "whole"))
    run = RunningRun(tmp_path / "run", "run", file, "--dir", str(tmp_path / "run"))
    run.wait_for_step(5)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.process.wait(60) == -signal.SIGKILL
    finish(tmp_path / "run", "resume", str(tmp_path / "run"))
    whole = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "run") == whole
    assert table(tmp_path / "run", 8).tobytes() == table(tmp_path / "whole", 8).tobytes()
    assert [line["transform/zscore/sevens/count"] for line in whole[1:]] == [32 * step for step in range(1, 9)]
    assert [line["transform/zscore/unchanged"] for line in whole[1:]] == [1, *[0] * 7]
    assert len({line["transform/zscore/sevens/mean"] for line in whole[1:]}) > 3, "there is something to count"


@pytest.mark.parametrize("divides", ["true", "false"])
def test_the_run_warns_where_it_cannot_matter_and_only_there(atropos, described, divides):
    file = described(ZSCORE, ADVANTAGE.format(divides=divides))
    ended = atropos("run", file, "--dir", "run", "--steps", "1")
    assert ended.code == 0, ended.err
    steps = " ".join(ended.err.split())
    assert steps.count("the transform zscore cannot matter here") == (divides == "true")
    assert ("What remains is clipping, at 5 sigmas." in steps) == (divides == "true")


def test_what_the_warning_says_is_so(atropos, described, tmp_path):
    """Divided advantages train to the policy of a run without zscore, rounding aside; undivided ones to another."""
    zscore = "[transform.zscore]\nwarm_up = 2\nclip = 1e6\n"
    for name, transforms in (
        ("plain", [ADVANTAGE.format(divides="true")]),
        ("divided", [zscore, ADVANTAGE.format(divides="true")]),
        ("undivided", [zscore, ADVANTAGE.format(divides="false")]),
    ):
        ended = atropos("run", described(*transforms), "--dir", name, "--steps", "2")
        assert ended.code == 0, ended.err
    plain, divided, undivided = (table(tmp_path / name, 2) for name in ("plain", "divided", "undivided"))
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(divided, plain, atol=1e-5)
    assert np.abs(undivided - plain).max() > 0.01


def test_after_group_advantage_it_ends_the_run_with_what_to_do(atropos, described):
    ended = atropos("run", described(ADVANTAGE.format(divides="false"), ZSCORE), "--dir", "run")
    assert ended.code == 2, ended.err
    assert "Name it before group_advantage" in " ".join(ended.err.split())
