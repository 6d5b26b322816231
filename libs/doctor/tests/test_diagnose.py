"""What `atropos doctor RUN` says of how a run stands, where the numbers alone do not tell."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_core.interfaces import Finding
from atropos_doctor.diagnose import diagnose

LONG_AGO_S = 7200.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four of ten steps, two hours ago."""
    (tmp_path / "config.toml").write_text("[training]\nsteps = 10\n")
    rows = [{"step": step, "time/step_s": 2.0, "loss": 0.1} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = time.time() - LONG_AGO_S
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(tmp_path / name, (before, before))
    return tmp_path


@pytest.fixture
def living(run: Path) -> Iterator[Path]:
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run


def of(subject: str, found: list[Finding]) -> Finding:
    [one] = [finding for finding in found if finding.subject == subject]
    return one


def test_a_run_that_is_being_resumed_goes_on(living: Path) -> None:
    os.utime(living / "config.toml")  # as a resume writes it
    found = of("run", diagnose(living))
    assert found.ok is True and "is going on: step 4 of 10" in found.detail


def test_a_run_that_is_silent_for_long_may_be_at_work_and_is_not_called_broken(living: Path) -> None:
    found = of("run", diagnose(living))
    assert found.ok is None
    assert f"recorded nothing for {LONG_AGO_S:.0f} s" in found.detail


def test_a_living_run_whose_rollout_hangs_is(living: Path) -> None:
    row = {"step": 5, "check": "silence", "state": "ill", "since": 5, "says": "no groups for 130 s", "do": ""}
    (living / "health.jsonl").write_text(json.dumps(row) + "\n")
    assert of("silence", diagnose(living)).ok is False


def test_without_metrics_nothing_is_reported_as_well(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints/step-000003").mkdir(parents=True)
    found = diagnose(run)
    assert of("checks", found).ok is None and "there is nothing to check" in of("checks", found).detail
    assert "was saved last at step 3 of 10" in of("run", found).detail


def test_checks_that_had_no_numbers_are_not_counted_as_well(run: Path) -> None:
    detail = of("checks", diagnose(run)).detail
    well, blind = int(detail.split()[0]), int(detail.split("; ")[1].split()[0])
    assert 0 < well < 5 and well + blind == int(detail.split()[2])


def test_a_check_with_action_off_is_a_note_and_no_fault(run: Path) -> None:
    rows = [{"step": step, "policy/probe_shift_nats": 0.0, "groups/trained": 4.0, "loss": 0.1} for step in range(1, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert of("frozen_weights", diagnose(run)).ok is False
    (run / "config.toml").write_text('[training]\nsteps = 40\n[health.frozen_weights]\naction = "off"\n')
    found = of("frozen_weights", diagnose(run))
    assert found.ok is None and "the run has this check off" in found.detail
