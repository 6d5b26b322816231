"""A recorded step is trained again: the same bits with nothing changed, and what a change does."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atropos_core.cli import run_app
from atropos_core.plugins.manager import load_plugins
from atropos_records.rollout_records import RolloutRecords
from atropos_records.saved_results import SavedResult, checksum
from tests.conftest import TOY
from tests.e2e.runs import finish

RUN = (
    "--deterministic", "--steps", "3", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "checkpoint.every=1", "--set", "checkpoint.keep=10", "--set", "evaluation.problems=0", "--seed", "3",
)  # fmt: skip
TINY = (  # every step has something to learn: the length of a reply counts
    "--env", "gsm8k", "--set", "sampling.max_tokens=24", "--set", "reward.length.use=length", "--set", "reward.length.free_tokens=1",
    "--set", "reward.length.limit_tokens=24",
)  # fmt: skip
REWARDS = """
import numpy as np

async def negated(task, episodes):
    return np.array([-episode.score for episode in episodes])

async def fails(task, episodes):
    raise ValueError("no such file")

async def ends(task, episodes):
    return np.array([float(sum(episode.rollouts[0].tokens[-2:]) % 7) for episode in episodes])

async def talks(task, episodes):
    print("scoring")
    return np.array([-episode.score for episode in episodes])

async def nothing(task, episodes):
    return np.zeros(len(episodes))
"""


def replayed(capsys: pytest.CaptureFixture[str], run: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run_app(["replay", str(run), "--json", *flags]) == code, capsys.readouterr().err
    printed = capsys.readouterr()
    if code:
        return {"error": " ".join(printed.err.split())}
    found: dict[str, Any] = json.loads(printed.out)
    return found


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "sevens.py").write_text(TOY)
    (folder / "rewards.py").write_text(REWARDS)
    finish(folder / "run", "run", *RUN, "--model", "toy", "--env", f"{folder}/sevens.py:Sevens", "--dir", str(folder / "run"),
           "--set", "trainer.learning_rate=20.0")  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("full") / "run"
    finish(run, "run", *RUN, *TINY, "--dir", str(run))
    return run


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("adapter") / "run"
    finish(run, "run", *RUN, *TINY, "--dir", str(run), "--bridge", "lora", "--set", "trainer.lora.dropout=0.1")
    return run


@pytest.mark.parametrize("step", ["1", "2", "3"])
def test_a_step_of_the_toy_policy_gives_the_same_weights(toy, capsys, step):
    found = replayed(capsys, toy, "--step", step)
    assert found["same_weights"] is True
    assert found["same_metrics"] is True
    assert found["metrics"]["grad_norm"] == found["recorded_metrics"]["grad_norm"] > 0
    assert found["update_norm"] > 0
    assert found["changed_metrics"] is None


@pytest.mark.parametrize("step", ["1", "3"])
def test_a_step_of_a_whole_model_gives_the_same_weights(full, capsys, step):
    found = replayed(capsys, full, "--step", step)
    assert found["same_weights"] is True, found["notes"]
    assert found["same_metrics"] is True
    assert found["update_norm"] > 0


@pytest.mark.parametrize("step", ["1", "3"])
def test_a_step_of_an_adapter_with_dropout_gives_the_same_weights(adapter, capsys, step):
    found = replayed(capsys, adapter, "--step", step)
    assert found["same_weights"] is True, found["notes"]
    assert found["same_metrics"] is True
    assert found["update_norm"] > 0


def test_another_loss_and_another_rate_change_only_what_they_should(full, capsys):
    slower = replayed(capsys, full, "--step", "3", "--set", "trainer.learning_rate=1e-6")
    assert slower["same_weights"] is True, "the run's own update is still compared"
    assert slower["changed_metrics"]["grad_norm"] == slower["metrics"]["grad_norm"]
    assert 0 < slower["changed_update_norm"] < slower["update_norm"]
    assert slower["update_cosine"] > 0.99
    other = replayed(capsys, full, "--step", "3", "--loss", "dr_grpo", "--set", "trainer.loss_length=24")
    assert other["changed_metrics"]["grad_norm"] != other["metrics"]["grad_norm"]
    assert [one["advantage_now"] for one in other["rollouts"]] == [one["advantage"] for one in other["rollouts"]]


def plain_gradient(run: Path, found: dict[str, Any], now: str) -> np.ndarray:
    """The gradient of step 2 in plain torch and float64: of -(1/T) sum of A times the logprob of each trained token, which GRPO's
    clipped surrogate (Shao et al. 2024, equation 3) is at the policy that sampled. T: all trained tokens."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = run / "checkpoints/step-000001/policy"
    if (policy / "adapter_config.json").exists():
        base = load_plugins().resolve_model(RolloutRecords(run).config["model"]).directory
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), policy, is_trainable=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(policy)
    model = model.double().eval()
    step = RolloutRecords(run).step(2)
    advantages = {(one["draw"], one["member"]): one[now] for one in found["rollouts"]}
    trained = {draw for (draw, _), advantage in advantages.items() if advantage}
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in step.episodes:
        if one.draw not in trained:
            continue
        for sequence in step.sequences(one):
            ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
            logits = model(ids).logits[0, :-1] / (sequence.temperature or 1.0)
            logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            counted = torch.from_numpy(sequence.sampled[1:])
            total = total - advantages[one.draw, one.member] * logprobs[counted].sum()
            tokens += int(counted.sum())
    (total / tokens).backward()
    return np.concatenate(
        [
            one.grad.numpy().ravel()
            for _, one in sorted(model.named_parameters())
            if one.requires_grad and one.grad is not None
        ]
    )


