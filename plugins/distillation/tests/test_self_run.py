"""Whole runs: each step is taught by the policy that sampled it, and a resumed run continues with the same one."""

from __future__ import annotations

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = (
    "run", "--env", "gsm8k", "--set", "teacher.me.use=self", "--set", "trainer.distillation.alone=true", "--deterministic",
    "--set", "checkpoint.every=1", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "evaluation.problems=0", "--set", "trainer.learning_rate=3e-4",
)  # fmt: skip


def test_a_run_that_was_killed_is_resumed_with_the_teacher_of_its_own_version_to_the_same_numbers(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(whole, *RUN, "--steps", "5", "--dir", str(whole))
    lines = metrics_of(whole)
    assert all(line["teacher/me/versions_behind"] == 0 for line in lines)
    assert all(line["teacher/me/rollouts"] > 0 and line["teacher/me/left_out"] == 0 for line in lines)
    run = RunningRun(broken, *RUN, "--steps", "5", "--dir", str(broken))
    run.wait_for_step(2)
    assert "teacher-me" in run.children, run.children
    run.kill("teacher-me")
    assert run.ended_within(60) == 1
    finish(broken, "resume", str(broken))
    for name in ("distill/kl", "reward/mean", "teacher/me/rollouts"):
        assert [line[name] for line in metrics_of(broken)] == [line[name] for line in lines], name


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_steps_in_which_nobody_succeeds_teach_nothing_and_end_nothing(tmp_path, kind):
    folder = tmp_path / "run"
    finish(
        folder, *RUN, "--steps", "3", "--dir", str(folder), "--set", "teacher.me.success=99", "--set",
        f"trainer.distillation.kind={kind}",
    )  # fmt: skip
    lines = metrics_of(folder)
    assert [line["teacher/me/rollouts"] for line in lines] == [0, 0, 0]
    assert all("distill/kl" not in line and line["policy/probe_shift_nats"] == 0 for line in lines), lines


def test_a_run_that_saves_too_seldom_ends_with_what_to_set(tmp_path):
    folder = tmp_path / "run"
    seldom = [word.replace("checkpoint.every=1", "checkpoint.every=0") for word in RUN]
    run = RunningRun(folder, *seldom, "--steps", "4", "--dir", str(folder))
    assert run.ended_within(200) == 2
    assert "teacher.me teaches rollouts of version 1" in " ".join(run.text.split()), run.text
    assert "checkpoint.every=1" in run.text
