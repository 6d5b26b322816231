"""Runs that fall ill are named within five steps, healthy ones are not, and what was found can be read afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib

import psutil
import pytest

from atropos_doctor.diagnose import diagnose
from tests.conftest import metrics_of, plant
from tests.e2e.sick_runs import FROM, SICK, command, rows, run_sick, verdict


@pytest.mark.parametrize("name", list(SICK))
def test_a_sick_run_is_named_within_five_steps_and_by_the_doctor(name, tmp_path):
    run, ended = run_sick(name, tmp_path)
    found = verdict(name, run)
    assert found["held"], (found, ended.stderr[-2000:])
    sickness = SICK[name]
    assert (ended.returncode != 0) == (sickness.error or name == "hung rollout"), ended.stderr
    if not sickness.error:
        assert f"health.{sickness.check}: since step {found['since']}, " in ended.stderr
        if name != "hung rollout":
            [line] = [line for line in metrics_of(run) if line["step"] == found["named_at"]]
            assert line[f"health/{sickness.check}"] == 2.0
    broken = [finding.subject for finding in diagnose(run) if finding.ok is False]
    assert ("run" if sickness.error else sickness.check) in broken


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_raises_no_alarm(seed, tmp_path):
    run, ended = run_sick("nothing", tmp_path, seed=seed, more="health.rescore_every = 1")
    assert ended.returncode == 0, ended.stderr
    assert [row for row in rows(run) if row["state"] == "ill"] == []
    assert "health." not in ended.stderr
    doctor = command(tmp_path, "doctor", "run")
    assert doctor.returncode == 0, doctor.stdout
    assert "26 of 28 found nothing; 2 had nothing to look at" in doctor.stdout


def test_pause_saves_the_step_and_a_resume_goes_on_with_what_health_knew(tmp_path):
    run, ended = run_sick("dead gradients", tmp_path, more='health.dead_gradients.action = "pause"')
    assert ended.returncode == 3
    assert "RunPaused" in ended.stderr
    assert "atropos resume" in ended.stderr
    step = verdict("dead gradients", run)["named_at"]
    assert (run / f"checkpoints/step-{step:06d}").is_dir()
    resumed = command(tmp_path, "resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert "dead_gradients" not in resumed.stderr, "it was reported once"
    assert [line["step"] for line in metrics_of(run)] == list(range(1, FROM + 6))
    states = {line["step"]: line["health/dead_gradients"] for line in metrics_of(run)}
    assert (states[step], states[step + 1], states[FROM + 5]) == (2.0, 2.0, 0.0), "well after two right steps, not one"


def test_stop_saves_nothing_after_the_last_checkpoint(tmp_path):
    more = 'health.dead_gradients.action = "stop"\ncheckpoint.every = 3'
    run, ended = run_sick("dead gradients", tmp_path, more=more)
    assert ended.returncode == 3
    assert "RunIll" in ended.stderr
    assert verdict("dead gradients", run)["named_at"] == 7
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000003", "step-000006"]


def test_a_check_that_is_off_says_nothing_and_the_doctor_still_does(tmp_path):
    run, ended = run_sick("dead gradients", tmp_path, more='health.action = "off"')
    assert ended.returncode == 0, ended.stderr
    assert rows(run) == []
    assert not any(name.startswith("health/") for name in metrics_of(run)[-1])
    doctor = command(tmp_path, "doctor", "run")
    assert doctor.returncode == 1
    assert "dead_gradients" in doctor.stdout


def test_health_changes_no_bit_of_a_deterministic_run(atropos, sevens, tmp_path):
    arguments = (
        "run",
        "--model",
        "toy",
        "--env",
        sevens,
        "--deterministic",
        "--steps",
        "8",
        "--set",
        "evaluation.problems=4",
    )
    assert atropos(*arguments, "--dir", "on", "--set", "health.rescore_every=1").code == 0
    assert atropos(*arguments, "--dir", "off", "--set", "health.action=off").code == 0
    table = "checkpoints/step-000008/policy/table.npy"
    assert (tmp_path / "on" / table).read_bytes() == (tmp_path / "off" / table).read_bytes()


def test_the_doctor_names_a_run_that_was_killed_and_one_that_goes_on(sevens, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_core", "run", "--model", "toy", "--env", sevens, "--steps", "10000", "--dir", "run",
         "--set", "health.cut_off.action=off",
         "--set", "evaluation.problems=2"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
            assert time.monotonic() < until
            time.sleep(0.1)
        living = command(tmp_path, "doctor", "run")
        assert living.returncode == 0, living.stdout
        assert "is going on" in living.stdout
        ended = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    psutil.wait_procs(ended, 60)  # the lock goes with the last of them
    dead = command(tmp_path, "doctor", "run")
    assert dead.returncode == 1
    assert "without a word" in dead.stdout


def test_the_doctor_of_a_folder_that_is_no_run_says_so(atropos, tmp_path):
    ended = atropos("doctor", str(tmp_path))
    assert ended.code == 1
    assert "is not a run directory" in ended.err


def test_a_run_closes_with_where_the_time_went_and_writes_it_down(atropos, sevens, tmp_path):
    ended = atropos(
        "run", "--model", "toy", "--env", sevens, "--steps", "4", "--dir", "run", "--set", "evaluation.problems=4"
    )
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    times = {row["name"]: row for row in summary["times"]}
    stages = {"start-up", "waiting", "packing", "trainer", "publishing", "evaluation", "checkpoint", "sink.jsonl", "health",
              "transform.group_advantage", "transform.drop_flat", "probe", "other"}  # fmt: skip
    assert stages <= set(times)
    assert sum(row["share"] for row in times.values() if row["kind"] == "stage") == pytest.approx(1.0, abs=0.02)
    for call in ("engine/sample", "engine/pause", "trainer/step", "trainer/logprobs", "reward.environment/score",
                 "environment.sevens/rollout"):  # fmt: skip
        assert times[call]["p50_s"] <= times[call]["p95_s"] <= times[call]["p99_s"], call
    assert 0 <= summary["idle"]["engine"] < 1
    assert summary["times"][0]["name"] in ended.out
    last = metrics_of(tmp_path / "run")[-1]
    for name in ("time/waiting_s", "time/trainer_s", "time/sink/jsonl_s", "time/engine/sample_s", "time/engine_idle_share",
                 "time/trainer_idle_share", "time/queue_mean_s"):  # fmt: skip
        assert last[name] >= 0, name
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["health"]["action"] == "warn"


UNTIL_MENDED = """
from pathlib import Path

