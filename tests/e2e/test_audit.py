"""`atropos audit` of real runs: clean as they were written, and each planted damage named by its place."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atropos_records.audit import ranges
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import TOY
from tests.e2e.runs import finish

RUN = (
    "--model", "toy", "--deterministic", "--steps", "4", "--set", "training.groups_per_step=4", "--set", "checkpoint.every=1",
    "--set", "checkpoint.keep=10", "--set", "transform.drop_flat.use=none", "--set", "evaluation.problems=4",
    "--set", "trainer.learning_rate=20.0",
)  # fmt: skip
STEP = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    (folder / "sevens.py").write_text(TOY)
    finish(folder / "run", "run", *RUN, "--env", f"{folder}/sevens.py:Sevens", "--dir", str(folder / "run"))
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def a_trained_token(run: Path, step: int = STEP) -> tuple[int, int, int]:
    """Its sequence in the step, its position there, and its index in the columns."""
    tokens = RolloutRecords(run).step(step).tokens
    assert tokens is not None
    index = int(np.flatnonzero(tokens.column("trained"))[2])
    sequence = int(np.searchsorted(tokens.offsets, index, "right")) - 1
    return sequence, index - int(tokens.offsets[sequence]), index


def change(run: Path, column: str, index: int, value: object) -> None:
    path = run / f"rollouts/step-{STEP:06d}.safetensors"
    columns = load_file(path)
    columns[column][index] = value
    save_file(columns, path, {"format": "1"})


def audited(atropos: Callable[..., object], run: Path, *arguments: str) -> tuple[int, str, list[dict[str, object]]]:
    (run / "found.jsonl").unlink(missing_ok=True)
    ended = atropos("audit", str(run), "--out", str(run / "found.jsonl"), *arguments)
    found = run / "found.jsonl"
    return (
        ended.code,
        ended.out + ended.err,
        [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else [],
    )


def test_a_run_is_as_it_was_recorded(atropos, run):
    code, text, faults = audited(atropos, run)
    assert (code, faults) == (0, []), text
    sampled = sum(int(RolloutRecords(run).step(step).tokens.column("sampled").sum()) for step in (1, 2, 3, 4))
    compared = int(text.split("logprobs")[1].split()[0].replace(",", ""))
    assert compared >= sampled, "each of the engine's, and the trainer's beside it"
    assert "versions 0, 1, 2, 3" in text
    assert "not compared" not in text


def test_a_changed_logprob_is_named_with_both_values(atropos, run):
    sequence, position, index = a_trained_token(run)
    before = float(RolloutRecords(run).step(STEP).tokens.column("logprobs")[index])
    change(run, "logprobs", index, before - 0.01)
    code, _, faults = audited(atropos, run)
    assert code == 1
    (fault,) = faults
    assert (fault["step"], fault["sequence"], fault["position"]) == (STEP, sequence, position)
    assert fault["recorded"] == pytest.approx(before - 0.01)
    assert fault["recomputed"] == pytest.approx(before, abs=1e-5)
    assert fault["task"] == RolloutRecords(run).step(STEP).episodes[sequence].task
    assert audited(atropos, run, "--tolerance", "0.1")[0] == 0, "within what is tolerated"
    assert audited(atropos, run, "--step", "1")[0] == 0, "another step"


def test_a_changed_id_is_named_by_text_and_by_logprob(atropos, run):
    sequence, position, index = a_trained_token(run)
    change(run, "ids", index, RolloutRecords(run).step(STEP).tokens.column("ids")[index] + 1)
    code, _, faults = audited(atropos, run)
    assert code == 1
    mine = [one for one in faults if one["sequence"] == sequence]
    assert mine == faults
    assert any("decode to" in one["says"] for one in mine)
    assert any(one["position"] in (position, position + 1) and one["recomputed"] is not None for one in mine)


def test_a_changed_id_of_the_prompt_is_named(atropos, run):
    tokens = RolloutRecords(run).step(STEP).tokens
    change(run, "ids", int(tokens.offsets[2]) + 1, 9)
    code, _, faults = audited(atropos, run)
    assert code == 1
    assert [(one["sequence"], one["position"]) for one in faults if "the messages before" in one["says"]] == [(2, 1)]


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("trained", False, "has an advantage, and is not trained"),
        ("sampled", False, "it is trained, and was not sampled"),
        ("versions", 9, "its policy version did not exist: the newest was 2"),
        ("logprobs", 0.5, "its logprob is above 0"),
        ("logprobs", np.nan, "it was sampled, and has no logprob"),
        ("advantages", np.nan, "it is trained, and has no advantage"),
    ],
)
def test_a_value_that_contradicts_the_others_is_named(atropos, run, column, value, says):
    sequence, position, index = a_trained_token(run)
    change(run, column, index, value)
    code, text, faults = audited(atropos, run)
    assert code == 1
    assert (sequence, position) in [(one["sequence"], one["position"]) for one in faults if says in one["says"]], text


def weights_of(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:06d}/policy/table.npy"


def test_a_checkpoint_that_is_not_what_was_saved_is_named(atropos, run):
    shutil.copy(weights_of(run, 4), weights_of(run, 2))
    code, text, faults = audited(atropos, run)
    assert code == 1
    assert any(one["step"] == 2 and "is corrupt" in one["says"] for one in faults)
    assert "of version 2, whose weights no checkpoint holds" in text


def test_weights_of_another_version_are_named_though_the_manifest_agrees(atropos, run):
    shutil.rmtree(run / "checkpoints/step-000002/policy")
    shutil.copytree(run / "checkpoints/step-000004/policy", run / "checkpoints/step-000002/policy")
    path = run / "checkpoints/step-000002/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = json.loads((run / "checkpoints/step-000004/manifest.json").read_text())["files"]
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    code, _, faults = audited(atropos, run)
    assert code == 1
    assert {one["version"] for one in faults} == {2}
    assert len(faults) > 10


def test_a_file_that_was_cut_off_is_named_and_the_others_are_looked_at(atropos, run):
    path = run / f"rollouts/step-{STEP:06d}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    code, text, faults = audited(atropos, run)
    assert code == 1
    (fault,) = faults
    assert fault["step"] == STEP and f"{path.name} is damaged" in fault["says"]
    assert "compared" in text


def lines_of(run: Path) -> tuple[Path, list[dict[str, object]]]:
    path = run / f"rollouts/step-{STEP:06d}.jsonl"
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_that_is_gone_is_named(atropos, run):
    path, lines = lines_of(run)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    code, _, faults = audited(atropos, run)
    assert code == 1
    assert any("has tokens of line" in one["says"] for one in faults), faults


def test_a_reward_that_was_changed_is_named(atropos, run):
    path, lines = lines_of(run)
    lines[1]["reward"] += 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text, _ = audited(atropos, run)
    assert code == 1
    assert "line 2: its reward is" in text
    assert "the metric reward/mean" in text


def test_a_text_that_was_changed_is_named(atropos, run):
    path, lines = lines_of(run)
    lines[1]["messages"][-1]["content"] = "another text"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, faults = audited(atropos, run)
    assert code == 1
    (fault,) = faults
    assert fault["sequence"] == 1 and "another text" in fault["says"]


@pytest.mark.parametrize(
    ("numbers", "said"), [([7], "7"), ([1, 2], "1-2"), ([1, 2, 3, 5, 7, 8], "1-3, 5, 7-8"), ([0, 2, 4], "0, 2, 4")]
)
def test_versions_that_follow_each_other_are_said_as_one(numbers, said):
    assert ranges(numbers) == said


def test_a_version_whose_weights_are_gone_is_not_checked_and_named(atropos, run):
    shutil.rmtree(run / "checkpoints/step-000001")
    code, text, faults = audited(atropos, run)
    assert (code, faults) == (0, [])
    assert "logprobs of version 1, whose weights no checkpoint holds" in text


def test_what_cannot_be_compared_is_counted(atropos, tmp_path):
    (tmp_path / "sevens.py").write_text(TOY)
    arguments = ("--env", f"{tmp_path}/sevens.py:Sevens", "--set", "sampling.top_p=0.9", "--dir", str(tmp_path / "run"))
    finish(tmp_path / "run", "run", *RUN, *arguments)
    code, text, faults = audited(atropos, tmp_path / "run")
    assert (code, faults) == (0, []), text
    assert "not compared: 128 sequences were sampled with top_p, top_k or min_p" in text
    assert "none could be compared" in text, "the trainer's own are of the kept tokens too"


def test_a_run_without_tokens_cannot_be_audited(atropos, run):
    for path in (run / "rollouts").glob("*.safetensors"):
        path.unlink()
    ended = atropos("audit", str(run))
    assert ended.code == 1
    assert "cannot be audited: the run recorded no tokens" in ended.err


def test_a_setting_of_the_trainer_is_for_the_audit_and_another_is_refused(atropos, run):
    ended = atropos("audit", str(run), "--set", "trainer.nonsense=1")
    assert ended.code == 2 and "trainer.nonsense" in ended.err
    ended = atropos("audit", str(run), "--set", "sampling.max_tokens=3")
    assert ended.code == 2 and "has no effect on `atropos audit`" in ended.err


OVERLAPPED = (
    "--env", "gsm8k", "--steps", "6", "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set",
    "evaluation.problems=0", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=10", "--set", "training.max_staleness=2",
    "--set", "trainer.minibatches=2", "--set", "transform.zscore.use=zscore", "--set", "transform.zscore.warm_up=4", "--set",
    "transform.drop_flat.use=none",
)  # fmt: skip


def test_a_run_of_the_tiny_policy_is_audited_by_its_own_trainer(atropos, tmp_path):
    """Sampling and training overlap: one reply has tokens of several versions, each of which is scored with its own weights."""
    run = tmp_path / "tiny"
    finish(run, "run", *OVERLAPPED, "--dir", str(run))
    episodes = [one for step in range(1, 7) for one in RolloutRecords(run).step(step).episodes]
    assert any(len(one.versions) > 1 for one in episodes), "or this shows less than it could"
    assert any(one.scored_reward != one.reward for one in episodes)
    code, text, faults = audited(atropos, run)
    assert (code, faults) == (0, []), text
    assert "versions 0, 1, 2, 3, 4, 5\n" in text and "float32" in text
    assert "not compared" not in text
    last = 6
    sequence, position, index = a_trained_token(run, last)
    path = run / f"rollouts/step-{last:06d}.safetensors"
    columns = load_file(path)
    columns["logprobs"][index] -= 0.001
    save_file(columns, path, {"format": "1"})
    code, text, faults = audited(atropos, run, "--step", str(last))
    assert code == 1
    version = int(columns["versions"][index])
    assert [(one["sequence"], one["position"], one["version"]) for one in faults] == [(sequence, position, version)], (
        text
    )
