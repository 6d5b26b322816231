"""A student and its teacher, each on an engine of its own: what is learned, and what a teacher's death does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TAUGHT = (
    "run", "--env", "gsm8k", "--set", "teacher.big.use=distillation", "--set", "teacher.big.model=tiny-teacher",
    "--set", "trainer.distillation.alone=true",
)  # fmt: skip


WHOLE, SHORT = ("40", "512", 0.25), ("12", "128", 0.1)  # steps, problems, and the gain at least
LONG = (pytest.mark.long, pytest.mark.timeout(1200))  # some minutes where nothing else runs


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("forward", SHORT),  # of "reverse", the plugins' tests show the teacher's numbers and the loss by itself
        pytest.param("forward", WHOLE, marks=LONG),
        pytest.param("reverse", WHOLE, marks=LONG),
    ],
)
def test_a_student_at_forty_percent_learns_from_its_teacher_alone(tmp_path, kind, length):
    steps, problems, gain = length
    folder = tmp_path / "run"
    finish(
        folder, *TAUGHT, "--steps", steps, "--dir", str(folder), "--set", f"trainer.distillation.kind={kind}",
        "--set", f"evaluation.problems={problems}", "--set", "trainer.learning_rate=3e-4",
        deadline_s=1100,
    )  # fmt: skip
    lines = metrics_of(folder)
    assert lines[-1]["eval/accuracy"] >= lines[0]["eval/accuracy"] + gain
    training = lines[1:]
    assert all(line["distill/positions"] == 1.0 for line in training), "every token that the loss counts has a teacher"
    assert all(line["teacher/big/positions"] > 0 for line in training)
    assert training[-1]["distill/kl"] < 0.5 * training[0]["distill/kl"]


def test_a_teacher_that_is_killed_ends_the_run_with_its_name_and_a_resume_goes_on(tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(
        folder, *TAUGHT, "--steps", "6", "--dir", str(folder), "--deterministic", "--set", "checkpoint.every=2",
        "--set", "training.groups_per_step=2", "--set", "training.group_size=4", "--set", "evaluation.problems=0",
    )  # fmt: skip
    run.wait_for_step(2)
    assert "teacher-big" in run.children, run.children
    run.kill("teacher-big")
    assert run.ended_within(60) == 1
    assert "teacher-big" in run.text and "SIGKILL" in run.text, run.text
    finish(folder, "resume", str(folder))
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 7))


def test_one_command_without_the_other_half_says_what_is_missing(atropos, tmp_path: Path):
    alone = ("--set", "trainer.distillation.alone=true", "--set", "evaluation.problems=0")
    ended = atropos("run", "--env", "gsm8k", *alone, "--steps", "1", "--dir", "a")
    assert ended.code == 1 and "no group of the batch came with a teacher's" in ended.err, ended.err
    ended = atropos(*[one for one in TAUGHT if "trainer" not in one][:-1], "--steps", "1", "--dir", "b")
    assert ended.code == 2 and "the trainer ignores the annotations" in ended.err, ended.err