from atropos_core import hookimpl
from atropos_core.errors import ConfigError
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import Provider


class UntilMended:
    async def __call__(self, task, episodes):
        if not Path("mended").exists():
            raise ConfigError("the licence is not there.", remedy="Put it there.")
        return [float(number % 2) for number in range(len(episodes))]


@hookimpl
def atropos_rewards():
    yield Provider("mended", "fails until it is mended", NoOptions, lambda options, context: UntilMended())
"""


def test_a_run_that_was_mended_and_finished_is_not_reported_as_failed(atropos, sevens, tmp_path):
    (tmp_path / "installed").mkdir()
    plant(tmp_path / "installed", "reward_mended", UNTIL_MENDED)
    path = {"PYTHONPATH": str(tmp_path / "installed")}
    ended = atropos(
        "run", "--model", "toy", "--env", sevens, "--reward", "mended", "--steps", "3", "--dir", "run", **path
    )
    assert ended.code == 2, ended.err
    doctor = command(tmp_path, "doctor", "run")
    assert "ConfigError: the licence is not there." in doctor.stdout
    (tmp_path / "mended").touch()
    again = atropos("resume", "run", **path)
    assert again.code == 0, again.err
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 3]
    doctor = command(tmp_path, "doctor", "run")
    assert "finished: all 3 steps" in doctor.stdout and "licence" not in doctor.stdout