@pytest.mark.parametrize("flags", [(), ("--bridge", "lora")], ids=["full", "lora"])
def test_gradients_are_those_of_plain_torch_in_float64(flags, capsys, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "rewards.py").write_text(REWARDS)
    finish(run, "run", *RUN, *TINY, "--dir", str(run), "--steps", "2", *flags)
    found = replayed(capsys, run, "--step", "2", "--reward", f"{tmp_path}/rewards.py:ends")
    assert found["same_weights"] is True
    before, after = (plain_gradient(run, found, name) for name in ("advantage", "advantage_now"))
    assert found["gradient_norm"] == pytest.approx(np.linalg.norm(before), rel=2e-4)
    assert found["gradient_norm"] == pytest.approx(found["metrics"]["grad_norm"], rel=1e-6)
    assert found["changed_gradient_norm"] == pytest.approx(np.linalg.norm(after), rel=2e-4)
    cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
    assert abs(cosine) < 0.99
    assert found["gradient_cosine"] == pytest.approx(cosine, abs=2e-4)


def test_a_loss_that_divides_by_another_length_has_a_gradient_in_the_same_direction(full, capsys):
    found = replayed(capsys, full, "--step", "3", "--loss", "dr_grpo", "--set", "trainer.loss_length=24")
    assert found["gradient_cosine"] == pytest.approx(1.0, abs=1e-6)
    trained = [one for one in found["rollouts"] if one["advantage"]]
    groups = {one["draw"] for one in trained}
    sequences = sum(one["draw"] in groups for one in found["rollouts"])
    ratio = found["metrics"]["tokens"] / (24 * sequences)
    assert found["changed_gradient_norm"] / found["gradient_norm"] == pytest.approx(ratio, rel=1e-5)
    assert found["update_cosine"] < 1 - 1e-4, "the optimizer's is not"


def test_another_seed_is_another_dropout(adapter, capsys):
    found = replayed(capsys, adapter, "--step", "1", "--seed", "9")
    assert found["same_weights"] is True
    assert found["changed_metrics"] is not None
    assert found["update_cosine"] < 1 - 1e-9


@pytest.mark.parametrize("run", ["full", "adapter"])
def test_tasks_are_sampled_again_with_the_policy_that_the_step_began_with(run, request, capsys):
    found = replayed(capsys, request.getfixturevalue(run), "--step", "3", "--resample")
    now = found["changed_metrics"]
    assert found["same_weights"] is True, "the recorded batch is trained too"
    assert now["tokens"] != found["metrics"]["tokens"]
    assert now["alignment/fresh_tokens"] == now["tokens"]
    assert now["alignment/max_abs_logprob_diff"] < 1e-4, "engine and trainer have the same policy"
    assert -1 < found["gradient_cosine"] < 0.999
    assert {one["reward_now"] for one in found["rollouts"]} == {None}, "they are other rollouts"


