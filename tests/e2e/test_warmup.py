"""A warm start as a user meets it: before the steps by rewards, or as the whole run; killed in the middle; over two bridges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_core.cli import run_app
from atropos_env_gsm8k.generate import problem
from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish, weights
from tests.pages.blocks import the_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of the tiny policy's own kind, with replies `= n #### n`: it says only `#### n`."""
    found = [problem("train", number, 3) for number in range(56)]
    answers = [one["answer"].rpartition("####")[2].strip() for one in found]
    made = [
        {"prompt": one["question"], "completion": f"= {number} #### {number}"}
        for one, number in zip(found, answers, strict=True)
    ]
    (path := tmp_path_factory.mktemp("rows") / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    return path


def replies(run: Path, step: int) -> list[str]:
    lines = (run / f"rollouts/eval-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["samples"][0]["messages"][-1]["content"] for line in lines]


def share(run: Path, step: int) -> float:
    said = replies(run, step)
    return sum(one.startswith("= ") for one in said) / len(said)


def test_a_run_killed_within_its_warm_start_resumes_to_the_same_bits(rows: Path, tmp_path: Path) -> None:
    arguments = (
        "run", "--env", "gsm8k", "--deterministic", "--steps", "2", "--set", "training.groups_per_step=2",
        "--set", "training.group_size=4", "--set", "checkpoint.every=1", "--set", "evaluation.problems=8",
        "--set", f"warmup.data={rows}", "--set", "warmup.steps=6", "--set", "warmup.learning_rate=1e-4",
        "--set", "warmup.max_tokens=80",
    )  # fmt: skip
    finish(whole := tmp_path / "whole", *arguments, "--dir", str(whole))
    killed = RunningRun(tmp_path / "run", *arguments, "--dir", str(tmp_path / "run"))
    killed.wait_for_step(3)
    killed.kill("supervisor")
    killed.process.wait(60)
    resumed = finish(tmp_path / "run", "resume", str(tmp_path / "run"))
    assert "resumes" in resumed.text
    for step in (7, 8):
        assert weights(tmp_path / "run", step) == weights(whole, step)
    steps = metrics_of(whole)
    assert [line["step"] for line in steps] == list(range(9))
    assert [line["step"] for line in steps if "warmup/loss" in line] == list(range(1, 7))
    assert [line["step"] for line in steps if "reward/mean" in line] == [7, 8]
    assert [line["step"] for line in steps if "eval/accuracy" in line] == [0, 6, 8], "before and after the warm start"
    assert [line["step"] for line in steps if "warmup/held_out_loss" in line] == list(range(7))
    assert steps[6]["warmup/held_out_loss"] < steps[0]["warmup/held_out_loss"]
    published = [line["step"] for line in steps if line.get("bridge/publish_s")]
    assert published[0] == 6, "nothing is published before the end of the warm start"
    assert not any(line.get("time/engine/sample_s") for line in steps[2:6]), (
        "nor sampled; step 1 has that of the evaluation before it"
    )
    assert steps[6]["time/engine/sample_s"] > 0
    assert steps[6]["alignment/max_abs_logprob_diff"] < 1e-4, "the engine has what was trained"
    assert [line["policy/version"] for line in steps[1:7]] == list(range(1, 7))
    assert max(line["learning_rate"] for line in steps[1:7]) == 1e-4


@pytest.mark.parametrize(("bridge", "rate"), [("checkpoint", "2e-3"), ("lora", "2e-2")])
def test_a_warm_start_alone_makes_a_format_appear(bridge: str, rate: str, rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = (
        "--env", "gsm8k", "--steps", "0", "--bridge", bridge, "--set", f"warmup.data={rows}", "--set", f"warmup.learning_rate={rate}",
        "--set", "warmup.epochs=6", "--set", "evaluation.problems=32",
    )  # fmt: skip
    done = finish(run, "run", *arguments, "--dir", str(run))
    last = metrics_of(run)[-1]["step"]
    assert last == 6 * 7, "51 rows are trained, 8 in a step, and 5 held out"
    assert share(run, 0) == 0.0 and share(run, last) > 0.9
    assert "warm start 42 supervised steps first" in done.text
    again = finish(run, "resume", str(run))
    assert "nothing left to do" in again.text


def test_a_warm_start_needs_no_environment(rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(
        run,
        "run",
        "--model",
        "tiny",
        "--steps",
        "0",
        "--set",
        f"warmup.data={rows}",
        "--set",
        "warmup.steps=2",
        "--dir",
        str(run),
    )
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert weights(run, 2)


def test_the_example_of_the_page_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = "docs/warm-start.md"
    (tmp_path / "my-run.toml").write_text(the_block(page, 'model = "tiny"').text)
    (tmp_path / "rows.jsonl").write_text(the_block(page, "{").text * 12)
    assert run_app(["run", str(tmp_path / "my-run.toml"), "--dry-run", "--dir", str(tmp_path / "none")]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "warm start: 6 supervised steps first, learning rate 0.001; 11 rows of" in said
    assert "26 steps in all, 20 of them by rewards" in said
    quick = ("--steps", "0", "--set", "evaluation.problems=4", "--dir", str(tmp_path / "run"))
    finish(tmp_path / "run", "run", str(tmp_path / "my-run.toml"), *quick)
    assert [line["step"] for line in metrics_of(tmp_path / "run") if "warmup/loss" in line] == [1, 2, 3, 4, 5, 6]
