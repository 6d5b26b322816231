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
[evaluation] # what is played for it counts for the members' agreement as well
problems = 4
every = 2
[reward.trusted]
use = "ensemble"
combine = "mean"
on_departure = "exclude"
[reward.trusted.members.environment]
[reward.trusted.members.shape]
use = "format"
patterns = ["7"]
[reward.trusted.members.broken]
use = "planted"
does = "raises"
"""


@pytest.mark.slow
def test_a_run_with_an_ensemble_trains_tells_and_resumes_to_the_same_numbers(atropos, sevens, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "installed").mkdir()
    plant(tmp_path / "installed", "ensemble_planted", PLANTED.read_text())
    path = {"PYTHONPATH": str(tmp_path / "installed")}
    whole = atropos("run", "run.toml", "--steps", "6", "--dir", "whole", **path)
    assert whole.code in (0, 1), whole.err
    assert "'broken' gave no rating: KeyError" in whole.err
    rows = metrics_of(tmp_path / "whole")
    assert rows[-1]["reward/trusted/broken/missing"] == 1
    assert rows[-1]["reward/trusted/environment/missing"] == 0
    assert "reward/trusted/alpha" in rows[-1]
    half = atropos("run", "run.toml", "--steps", "4", "--dir", "half", **path)
    assert half.code in (0, 1), half.err
    again = atropos("resume", "half", "--steps", "6", **path)
    assert again.code in (0, 1), again.err
    resumed = metrics_of(tmp_path / "half")
    told = [name for name in rows[-1] if name.startswith("reward/trusted")]
    assert len(told) > 8
    assert [{name: row.get(name) for name in told} for row in resumed] == [
        {name: row.get(name) for name in told} for row in rows
    ]


def test_an_ensemble_that_would_lose_what_it_learned_in_a_process_of_its_own_is_refused(atropos, sevens, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace('combine = "mean"', 'combine = "mean"\nruns_in = "process"'))
    (tmp_path / "installed").mkdir()
    plant(tmp_path / "installed", "ensemble_planted", PLANTED.read_text())
    ended = atropos("run", "run.toml", "--steps", "1", "--dir", "run", PYTHONPATH=str(tmp_path / "installed"))
    assert ended.code == 2
    assert "Ensemble keeps what it has learned with the run" in ended.err
    assert 'Take runs_in = "process" from it' in ended.err