def test_new_samples_depend_on_the_seed_only_and_larger_groups_agree_more(full, capsys):
    """Two samples of the same gradient: with 16 times the rollouts its direction is less a matter of luck."""

    def again(*flags: str) -> dict[str, Any]:
        return replayed(capsys, full, "--step", "2", "--resample", *flags)

    first, other = again(), again("--seed", "8")
    assert again()["changed_metrics"]["grad_norm"] == first["changed_metrics"]["grad_norm"]
    assert other["changed_metrics"]["grad_norm"] != first["changed_metrics"]["grad_norm"]
    many = again("--set", "training.group_size=64")
    assert many["gradient_cosine"] > max(first["gradient_cosine"], other["gradient_cosine"])


def test_what_cannot_be_sampled_again_is_named(toy, full, tmp_path, capsys):
    error = replayed(capsys, toy, "--step", "2", "--resample", code=2)["error"]
    assert "trainer 'toy' saves its policy in a form that no engine opens" in error and "Leave --resample out" in error
    error = replayed(capsys, full, "--step", "2", "--set", "sampling.temperature=0.5", code=2)["error"]
    assert "sampling.temperature has no effect on `atropos replay`" in error
    run = Path(shutil.copytree(full, tmp_path / "run"))
    path = RolloutRecords(run).step(2).path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "task": f"{line['task']}-before"}) + "\n" for line in lines))
    error = replayed(capsys, run, "--step", "2", "--resample", code=1)["error"]
    assert "the environment's tasks have changed since the run" in error


def test_recorded_values_are_those_of_the_replayed_step(full, capsys):
    """The trainer's logprobs before the step are in the records of the run too."""
    found = replayed(capsys, full, "--step", "2")
    step = RolloutRecords(full).step(2)
    compared = 0
    for one in found["tokens"]:
        line = next(e for e in step.episodes if (e.draw, e.member) == (one["draw"], one["member"]))
        tokens = step.sequences(line)[one["sequence"]]
        assert tokens.ids[one["position"]] == one["token"]
        if math.isfinite(recorded := float(tokens.trainer_logprobs[one["position"]])):
            assert one["before"] == pytest.approx(recorded, abs=1e-4)
            compared += 1
    assert compared
    moved = [abs(one["recorded"] - one["before"]) for one in found["tokens"]]
    assert moved == sorted(moved, reverse=True)


def test_saved_logprobs_are_those_of_the_tokens_that_moved(toy, tmp_path, capsys):
    run = Path(shutil.copytree(toy, tmp_path / "run"))
    found = replayed(capsys, run, "--step", "2", "--reward", f"{toy.parent}/rewards.py:negated", "--save", "negated")
    saved = SavedResult(Path(found["saved"]))
    step = RolloutRecords(run).step(2)
    assert step.tokens is not None and step.tokens.column("ids") is not None
    assert saved.replayed(3) is None
    kept = saved.replayed(2)
    assert kept is not None and kept.changed is not None and kept.ids == checksum(step.tokens.column("ids"))
    assert len(found["tokens"]) == 20
    for one in found["tokens"]:
        line = next(e for e in step.episodes if (e.draw, e.member) == (one["draw"], one["member"]))
        at = int(step.tokens.offsets[line.sequences[one["sequence"]]]) + one["position"]
        values = [float(side[at]) for side in (kept.before, kept.after, kept.changed)]
        assert values == [one["before"], one["recorded"], one["changed"]]
    first = step.tokens.offsets[:-1]
    assert np.isnan(kept.before[first]).all(), "nothing comes before the first token"
    unchanged = replayed(capsys, run, "--step", "2", "--save", "as-it-was")
    as_it_was = SavedResult(Path(unchanged["saved"])).replayed(2)
    assert as_it_was is not None and as_it_was.changed is None
    assert np.array_equal(as_it_was.after, kept.after, equal_nan=True)
    assert "there already" in replayed(capsys, run, "--step", "2", "--save", "negated", code=1)["error"]


def test_a_negated_reward_turns_advantages_and_the_update_round(toy, capsys):
    found = replayed(capsys, toy, "--step", "2", "--reward", f"{toy.parent}/rewards.py:negated")
    assert found["same_weights"] is True
    trained = [one for one in found["rollouts"] if one["advantage"]]
    assert trained
    for one in trained:
        assert one["advantage_now"] == pytest.approx(-one["advantage"], rel=1e-6)
        assert one["reward_now"] == -one["reward"]
    assert found["update_cosine"] == pytest.approx(-1.0, abs=1e-9)
    assert found["changed_update_norm"] == pytest.approx(found["update_norm"], rel=1e-6)


