"""A run whose reward is an ensemble, one member of which fails always."""

from __future__ import annotations

import pytest

from tests.conftest import REPOSITORY, metrics_of, plant

PLANTED = REPOSITORY / "plugins/reward_ensemble/tests/planted.py"

RUN = """
model = "toy"
deterministic = true
[environment.sevens]
use = "./sevens.py:Sevens"
[engine]
use = "toy"
[trainer]
use = "toy"
[bridge]
use = "local"
[curriculum]
use = "shuffled"
[checkpoint]
every = 2
[evaluation] # what is run for it counts for the members' agreement as well
problems = 4
every = 2
[reward.environment]
use = "none"
[reward.trusted]
use = "ensemble"
combine = "mean"
on_departure = "exclude"
[reward.trusted.members.environment]
[reward.trusted.members.second]
use = "planted"
flip = 0.05
seed = 1
[reward.trusted.members.third]
use = "planted"
flip = 0.05
seed = 2
[reward.trusted.members.hijacked]
use = "planted"
values = [1.0]
[reward.trusted.members.broken]
use = "planted"
does = "raises"
"""


@pytest.fixture
def path(tmp_path):
    """With the planted rewards installed."""
    (tmp_path / "installed").mkdir()
    plant(tmp_path / "installed", "ensemble_planted", PLANTED.read_text())
    return {"PYTHONPATH": str(tmp_path / "installed")}


@pytest.mark.slow
def test_a_run_with_an_ensemble_trains_tells_and_resumes_to_the_same_numbers(atropos, sevens, path, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    whole = atropos("run", "run.toml", "--steps", "6", "--dir", "whole", **path)
    assert whole.code == 0, whole.err
    assert "'broken' gave no rating: KeyError" in whole.err
    rows = metrics_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(7))
    assert rows[-1]["reward/trusted/broken/missing"] == 1
    assert rows[-1]["reward/trusted/environment/missing"] == 0
    assert "reward/trusted/alpha" in rows[-1]
    assert rows[3]["reward/trusted/hijacked/flagged"] == 1  # before the checkpoint from which the other run goes on
    assert rows[-1]["reward/trusted/flagged"] == 1
    half = atropos("run", "run.toml", "--steps", "4", "--dir", "half", **path)
    assert half.code == 0, half.err
    again = atropos("resume", "half", "--steps", "6", **path)
    assert again.code == 0, again.err
    resumed = metrics_of(tmp_path / "half")
    steps = [name for name in rows[-1] if name.startswith("reward/trusted")]
    assert len(steps) > 8
    assert [{name: row.get(name) for name in steps} for row in resumed] == [
        {name: row.get(name) for name in steps} for row in rows
    ]


def test_an_ensemble_that_would_lose_what_it_learned_in_a_process_of_its_own_is_refused(
    atropos, sevens, path, tmp_path
):
    (tmp_path / "run.toml").write_text(RUN.replace('combine = "mean"', 'combine = "mean"\nruns_in = "process"'))
    ended = atropos("run", "run.toml", "--steps", "1", "--dir", "run", **path)
    assert ended.code == 2
    assert "Ensemble keeps what it has learned with the run" in ended.err
    assert 'Remove runs_in = "process" from it' in ended.err


def test_a_member_that_would_lose_what_it_learned_is_refused_before_anything_is_run(atropos, sevens, path, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace("flip = 0.05\nseed = 1", 'runs_in = "process"'))
    ended = atropos("run", "run.toml", "--steps", "1", "--dir", "run", **path)
    assert ended.code == 2
    assert "Planted keeps what it has learned with the run" in ended.err
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_reward_that_the_runs_author_has_to_mend_ends_the_run(atropos, sevens, path, tmp_path):
    one = '[reward.trusted]\nuse = "planted"\ndoes = "is_misconfigured"\n'
    (tmp_path / "run.toml").write_text(RUN[: RUN.index("[reward.trusted]")] + one)
    ended = atropos("run", "run.toml", "--steps", "1", "--dir", "run", **path)
    assert ended.code == 2
    assert "the rubric is not there.\nWhat to do: Name one." in ended.err


@pytest.mark.slow
def test_groups_that_queue_for_a_members_process_have_their_deadline_each(atropos, sevens, path, tmp_path):
    slow = 'deadline_s = 4.0\n[reward.trusted.members.slow]\nuse = "forgetful"\ndoes = "takes_a_second"\nruns_in = "process"'
    text = RUN.replace("[reward.trusted.members.environment]", f"{slow}\n[reward.trusted.members.environment]", 1)
    (tmp_path / "run.toml").write_text(text.replace("problems = 4", "problems = 0"))
    ended = atropos("run", "run.toml", "--steps", "1", "--set", "training.groups_per_step=8", "--dir", "run", **path)
    assert ended.code == 0, ended.err
    (row,) = metrics_of(tmp_path / "run")
    assert row["reward/trusted/slow/missing"] == row["rollouts/failed"] == 0
