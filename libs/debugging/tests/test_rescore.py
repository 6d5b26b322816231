"""Recorded rollouts scored again: by the same rewards, by others, and by an environment that has changed."""

from __future__ import annotations

import asyncio
import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.advantages import group_advantages
from atropos_core.cli import run_app
from atropos_core.errors import DataError
from atropos_core.interfaces import SettledGroup
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import ScoredGroup
from atropos_debugging.recorded_groups import recorded_groups
from atropos_records.rollout_records import RolloutRecords
from atropos_records.saved_results import MOST_BYTES, SavedResult, write_result
from atropos_testing.samples import make_group
from tests.conftest import TOY
from tests.e2e.runs import finish
from tests.recorded_runs import group_of, says, settled, user

REWARDS = """
import numpy as np

async def negated(task, episodes):
    return np.array([-episode.score for episode in episodes])

async def tokens(task, episodes):
    return np.array([sum(int(one.sampled.sum()) for one in episode.rollouts) for episode in episodes])

async def from_data(task, episodes):
    return np.array([task.data["number"]] * len(episodes))

async def fails_for_1(task, episodes):
    if task.id == "task-1":
        raise ValueError("not this one")
    return np.ones(len(episodes))

async def of_tasks(task, episodes):
    return np.array([float(len(task.messages[0]["content"]) + len(task.answer))] * len(episodes))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rescored")
    (folder / "sevens.py").write_text(TOY)
    (folder / "rewards.py").write_text(REWARDS)
    finish(folder / "run", "run", "--model", "toy", "--steps", "4", "--env", f"{folder}/sevens.py:Sevens", "--dir",
           str(folder / "run"), "--set", "evaluation.problems=0", "--set", "trainer.learning_rate=20.0", "--seed", "3",
           "--set", "reward.length.use=length", "--set", "reward.length.free_tokens=2", "--set", "reward.length.weight=0.01",
           )  # fmt: skip
    return folder / "run"


def rescored(capsys: pytest.CaptureFixture[str], run: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run_app(["rescore", str(run), "--json", *flags]) == code, capsys.readouterr().err
    printed = capsys.readouterr()
    if code:
        return {"error": " ".join(printed.err.split())}
    found: dict[str, Any] = json.loads(printed.out)
    return found


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def a_run(folder: Path, *steps: list[SettledGroup], **options: object) -> Path:
    return asyncio.run(settled(folder, *steps, **options))


def with_advantages(group: ScoredGroup) -> SettledGroup:
    return SettledGroup(group.with_advantages(group_advantages(group.rewards)), "trained")


def test_the_same_rewards_change_nothing_and_each_step_trains_the_same(whole, capsys, tmp_path):
    found = rescored(capsys, whole, "--out", str(tmp_path / "out.jsonl"))
    assert found["rollouts"] == 4 * 16 * 8
    assert found["failed_groups"] == found["signs_changed"] == found["reward"]["changed"] == 0
    assert found["reward"]["alpha"] == pytest.approx(1.0, abs=1e-9)
    assert set(found["parts"]) == {"environment", "length"}
    assert [one["step"] for one in found["steps"]] == [1, 2, 3, 4]
    for step in found["steps"]:
        assert step["trained_before"] == step["trained_now"] > 0
        assert step["direction"] == pytest.approx(1.0, abs=1e-9)
    rows = written(tmp_path / "out.jsonl")
    episodes = [one for step in (1, 2, 3, 4) for one in RolloutRecords(whole).step(step).episodes]
    assert [(one["step"], one["line"]) for one in rows] == [(one.step, one.line) for one in episodes]
    assert all(one["advantage"] == one["advantage_before"] for one in rows), "bit for bit"
    assert any(one["trained"] for one in rows)
    assert all(one["trained"] == one["trained_before"] for one in rows)


def test_a_saved_result_has_what_is_written_and_changes_no_record(whole, capsys, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.jsonl"
    shutil.copytree(whole, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    reward = ("--reward", f"{whole.parent}/rewards.py:negated")
    found = rescored(capsys, run, *reward, "--save", "negated", "--out", str(out))
    path = run / "rescored/negated.npz"
    assert found["saved"] == str(path)
    saved = SavedResult(path)
    assert list(saved.about["rewards"]) == ["negated"]
    rows = written(out)
    for step in (1, 2, 3, 4):
        of_step = [row for row in rows if row["step"] == step]
        kept = saved.rescored(step)
        assert kept.lines.tolist() == [row["line"] for row in of_step]
        assert kept.rewards.tolist() == [row["reward"] for row in of_step]
        assert kept.advantages.tolist() == [row["advantage"] for row in of_step]
        turned = {row["draw"] for row in of_step if row["advantage"] * row["advantage_before"] < 0}
        assert kept.turned.tolist() == [row["draw"] in turned for row in of_step]
    assert found["signs_changed"] == sum(
        len({draw for draw, is_turned in zip(kept.draws, kept.turned, strict=True) if is_turned})
        for kept in map(saved.rescored, (1, 2, 3, 4))
    )
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in path.parent.iterdir()) == ["negated.npz"]
    assert "there already" in rescored(capsys, run, *reward, "--save", "negated", code=1)["error"]
    for name in ("../records", ".hidden", "a/b", "", "x" * 65):
        assert "cannot be the name of a file" in rescored(capsys, run, *reward, "--save", name, code=2)["error"]


def test_a_result_that_is_too_large_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(DataError, match="MiB, and --save keeps at most 256"):
        write_result(tmp_path / "rescored/large.npz", {}, {"step": np.zeros((MOST_BYTES >> 3) + 1)})
    assert not list(tmp_path.iterdir())


def test_a_negated_reward_turns_every_advantage_round(whole, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    found = rescored(capsys, whole, "--reward", f"{whole.parent}/rewards.py:negated", "--step", "2", "--out", str(out))
    (step,) = found["steps"]
    assert (step["step"], step["groups"]) == (2, 16)
    rows = written(out)
    of_environment = {row["line"]: row["parts_before"]["environment"] for row in rows}
    assert all(row["reward"] == -of_environment[row["line"]] for row in rows)
    by_draw: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_draw.setdefault(row["draw"], []).append(row)
    turned = sum(
        any(np.sign(row["advantage"]) * np.sign(row["advantage_before"]) < 0 for row in group)
        for group in by_draw.values()
    )
    assert step["signs_changed"] == found["signs_changed"] == turned > 0
    assert step["direction"] < 0
    for group in by_draw.values():
        expected = group_advantages(np.array([row["reward"] for row in group], np.float32))
        assert [row["advantage"] for row in group] == expected.tolist()
    kept = found["changed_groups"][0]
    assert kept["rewards_now"] == [row["reward"] for row in by_draw[kept["draw"]]]


def test_a_weight_is_changed_by_a_flag_or_by_a_run_file(whole, capsys, tmp_path):
    by_flag = rescored(capsys, whole, "--set", "reward.length.weight=5.0", "--set", "reward.environment.weight=0.0")
    file = tmp_path / "new.toml"
    file.write_text(
        '[model_is_not_read]\n[reward.environment]\nuse = "none"\n[reward.length]\nfree_tokens = 2\nweight = 5.0\n'
    )
    assert "model_is_not_read" in rescored(capsys, whole, "--config", str(file), code=2)["error"]
    file.write_text(file.read_text().partition("\n")[2])
    by_file = rescored(capsys, whole, "--config", str(file))
    assert by_flag["steps"] == by_file["steps"]
    assert by_flag["reward"] == by_file["reward"]
    assert by_file["rewards"] == {"length": {"use": "length", "weight": 5.0}}
    assert by_file["reward"]["changed"] > 0
    assert by_file["parts"]["length"]["changed"] == 0, "the reward itself is the same"
    by_name = rescored(capsys, whole, "--reward", "length", "--set", "reward.length.weight=5.0")
    assert by_name["steps"] == by_flag["steps"], "a reward of the run keeps its options"


def test_a_transform_is_changed_too(whole, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    rescored(capsys, whole, "--set", "transform.group_advantage.baseline=none", "--out", str(out))
    rows = written(out)
    assert all(row["advantage"] == np.float32(row["reward"]) for row in rows if row["trained"])


def test_an_environment_that_has_changed_scores_again(whole, capsys, tmp_path):
    (tmp_path / "sevens.py").write_text(TOY.replace('text.count("7") / 8', 'float(text.startswith("7"))'))
    file = tmp_path / "new.toml"
    name = next(iter(RolloutRecords(whole).config["environment"]))
    file.write_text(f'[environment.{name}]\nuse = "./sevens.py:Sevens"\n')
    without = rescored(capsys, whole, "--config", str(file))
    assert without["reward"]["changed"] == 0, "scores are read from the records"
    found = rescored(
        capsys, whole, "--config", str(file), "--environments", "--reward", "environment", "--out", str(tmp_path / "o.jsonl")
    )  # fmt: skip
    assert found["parts"]["environment"]["changed"] > 0
    correct = {(one.step, one.line): one.correct for step in (1, 2, 3, 4) for one in RolloutRecords(whole).step(step).episodes}  # fmt: skip
    assert all(row["reward"] == float(correct[row["step"], row["line"]]) for row in written(tmp_path / "o.jsonl"))


def test_an_environment_with_other_tasks_is_refused(whole, capsys, tmp_path):
    (tmp_path / "sevens.py").write_text(TOY.replace('f"{split}-{n}"', 'f"other-{n}"'))
    name = next(iter(RolloutRecords(whole).config["environment"]))
    file = tmp_path / "new.toml"
    file.write_text(f'[environment.{name}]\nuse = "./sevens.py:Sevens"\n')
    error = rescored(capsys, whole, "--config", str(file), "--environments", code=1)["error"]
    assert "was number" in error and "has task 'other-" in error
    assert "leave out --environments" in error


def test_what_was_dropped_may_be_trained_now(tmp_path, capsys):
    """A flat group becomes one with advantages, and the other way round."""
    apart, alike = make_group(0, [0, 1, 2]), make_group(1, [1, 1, 1], failed=1)
    run = a_run(
        tmp_path / "run", [with_advantages(apart), SettledGroup(alike, "flat", "transform.drop_flat")]
    )  # fmt: skip
    (tmp_path / "rewards.py").write_text(REWARDS)
    found = rescored(capsys, run, "--reward", f"{tmp_path}/rewards.py:tokens")
    assert (found["steps"][0]["trained_before"], found["steps"][0]["trained_now"]) == (1, 2)
    found = rescored(capsys, run, "--reward", f"{tmp_path}/rewards.py:of_tasks")
    assert found["steps"][0]["trained_now"] == 0
    assert found["signs_changed"] == 0, "nothing is trained, so that no sign is"


def test_a_group_that_was_too_old_is_scored_and_would_not_be_trained(tmp_path, capsys):
    old = SettledGroup(make_group(1, [0, 1]), "stale", "training.max_staleness")
    run = a_run(tmp_path / "run", [with_advantages(make_group(0, [0, 1])), old])
    found = rescored(capsys, run)
    assert (found["groups"], found["steps"][0]["groups"], found["steps"][0]["trained_now"]) == (2, 1, 1)


def test_a_reward_that_fails_loses_only_its_group(tmp_path, capsys):
    run = a_run(tmp_path / "run", [with_advantages(make_group(n, [0, 1])) for n in range(3)])
    (tmp_path / "rewards.py").write_text(REWARDS)
    found = rescored(capsys, run, "--reward", f"{tmp_path}/rewards.py:fails_for_1", "--reward", "environment")
    assert found["failed_groups"] == 1
    assert "not this one" in next(iter(found["causes"]))
    assert found["steps"][0]["trained_now"] == 2
    assert found["reward"]["count"] == 4


@pytest.mark.parametrize(
    ("reward", "options", "says"),
    [("from_data", {}, "the task's data are not recorded"), ("tokens", {"tokens": False}, "tokens are not recorded")],
)
def test_a_reward_that_reads_unrecorded_data_gets_an_error(tmp_path, capsys, reward, options, says):
    run = a_run(tmp_path / "run", [with_advantages(make_group(0, [0, 1]))], **options)
    (tmp_path / "rewards.py").write_text(REWARDS)
    error = rescored(capsys, run, "--reward", f"{tmp_path}/rewards.py:{reward}", code=1)["error"]
    assert says in error, error
    assert rescored(capsys, run, "--reward", "exact")["failed_groups"] == 0, "others need neither"


def test_the_task_of_a_reward_has_its_messages_and_answer(tmp_path, capsys):
    made = group_of(0, [0.0], [user("1 + 2?"), says("4"), user("sure?"), says("3")])
    run = a_run(tmp_path / "run", [SettledGroup(made, "dropped", "transform.x")])
    (tmp_path / "rewards.py").write_text(REWARDS)
    found = rescored(
        capsys, run, "--reward", f"{tmp_path}/rewards.py:of_tasks", "--out", str(out := tmp_path / "o.jsonl")
    )
    assert [row["reward"] for row in written(out)] == [len("1 + 2?") + len("42")]
    assert found["groups"] == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--set", "trainer.learning_rate=1.0"), "trainer.learning_rate has no effect on `atropos rescore`"),
        (("--reward", "exakt"), "exakt"),
        (("--step", "9"), "no rollouts of step 9"),
        (("--set", "reward.environment.use=none"), "the configuration has no reward"),
        (("--reward", "exact", "--reward", "x.py:exact"), "the same short name"),
        (("--out", "OUT.txt"), "the end of the name must say the format"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, capsys, flags, says):
    run = a_run(tmp_path / "run", [with_advantages(make_group(0, [0, 1]))])
    capsys.readouterr()
    assert run_app(["rescore", str(run), *(flag.replace("OUT", str(tmp_path / "o")) for flag in flags)]) != 0
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("*o.*")), "nothing is left behind"


def test_a_run_file_without_such_sections_is_refused(tmp_path, capsys):
    run = a_run(tmp_path / "run", [with_advantages(make_group(0, [0, 1]))])
    (tmp_path / "new.toml").write_text("[training]\nsteps = 3\n")
    error = rescored(capsys, run, "--config", str(tmp_path / "new.toml"), code=2)["error"]
    assert "has none of the sections that score a rollout" in error and "[reward.NAME]" in error


def test_a_run_without_rollouts_is_refused(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    assert "has no recorded rollouts" in rescored(capsys, run, code=1)["error"]


def test_a_reward_in_its_own_process_scores_and_is_said_to_see_no_data(tmp_path, capsys):
    run = a_run(tmp_path / "run", [with_advantages(make_group(0, [0, 1]))])
    found = rescored(capsys, run, "--reward", "length", "--set", "reward.length.runs_in=process")
    assert found["failed_groups"] == 0
    assert any("task.data are empty" in note for note in found["notes"])


def test_memory_does_not_grow_with_the_steps(tmp_path, capsys):
    def groups(first: int) -> list[SettledGroup]:
        return [with_advantages(make_group(first + n, [one / 15 for one in range(16)])) for n in range(20)]

    peaks = []
    for steps in (2, 10):
        run = a_run(tmp_path / f"run-{steps}", *(groups(20 * step) for step in range(steps)))
        rescored(capsys, run)  # without what the first call imports
        tracemalloc.start()
        found = rescored(capsys, run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found["rollouts"] == steps * 20 * 16
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_a_table_is_printed_for_people(whole, capsys, tmp_path):
    assert run_app(["rescore", str(whole), "--reward", f"{whole.parent}/rewards.py:negated"]) == 0
    text = capsys.readouterr().out
    assert "rank correlation" in text and "signs changed" in text
    assert "512 rollouts in 64 groups; an advantage changes its sign in" in text


def test_turn_rewards_of_the_environment_are_kept_and_those_of_a_mix_are_not(tmp_path, capsys):
    made = make_group(0, [0, 1])
    first = made.episodes[0]
    [rollout] = first.rollouts
    turned = replace(rollout, turns=turn_rewards([int(rollout.sampled.argmax()) + 1], [0.5]))
    made = replace(made, episodes=(replace(first, rollouts=(turned,)), made.episodes[1]))
    run = a_run(tmp_path / "run", [with_advantages(made)])
    (tmp_path / "rewards.py").write_text(
        "import numpy as np\nasync def placed(task, episodes):\n"
        "    return np.array([sum(t.values.sum() for r in e.rollouts if (t := r.turns) is not None) for e in episodes])\n"
    )
    flags = ("--reward", f"{tmp_path}/rewards.py:placed", "--out", str(tmp_path / "o.jsonl"))
    assert rescored(capsys, run, *flags)["notes"] == []
    assert [row["reward"] for row in written(tmp_path / "o.jsonl")] == [0.5, 0.0]
    (run / "config.toml").write_text((run / "config.toml").read_text() + "[reward.environment]\nweight = 0.5\n")
    flags = (*flags[:-1], str(tmp_path / "p.jsonl"))
    assert any(
        "turn rewards are recorded as the sum of all rewards" in note for note in rescored(capsys, run, *flags)["notes"]
    )
    assert [row["reward"] for row in written(tmp_path / "p.jsonl")] == [0.0, 0.0]


def test_recorded_groups_have_the_order_of_their_turns(tmp_path):
    made = make_group(0, [0, 1])
    [rollout] = made.episodes[0].rollouts
    several = tuple(replace(rollout, tokens=rollout.tokens + at, turn_order=np.array([1 - at])) for at in (0, 1))
    made = replace(made, episodes=(replace(made.episodes[0], rollouts=several), made.episodes[1]))
    step = RolloutRecords(a_run(tmp_path / "run", [with_advantages(made)])).step(1)
    [again] = recorded_groups(step)
    orders = [
        [None if of.turn_order is None else of.turn_order.tolist() for of in one.rollouts]
        for one in again.group.episodes
    ]
    assert orders == [[[1], [0]], [None]]
