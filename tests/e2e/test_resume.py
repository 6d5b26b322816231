"""Resume as a user meets it: the ends of epochs, what is cut back, what has changed, what is broken."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import in_front, metrics_of
from tests.e2e.ledger import check_epochs, plant_ledger, settled
from tests.e2e.runs import RunningRun, finish

TOY = ("run", "--model", "toy", "--set", "evaluation.problems=4", "--set", "training.groups_per_step=4")
STEPS = 10
TASKS = 16  # an epoch is four steps


def table(run: Path, step: int) -> bytes:
    return (run / f"checkpoints/step-{step:06d}/policy/table.npy").read_bytes()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(
        path, (path.stat().st_atime, path.stat().st_mtime + 2)
    )  # Python takes a file of one size and second for the same


def corrupt(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(bytes(damaged))


@pytest.mark.parametrize("killed_at", [3, 4, 7])
def test_a_kill_on_either_side_of_an_epoch_s_end_trains_every_task_of_it_once(killed_at, sevens, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", in_front(plant_ledger(tmp_path)))
    arguments = (*TOY, "--env", f"{tmp_path}/sevens.py:Sevens", "--steps", str(STEPS), "--deterministic",
                 "--set", "curriculum.use=ledger", "--set", "checkpoint.every=1", "--set", "trainer.learning_rate=20.0",
                 "--set", "training.refill_rounds=1", "--set", "engine.latency_s=0.02")  # fmt: skip
    finish(tmp_path / "whole", *arguments, "--dir", str(tmp_path / "whole"))
    run = RunningRun(tmp_path / "run", *arguments, "--dir", str(tmp_path / "run"))
    run.wait_for_step(killed_at)
    run.kill("supervisor")
    assert run.process.wait(60) == -signal.SIGKILL
    finish(tmp_path / "run", "resume", str(tmp_path / "run"))
    assert table(tmp_path / "run", STEPS) == table(tmp_path / "whole", STEPS)
    entries = settled(tmp_path / "run", STEPS)
    assert entries == settled(tmp_path / "whole", STEPS)
    check_epochs(entries, TASKS)
    assert {outcome for _, _, outcome in entries} == {"trained", "flat"}
    reported = metrics_of(tmp_path / "run")[1:]
    for outcome in ("trained", "flat"):
        assert sum(line[f"groups/{outcome}"] for line in reported) == sum(entry[2] == outcome for entry in entries)


def test_a_run_whose_interval_nobody_set_goes_on_after_a_kill_at_its_second_step(sevens, tmp_path):
    arguments = (*TOY, "--env", f"{tmp_path}/sevens.py:Sevens", "--steps", "40", "--set", "engine.latency_s=0.02")
    run = RunningRun(tmp_path / "run", *arguments, "--dir", str(tmp_path / "run"))
    run.wait_for_step(2)
    run.kill("supervisor")
    assert run.process.wait(60) == -signal.SIGKILL
    again = RunningRun(tmp_path / "run", "resume", str(tmp_path / "run"), "--steps", "3")
    try:
        assert again.process.wait(120) == 0, again.text
    finally:
        again.process.kill()
    assert "resumes    after step " in again.text


def test_what_a_dead_run_wrote_after_its_checkpoint_is_gone_when_another_goes_on(atropos, sevens, tmp_path):
    evaluating = ("--set", "evaluation.every=1", "--set", "checkpoint.every=2")
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "4", *evaluating).code == 0
    corrupt(tmp_path / "run/checkpoints/step-000004/policy/table.npy")
    (tmp_path / "run/rollouts/eval-000007.jsonl").write_text("of a run that came further\n")
    (tmp_path / "run/rollouts/step-000007.jsonl").write_text("of a run that came further\n")
    (tmp_path / "run/rollouts/step-000007.safetensors").write_text("of a run that came further\n")
    ended = atropos("resume", "run", "--steps", "3")
    assert ended.code == 0, ended.err
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "run/rollouts").iterdir()) == [
        *(f"eval-00000{step}.jsonl" for step in range(4)),
        *(f"step-00000{step}.{kind}" for step in range(1, 4) for kind in ("jsonl", "safetensors")),
    ]


def test_metrics_that_somebody_removed_are_missed_aloud_and_not_filled_with_zeros(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "2").code == 0
    (tmp_path / "run/metrics.jsonl").unlink()
    ended = atropos("resume", "run", "--steps", "3")
    assert ended.code == 0, ended.err
    assert "metrics.jsonl is shorter (0 bytes) than it was at the checkpoint" in " ".join(ended.err.split())
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [3]


def test_a_resume_names_what_differs_from_the_checkpoint_also_where_the_file_was_changed_by_hand(
    atropos, sevens, tmp_path
):
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "2").code == 0
    replace(tmp_path / "run/config.toml", "learning_rate = 1.0", "learning_rate = 3.0")
    ended = atropos("resume", "run", "--steps", "3", "--set", "sampling.top_k=7")
    assert ended.code == 0, ended.err
    changed = [line for line in ended.out.splitlines() if line.startswith("changed:")]
    assert changed == [
        "changed: training.steps is 3; the run had 2",
        "changed: sampling.top_k is 7; the run had 0",
        "changed: trainer.learning_rate is 3.0; the run had 1.0",
    ]
    again = atropos("resume", "run", "--steps", "4")
    assert [line for line in again.out.splitlines() if line.startswith("changed:")] == [
        "changed: training.steps is 4; the run had 3"
    ]


def test_a_change_that_cannot_start_is_not_kept(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--steps", "2", "--dir", "run").code == 0
    before = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "broken.py").write_text(
        "import atropos_core\n\nclass Sevens(atropos_core.Environment):\n    def tasks(self, split):\n        raise ValueError('no data')\n"
    )
    failed = atropos("resume", "run", "--steps", "4", "--set", "environment.sevens.use=./broken.py:Sevens")
    assert failed.code != 0
    assert (tmp_path / "run/config.toml").read_text() == before
    ended = atropos("resume", "run", "--steps", "4")
    assert ended.code == 0, ended.err
    assert "steps = 4" in (tmp_path / "run/config.toml").read_text()


def test_other_tasks_under_a_resumed_run_are_reported(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "2").code == 0
    replace(tmp_path / "sevens.py", "range(16) if", "range(12) if")
    ended = atropos("resume", "run", "--steps", "3")
    assert ended.code == 0, ended.err
    assert "environment 'sevens' has 12 training tasks, and had 16 when the checkpoint was saved" in ended.err


def rows(tmp_path: Path, name: str, first: int, count: int = 16) -> None:
    lines = [json.dumps({"prompt": f"say {n}", "answer": n % 10}) + "\n" for n in range(first, first + count)]
    (tmp_path / name).write_text("".join(lines))


@pytest.fixture
def own_rows(tmp_path: Path) -> tuple[str, ...]:
    rows(tmp_path, "train.jsonl", 0)
    rows(tmp_path, "test.jsonl", 100)
    return (*TOY, "--env", "dataset:train.jsonl", "--set", "environment.train.test_tasks=test.jsonl", "--dir", "run")


def test_a_resume_on_other_rows_is_refused_and_says_which_they_are(atropos, own_rows, tmp_path):
    assert atropos(*own_rows, "--steps", "2").code == 0
    rows(tmp_path, "train.jsonl", 500)
    ended = atropos("resume", "run", "--steps", "3")
    assert ended.code == 1
    assert "16 of 16 are others: the first is number 1, with the id '1'" in " ".join(ended.err.split())
    rows(tmp_path, "train.jsonl", 0, 20)  # the first 16 are the same
    ended = atropos("resume", "run", "--steps", "3")
    assert ended.code == 0, ended.err
    assert "has 20 training tasks, and had 16" in " ".join(ended.err.split())
    assert "held-out accuracy" in ended.out
    rows(tmp_path, "train.jsonl", 500, 20)
    ended = atropos("resume", "run", "--steps", "4", "--set", "checkpoint.other_tasks=true")
    assert ended.code == 0, ended.err
    assert "20 of 20 are others" in " ".join(ended.err.split())
    assert "held-out accuracy" in ended.out, "the held-out rows are the same"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((), "the held-out tasks of environment 'train' have changed"),
        (("--set", "evaluation.problems=3"), "evaluation.problems has changed"),
        (("--set", "environment.train.score=exact"), "environment.train.score has changed"),
        (("--set", "sampling.max_tokens=9"), "sampling.max_tokens has changed"),
        (("--set", "curriculum.use=sequential", "--set", "sampling.top_k=7"), ""),
    ],
)
def test_an_evaluation_of_something_else_is_not_compared_with_the_first(change, says, atropos, own_rows, tmp_path):
    assert atropos(*own_rows, "--steps", "2").code == 0
    if not change:
        rows(tmp_path, "test.jsonl", 300)
    ended = atropos("resume", "run", "--steps", "3", *change)
    assert ended.code == 0, ended.err
    assert ("held-out accuracy" in ended.out) == (not says)
    if says:
        assert f"{says} since the evaluation before the first step: it is not compared" in " ".join(ended.err.split())
        assert json.loads((tmp_path / "run/summary.json").read_text())["before"] == {}


def test_a_curriculum_that_cannot_take_up_the_state_says_so(atropos, sevens, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", in_front(plant_ledger(tmp_path)))
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "2").code == 0
    ended = atropos("resume", "run", "--steps", "3", "--set", "curriculum.use=ledger")
    assert ended.code == 1
    assert "curriculum cannot take up its state from the checkpoint: KeyError: 'settled'" in ended.err
    assert "changed: curriculum.use is 'ledger'; the run had 'shuffled'" in ended.out


def test_a_corrupt_checkpoint_is_reported_once_and_where_all_are_corrupt_nothing_starts_again(
    atropos, sevens, tmp_path
):
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "4", "--set", "checkpoint.every=2").code == 0
    corrupt(tmp_path / "run/checkpoints/step-000004/policy/table.npy")
    ended = atropos("resume", "run", "--steps", "5")
    assert ended.code == 0, ended.err
    assert ended.err.count("step-000004 is corrupt") == 1
    for one in (tmp_path / "run/checkpoints").glob("step-*"):
        corrupt(one / "policy/table.npy")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    ended = atropos("resume", "run", "--steps", "6")
    assert ended.code == 1
    assert "is whole" in ended.err
    assert ended.err.count("is corrupt") == 2
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_finished_run_says_in_its_manifest_what_it_was_configured_to_be(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--dir", "run", "--steps", "1").code == 0
    manifest = json.loads((tmp_path / "run/checkpoints/step-000001/manifest.json").read_text())
    assert manifest["state"]["settings"]["trainer.learning_rate"] == 1.0
