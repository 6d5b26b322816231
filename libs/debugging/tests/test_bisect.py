"""Two runs with a planted difference: the step, the stage and the rollout are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atropos_core.cli import run_app
from atropos_debugging.tensor_files import shared_tensors
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import TOY
from tests.e2e.runs import finish

STEPS = 4
RUN = (
    "--model", "toy", "--deterministic", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "checkpoint.every=1", "--set", "checkpoint.keep=10", "--set", "evaluation.problems=0", "--seed", "3",
    "--set", "transform.drop_flat.use=none", "--set", "date=2026-01-31",
)  # fmt: skip
RATE = ("--set", "trainer.learning_rate=20.0")


def run_in(folder: Path, *flags: str, toy: str = TOY, steps: int = STEPS, name: str = "run") -> Path:
    """A run of the toy policy. The environment's file has the same name in every folder, so that no option differs by it."""
    folder.mkdir(exist_ok=True)
    (folder / "sevens.py").write_text(toy)
    finish(folder / name, "run", *RUN, *(flags or RATE), "--steps", str(steps), "--env", f"{folder}/sevens.py:Sevens", "--dir",
           str(folder / name))  # fmt: skip
    return folder / name


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("good"))


def bisected(capsys: pytest.CaptureFixture[str], a: Path, b: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    code = run_app(["bisect", str(a), str(b), "--json", *flags])
    printed = capsys.readouterr()
    found: dict[str, Any] = json.loads(printed.out)
    assert code == (0 if found["alike"] else 1), printed.err
    return found


def at(found: dict[str, Any]) -> tuple[int, str]:
    return found["first"]["step"], found["first"]["stage"]


def changed_options(found: dict[str, Any]) -> set[str]:
    return {path for path in found["configuration"] if not path.endswith(".use")}


def test_a_run_and_its_copy_are_alike(good, tmp_path, capsys):
    found = bisected(capsys, good, Path(shutil.copytree(good, tmp_path / "copy")))
    assert found["alike"] and found["first"] is None
    assert found["steps"] == [1, 2, 3, 4]
    assert set(found["stages"]) >= {
        "draws",
        "tasks",
        "prompts",
        "policy",
        "samples",
        "masks",
        "scores",
        "advantages",
        "weights",
    }
    assert found["configuration"] == {}


def test_the_same_run_again_is_alike(good, tmp_path, capsys):
    found = bisected(capsys, good, run_in(tmp_path / "again"))
    assert found["alike"], found["first"]
    assert changed_options(found) == set()


# -- planted differences: what a user may have changed without noticing it


def test_a_changed_seed_draws_other_tasks(good, tmp_path, capsys):
    found = bisected(capsys, good, run_in(tmp_path / "b", *RATE, "--seed", "4"))
    assert at(found) == (1, "draws")
    assert found["configuration"]["seed"] == [3, 4]


def test_a_changed_row_is_named_with_its_task(good, tmp_path, capsys):
    row = RolloutRecords(good).step(2).episodes[0]  # drawn for the first time in step 2, of 16 tasks in four steps
    toy = TOY.replace('f"say 7 to {n}"', f'f"say 8 to {{n}}" if n == {row.task_index} else f"say 7 to {{n}}"')
    found = bisected(capsys, good, run_in(tmp_path / "b", toy=toy))
    assert at(found) == (2, "tasks")
    assert found["first"]["task"] == row.task
    assert "opening messages" in found["first"]["says"]


def test_a_changed_answer_is_named_too(good, tmp_path, capsys):
    row = RolloutRecords(good).step(3).episodes[5]
    toy = TOY.replace('answer="7"', f'answer="8" if n == {row.task_index} else "7"')
    found = bisected(capsys, good, run_in(tmp_path / "b", toy=toy))
    assert at(found) == (3, "tasks")
    assert (found["first"]["task"], found["first"]["a"], found["first"]["b"]) == (row.task, "7", "8")


def other_model(folder: Path, change: Callable[[Path], None]) -> Path:
    from atropos_core.builtin.plugin import TOY_MODEL

    shutil.copytree(TOY_MODEL, folder)
    (folder / "config.json").write_text('{"model_type": "toy"}')
    change(folder)
    return folder


def test_a_changed_chat_template_makes_other_prompts(good, tmp_path, capsys):
    def change(model: Path) -> None:
        path = model / "chat_template.jinja"
        path.write_text("7" + path.read_text())

    model = other_model(tmp_path / "model", change)
    found = bisected(capsys, good, run_in(tmp_path / "b", *RATE, "--model", str(model), "--engine", "toy", "--trainer", "toy",
                                          "--bridge", "local"))  # fmt: skip
    assert at(found) == (1, "prompts")
    assert found["first"]["position"] == 0
    assert found["stages"]["tasks"] is None


def test_another_tokenizer_makes_other_prompts_of_the_same_text(good, tmp_path, capsys):
    def change(model: Path) -> None:
        path = model / "tokenizer.json"
        values = json.loads(path.read_text())
        vocabulary = values["model"]["vocab"]
        vocabulary["s"], vocabulary["q"] = vocabulary["q"], vocabulary["s"]  # "say" has other ids
        path.write_text(json.dumps(values))

    model = other_model(tmp_path / "model", change)
    found = bisected(capsys, good, run_in(tmp_path / "b", *RATE, "--model", str(model), "--engine", "toy", "--trainer", "toy",
                                          "--bridge", "local"))  # fmt: skip
    assert at(found) == (1, "prompts")
    assert found["stages"]["tasks"] is None


def test_a_changed_reward_is_named_with_its_first_rollout(good, tmp_path, capsys):
    toy = TOY.replace('text.count("7") / 8', 'text.count("7") / 8 + (task.id == "train-5")')
    found = bisected(capsys, good, run_in(tmp_path / "b", toy=toy))
    steps = {
        one.step for step in range(1, 5) for one in RolloutRecords(good).step(step).episodes if one.task == "train-5"
    }
    assert at(found) == (min(steps), "scores")
    assert found["first"]["task"] == "train-5"
    assert (found["first"]["member"], found["first"]["says"]) == (0, "its score")
    assert found["first"]["b"] == pytest.approx(found["first"]["a"] + 1)
    assert found["stages"]["samples"] is None


def test_a_changed_weight_of_a_reward_is_named_by_the_reward_and_its_option(good, tmp_path, capsys):
    found = bisected(capsys, good, run_in(tmp_path / "b", *RATE, "--set", "reward.environment.weight=0.5"))
    assert at(found) == (1, "scores")
    assert found["first"]["says"] == "its reward"
    assert found["configuration"]["reward.environment.weight"] == [1.0, 0.5]


def test_a_changed_option_of_the_trainer_shows_in_the_weights(good, tmp_path, capsys):
    found = bisected(capsys, good, run_in(tmp_path / "b", "--set", "trainer.learning_rate=20.5"))
    assert at(found) == (1, "weights")
    assert changed_options(found) == {"trainer.learning_rate"}
    assert all(found["stages"][stage] is None for stage in ("draws", "samples", "scores", "advantages", "gradient"))


def test_a_changed_transform_shows_in_the_advantages(good, tmp_path, capsys):
    found = bisected(capsys, good, run_in(tmp_path / "b", *RATE, "--set", "transform.group_advantage.baseline=others"))
    assert at(found) == (1, "advantages")
    assert found["first"]["draw"] is not None and found["first"]["member"] is not None
    assert found["configuration"]["transform.group_advantage.baseline"] == ["group", "others"]


def resumed(folder: Path, *flags: str) -> Path:
    """The same run in two parts: two steps, then a resume."""
    run = run_in(folder, steps=2)
    finish(run, "resume", str(run), "--steps", str(STEPS), *flags)
    return run


def test_a_run_that_was_resumed_is_alike(good, tmp_path, capsys):
    found = bisected(capsys, good, resumed(tmp_path / "b"))
    assert found["alike"], found["first"]


def test_a_run_that_was_resumed_with_another_option_differs_from_there_on(good, tmp_path, capsys):
    found = bisected(capsys, good, resumed(tmp_path / "b", "--set", "trainer.learning_rate=20.5"))
    assert at(found) == (3, "weights")
    assert changed_options(found) == {"trainer.learning_rate"}


# -- planted in the records


@pytest.mark.parametrize(
    ("column", "change", "stage"),
    [
        ("trained", lambda value: ~value, "masks"),
        ("logprobs", lambda value: value - np.float32(0.01), "policy"),
        ("logprobs", lambda value: np.float32(np.nan), "policy"),
        ("advantages", lambda value: value + np.float32(0.5), "advantages"),
        ("ids", lambda value: value + 1, "samples"),
        ("trainer_logprobs", lambda value: value - np.float32(0.01), "trainer"),
    ],
)
def test_one_changed_value_is_named_by_its_token(good, tmp_path, capsys, column, change, stage):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    step = RolloutRecords(run).step(3)
    index = int(np.flatnonzero(step.tokens.column("trained"))[-1])
    columns = load_file(step.tokens_path)
    columns[column][index] = change(columns[column][index])
    if column == "ids":  # of another token it is another logprob, and no sign of other weights
        columns["logprobs"][index] -= np.float32(0.5)
    save_file(columns, step.tokens_path, {"format": "1"})
    found = bisected(capsys, good, run)
    assert at(found) == (3, stage)
    sequence = int(np.searchsorted(step.tokens.offsets, index, "right")) - 1
    line = step.episodes[int(step.tokens.column("episodes")[sequence])]
    first = found["first"]
    assert (first["draw"], first["member"], first["line"]) == (line.draw, line.member, line.line)
    assert first["position"] == index - int(step.tokens.offsets[sequence])
    if column != "ids":  # one that differs ends the comparison of what follows
        assert [one for one, difference in found["stages"].items() if difference] == [stage]


def test_a_tolerance_lets_small_differences_pass(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    path = RolloutRecords(run).step(2).tokens_path
    columns = load_file(path)
    columns["logprobs"] = columns["logprobs"] - np.float32(1e-3)
    save_file(columns, path, {"format": "1"})
    assert at(bisected(capsys, good, run)) == (2, "policy")
    assert bisected(capsys, good, run, "--tolerance", "0.01")["alike"]


def test_weights_that_no_metric_shows_are_found_in_the_checkpoints(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    path = run / "checkpoints/step-000002/policy/table.npy"
    table = np.load(path)
    table[3, 4] += 0.25
    np.save(path, table)
    manifest = run / "checkpoints/step-000002/manifest.json"
    values = json.loads(manifest.read_text())
    values["files"]["policy/table.npy"]["sha256"] = "another"
    manifest.write_text(json.dumps(values))
    found = bisected(capsys, good, run)
    assert at(found) == (2, "weights")
    assert "table[3, 4], and 0 more" in found["first"]["says"]
    assert found["first"]["b"] == pytest.approx(found["first"]["a"] + 0.25)


def test_weights_in_other_files_are_a_difference(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    manifest = run / "checkpoints/step-000002/manifest.json"
    values = json.loads(manifest.read_text())
    values["files"]["policy/weights.npy"] = values["files"].pop("policy/table.npy")
    manifest.write_text(json.dumps(values))
    found = bisected(capsys, good, run)
    assert at(found) == (2, "weights")
    assert (found["first"]["a"], found["first"]["b"]) == ("table.npy", "weights.npy")


def test_stages_that_nothing_reached_are_not_called_the_same(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    path = run / "rollouts/step-000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "draw": row["draw"] + 1000}) + "\n" for row in rows))
    found = bisected(capsys, good, run)
    assert at(found) == (1, "draws")
    assert not {"tasks", "prompts", "samples", "scores", "advantages"} & set(found["stages"])


def test_steps_without_rollouts_are_compared_by_their_metrics(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    for path in (run / "rollouts").glob("step-*"):
        path.unlink()
    metrics = run / "metrics.jsonl"
    assert bisected(capsys, good, run)["alike"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[2]["reward/mean"] += 1.0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bisected(capsys, good, run)
    assert at(found) == (rows[2]["step"], "scores")
    assert "reward/mean" in found["first"]["says"]
    assert any("only A has rollouts of 4 steps" in note for note in found["notes"])


def test_without_tokens_texts_are_compared(good, tmp_path, capsys):
    run = Path(shutil.copytree(good, tmp_path / "b"))
    for path in (run / "rollouts").glob("step-*.safetensors"):
        path.unlink()
    path = run / "rollouts/step-000002.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["messages"][-1]["content"] = "another text"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bisected(capsys, good, run)
    assert at(found) == (2, "samples")
    assert (found["first"]["line"], found["first"]["b"]["content"]) == (3, "another text")
    assert any("only texts are compared" in note for note in found["notes"])


def test_runs_without_a_common_step_are_refused(good, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    shutil.copy(good / "config.toml", tmp_path / "b/config.toml")
    assert run_app(["bisect", str(good), str(tmp_path / "b")]) == 2, "1 says that two runs differ"
    assert "have no step in common" in " ".join(capsys.readouterr().err.split())


def test_what_is_printed_names_the_place_and_what_to_look_at(good, tmp_path, capsys):
    run = run_in(tmp_path / "b", "--set", "trainer.learning_rate=20.5")
    assert run_app(["bisect", str(good), str(run)]) == 1
    text = capsys.readouterr().out
    assert "trainer.learning_rate" in text and "20.5" in text
    assert "The runs first differ in step 1, at the weights." in text
    assert "the optimizer: the gradient was the same" in text


def test_tensors_of_16_bits_are_read_as_numbers(tmp_path):
    import torch
    from safetensors.torch import save_file as save_tensors

    values = torch.tensor([1.5, -2.25, 3e-5])
    for name, change in (("a", 0.0), ("b", 1.0)):
        save_tensors({"w": (values + change).bfloat16(), "v": values.half()}, tmp_path / name)
    found = {name: (one, other) for name, one, other in shared_tensors(tmp_path / "a", tmp_path / "b")}
    assert found["w"][0].tolist() == values.bfloat16().float().tolist()
    assert found["w"][1].tolist() == (values + 1.0).bfloat16().float().tolist()
    assert found["v"][0].tolist() == values.half().tolist()