def test_a_reward_that_fails_everywhere_is_the_error_and_one_that_prints_does_not_spoil_the_document(toy, capsys):
    error = replayed(capsys, toy, "--step", "2", "--reward", f"{toy.parent}/rewards.py:fails", code=1)["error"]
    assert "no group of the step could be scored" in error and "no such file" in error
    assert replayed(capsys, toy, "--step", "2", "--reward", f"{toy.parent}/rewards.py:talks")["same_weights"] is True


def test_another_baseline_changes_advantages_by_its_factor(toy, capsys):
    found = replayed(
        capsys, toy, "--step", "3", "--set", "transform.group_advantage.baseline=group", "--set",
        "transform.group_advantage.divide_by_std=false",
    )  # fmt: skip
    by_draw: dict[int, list[dict[str, Any]]] = {}
    for one in found["rollouts"]:
        by_draw.setdefault(one["draw"], []).append(one)
    for group in by_draw.values():
        rewards = np.array([one["reward"] for one in group])
        if rewards.std() > 0:
            assert [one["advantage_now"] for one in group] == pytest.approx(
                (rewards - rewards.mean()).tolist(), abs=1e-6
            )


def test_groups_that_were_dropped_are_trained_with_a_change(toy, capsys):
    found = replayed(capsys, toy, "--step", "2", "--set", "transform.group_advantage.baseline=none", "--set",
                     "transform.drop_flat.use=none")  # fmt: skip
    assert {one["advantage_now"] == one["reward"] for one in found["rollouts"]} == {True}


def test_a_missing_checkpoint_is_an_error_with_the_steps_that_can_be_replayed(toy, tmp_path, capsys):
    run = Path(shutil.copytree(toy, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/step-000001")
    error = replayed(capsys, run, "--step", "2", code=1)["error"]
    assert "the checkpoint of step 1 is missing" in error
    assert "Steps that can be: 1, 3." in error and "checkpoint.every = 1" in error
    shutil.rmtree(run / "checkpoints/step-000003")
    found = replayed(capsys, run, "--step", "3")
    assert found["same_weights"] is None and found["same_metrics"] is True
    assert any("no checkpoint of step 3" in note for note in found["notes"])


def test_changed_records_are_noticed(toy, tmp_path, capsys):
    run = Path(shutil.copytree(toy, tmp_path / "run"))
    path = RolloutRecords(run).step(2).tokens_path
    columns = load_file(path)
    index = int(np.flatnonzero(columns["trained"])[3])
    columns["ids"][index] += 1
    save_file(columns, path, {"format": "1"})
    found = replayed(capsys, run, "--step", "2")
    assert found["same_weights"] is False


def test_what_cannot_be_replayed_is_named(toy, tmp_path, capsys):
    run = Path(shutil.copytree(toy, tmp_path / "run"))
    assert "no rollouts of step 9" in replayed(capsys, run, "--step", "9", code=1)["error"]
    error = replayed(capsys, run, "--step", "2", "--set", "training.steps=4", code=2)["error"]
    assert "training.steps has no effect on `atropos replay`" in error
    error = replayed(capsys, run, "--step", "2", "--seed", "1", "--set", "seed=2", code=2)["error"]
    assert "seed is given twice" in error
    error = replayed(capsys, run, "--step", "2", "--reward", f"{toy.parent}/rewards.py:nothing", code=1)["error"]
    assert "the step would train nothing" in error
    path = RolloutRecords(run).step(2).tokens_path
    columns = load_file(path)
    save_file({**columns, "teacher_logprobs": columns["logprobs"]}, path, {"format": "1"})
    assert "a teacher annotated it" in replayed(capsys, run, "--step", "2", code=1)["error"]
    path.unlink()
    assert "cannot be replayed: its file of tokens was removed" in replayed(capsys, run, "--step", "2", code=1)["error"]


def test_tables_are_printed_for_people(toy, capsys):
    assert run_app(["replay", str(toy), "--step", "2", "--reward", f"{toy.parent}/rewards.py:negated"]) == 0
    text = capsys.readouterr().out
    assert "the same, bit for bit" in text
    assert "cosine of the two updates: -1" in text
    assert "logprob before" in text
