"""What a user gets wrong, and what an environment does wrong: one clear error or a stated behaviour each."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import metrics_of
from tests.disks import mounted

TOY = ("run", "--model", "toy", "--dir", "run", "--steps", "2", "--set", "evaluation.problems=2")

ENVIRONMENT = """
import asyncio, time
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task

class Mine(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def score(self, task, reply):
SCORE
"""


DOUBLES = """
class Mine(Mine):
    def tasks(self, split):
        from dataclasses import replace
        one, *_ = super().tasks(split)
        return [replace(one, id="twice" if number in (0, 3) else str(number)) for number in range(8)]
"""


def environment(folder: Path, score: str) -> str:
    body = "\n".join(f"        {line}" for line in score.splitlines())
    (folder / "mine.py").write_text(ENVIRONMENT.replace("SCORE", body))
    return "./mine.py:Mine"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--env", "gsm9k"), ["no environment named 'gsm9k'", "atropos plugins"]),
        (("--env", "sevens.py:Seven"), ["no 'Seven' in it", "Did you mean 'Sevens'?"]),
        (("--env", "./missing.py:X"), ["there is no file"]),
        (("--env", "nowhere.at_all:X"), ["no module named 'nowhere'"]),
        (("--env", "./sevens.py", "--bridge", "ipx"), ["no bridge named 'ipx'", "Did you mean 'ipc'?"]),
        (("--env", "./sevens.py", "--set", "trainer.learning_rat=1"),
         ["unknown key 'trainer.learning_rat'", "Did you mean 'learning_rate'?"]),
        (("--env", "./sevens.py", "--set", "training.stepz=1"), ["unknown key 'training.stepz'", "Did you mean 'steps'?"]),
        (("--env", "./sevens.py", "--set", "training.group_size=many"), ["training.group_size", "valid integer", "'many'", "flag"]),
        (("--env", "./sevens.py", "--set", "training.min_group=9"), ["min_group 9 is more than training.group_size 8"]),
        (("--env", "./sevens.py", "--set", "novalue"), ["PATH=VALUE"]),
        (("--env", "./sevens.py", "--set", "sampling.temperature=0"), ["sampling.temperature is 0", "evaluation.temperature"]),
        (("--env", "./sevens.py", "--set", "sampling.temperature=1e308"), ["must be 0 (greedy), or a number from 0.01 to 100"]),
        (("--env", "./sevens.py", "--set", "evaluation.temperature=1e-9"), ["must be 0 (greedy), or a number from 0.01 to 100"]),
        (("--env", "./sevens.py", "--set", "reward.mean.use=environment"), ["reward/mean is one of the run's own metrics"]),
        (("missing.toml",), ["no run file missing.toml"]),
        ((), ["no environment to train on", "--env gsm8k"]),
        (("--env", "./sevens.py", "--bridge", "ipc"), ["bridge 'ipc' does not fit", "in_process", "Use --bridge local."]),
        (("--env", "./sevens.py", "--model", "./nowhere"), ["model '", "there is no directory", "nowhere"]),
        (("--env", "./sevens.py", "--model", ""), ["the model's name is empty"]),
        (("--env", "./sevens.py", "--set", "trainer.beta=0.1"),
         ["unknown key 'trainer.beta'", "It is called 'trainer.kl.coefficient' here."]),
        (("--env", "./sevens.py", "--set", "learning_rate=1"), ["It is called 'trainer.learning_rate' here."]),
        (("--env", "./sevens.py", "--set", "trainer=grpo"), ["trainer is a table, not 'grpo' (from flag)", "[trainer] with use = 'grpo'"]),
        (("--set", "engine.devices=cpu"), ["engine.devices is a list, not 'cpu' (from flag): write [\"cpu\"]."]),
        (("--set", "environment=gsm8k"), ["environment is a table, not 'gsm8k' (from flag)", "write [environment.gsm8k]."]),
        (("--env", "./sevens.py", "--set", "training=5"), ["training", "not 5 (from flag)"]),
        (("--env", "./functions.py"), ["has no class that is one of environments; it has brief.", "atropos new environment NAME"]),
        (("--env", "./sevens.py", "--reward", "./functions.py"), ["say which reward of it, as", "functions.py:brief"]),
    ],
)  # fmt: skip
def test_a_wrong_word_gets_one_clear_error(atropos, sevens, tmp_path, arguments, wanted):
    (tmp_path / "functions.py").write_text("async def brief(task, episodes):\n    return [0.0 for _ in episodes]\n")
    ended = atropos(
        *(TOY if "--model" not in arguments else [one for one in TOY if one not in ("--model", "toy")]), *arguments
    )
    assert ended.code == 2
    assert "Traceback" not in ended.err
    for text in wanted:
        assert text in ended.err
    assert not (tmp_path / "run").exists(), "nothing is made for a run that cannot be"


def test_a_run_file_that_is_not_toml_names_the_line(atropos, tmp_path):
    (tmp_path / "run.toml").write_text("model = \n")
    ended = atropos("run", "run.toml")
    assert ended.code == 2
    assert "not TOML" in ended.err
    assert "line 1" in ended.err
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    assert "name its environment with --env" in atropos("run", "rows.jsonl").err
    (tmp_path / "old run").mkdir()
    (tmp_path / "old run/config.toml").write_text("")
    assert "To continue the run in it: atropos resume 'old run'" in atropos("run", "old run").err


@pytest.mark.parametrize(("encoding", "wanted"), [("utf-8-sig", ""), ("utf-16", "is not text in UTF-8")])
def test_a_run_file_that_windows_wrote_is_read_or_its_encoding_named(atropos, sevens, tmp_path, encoding, wanted):
    (tmp_path / "run.toml").write_text('model = "toy"\n[environment.sevens]\nuse = "./sevens.py"\n', encoding=encoding)
    ended = atropos("run", "run.toml", "--dry-run")
    assert (ended.code, wanted in ended.err) == (2 if wanted else 0, True), ended.err


def test_a_start_that_failed_leaves_its_directory_to_the_next(atropos, sevens, tmp_path):
    (tmp_path / "broken.py").write_text(
        ENVIRONMENT.replace("SCORE", "        return 1.0")
        + "\n    async def open(self):\n        raise ValueError('no data')\n"
    )
    failed = atropos(*TOY, "--env", "./broken.py")
    assert failed.code == 2
    assert "no data" in failed.err
    assert "--dir run can be given again" in failed.out
    assert (tmp_path / "run/logs").is_dir()
    again = atropos(*TOY, "--env", sevens)
    assert again.code == 0, again.err
    assert "sevens" in (tmp_path / "run/config.toml").read_text()
    refused = atropos(*TOY, "--env", sevens)
    assert refused.code == 1
    assert "is not empty" in refused.err


@pytest.mark.parametrize("files", [("config.toml",), ("config.toml", "lock", "notes.txt")])
def test_a_folder_with_anything_of_its_owner_is_no_place_for_a_run(atropos, sevens, tmp_path, files):
    (tmp_path / "run").mkdir()
    for name in files:
        (tmp_path / "run" / name).write_text("mine")
    ended = atropos(*TOY, "--env", sevens)
    assert ended.code == 1
    assert "is not empty" in ended.err
    assert [(tmp_path / "run" / name).read_text() for name in files] == ["mine"] * len(files)


def test_groups_of_one_whose_advantages_are_all_0_are_warned_of(atropos, sevens):
    ended = atropos(*TOY, "--env", sevens, "--set", "training.group_size=1", "--set", "transform.drop_flat.use=none")
    assert ended.code == 0 and "transform.group_advantage compares a reward with the group's" in ended.err


def test_a_score_that_is_no_coroutine_is_named(atropos, tmp_path):
    environment(tmp_path, "return 1.0")
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("async def score", "def score"))
    ended = atropos(*TOY, "--env", "./mine.py:Mine")
    assert ended.code == 1
    assert "Mine.score() gave float: begin it with `async def`, and return the score." in ended.err


PARTS = """
import atropos_core


class Nothing:
    async def __call__(self, groups):
        return None

class Broken(atropos_core.Sink):
    async def step(self, step, metrics, groups):
        raise OSError("the printer is on fire")
"""


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (
            '[transform.nothing]\nuse = "./parts.py:Nothing"\n',
            "transform 'nothing' returned NoneType, not a list of groups.",
        ),
        (
            '[sink.broken]\nuse = "./parts.py:Broken"\n',
            "sink 'broken' failed: OSError: the printer is on fire (parts.py",
        ),
    ],
)
def test_a_transform_or_sink_that_breaks_is_named_without_a_traceback(atropos, sevens, tmp_path, table, wanted):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(table)
    ended = atropos("run", "run.toml", *TOY[1:], "--env", sevens)
    assert ended.code == 2
    assert wanted in ended.err, ended.err
    assert "Traceback" not in ended.err


def test_an_empty_data_set_is_named(atropos, tmp_path):
    (tmp_path / "empty.py").write_text(
        "from atropos_core.interfaces import Environment\n"
        "class Empty(Environment):\n    def tasks(self, split):\n        return []\n"
        "    async def score(self, task, reply):\n        return 0.0\n"
    )
    ended = atropos(*TOY, "--env", "./empty.py:Empty")
    assert ended.code == 1
    assert "environment 'empty' has no training tasks" in ended.err


def test_groups_of_one_are_refused_before_anything_starts_and_the_remedy_trains(atropos, sevens):
    ended = atropos(*TOY, "--env", sevens, "--set", "training.group_size=1")
    assert ended.code == 2 and "ConfigError training.group_size is 1: transform.group_advantage compares" in ended.err
    remedy = "--set transform.group_advantage.baseline=none --set transform.drop_flat.use=none"
    assert remedy in ended.err and "waiting" not in ended.out + ended.err
    ended = atropos(*TOY, "--env", sevens, "--set", "training.group_size=1", *remedy.split())
    assert ended.code == 0 and "nothing was trained" not in ended.err and "group_size" not in ended.err, ended.err


def test_equal_rewards_everywhere_end_the_run_with_a_reason(atropos, tmp_path):
    ended = atropos(*TOY, "--env", environment(tmp_path, "return 1.0"), "--steps", "30")
    assert ended.code == 1
    assert "every rollout of a task gets the same reward" in ended.err
    assert len(metrics_of(tmp_path / "run")) == 11, "ten steps and the evaluation before them"


def test_a_run_that_trained_nothing_says_so_at_its_end(atropos, tmp_path):
    ended = atropos(*TOY, "--env", environment(tmp_path, "return 1.0"), "--steps", "3")
    assert ended.code == 0 and "nothing was trained in 3 steps" in ended.err, ended.err


def test_equal_rewards_leave_the_weights_alone_when_flat_groups_are_kept(atropos, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[transform.drop_flat]\nuse = "none"\n[environment.mine]\nuse = "./mine.py:Mine"\n'
    )
    environment(tmp_path, "return 1.0")
    ended = atropos(
        "run", "run.toml", "--model", "toy", "--dir", "run", "--steps", "3", "--set", "evaluation.problems=2"
    )
    assert ended.code == 0, ended.err
    assert [line["policy/probe_shift_nats"] for line in metrics_of(tmp_path / "run")] == [0.0] * 4


def test_a_nan_reward_is_named_with_its_environment(atropos, tmp_path):
    ended = atropos(*TOY, "--env", environment(tmp_path, "return float('nan')"), "--set", "evaluation.problems=0")
    assert ended.code == 1
    assert "episode.score is nan: must be a number from -1e+09 to 1e+09" in ended.err


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        ("return Score(1.0, metrics={'reward/mean': 5.0})", "a metric is called 'reward/mean', which is a name of the run's own"),
        ("return 10**400", "episode.score is a whole number of 1329 bits: must be a number from -1e+09 to 1e+09"),
        ("return '0.5'", "episode.score is '0.5': must be a number"),
    ],
)  # fmt: skip
def test_a_value_that_must_not_be_trained_is_named_in_the_error_that_ends_a_run_of_such_values_alone(
    atropos, tmp_path, score, wanted
):
    mine = environment(tmp_path, "from atropos_core.interfaces import Score\n" + score)
    ended = atropos(*TOY, "--env", mine, "--set", "evaluation.problems=0")
    assert ended.code == 1
    assert wanted in " ".join(ended.err.split())


def test_two_tasks_of_one_id_are_named_before_a_run_begins(atropos, tmp_path):
    mine = environment(tmp_path, "return 1.0")
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + DOUBLES)
    ended = atropos(*TOY, "--env", mine, "--set", "evaluation.problems=0")
    assert ended.code == 1
    assert "tasks 0 and 3 of one split both have the id 'twice'" in " ".join(ended.err.split())


def test_a_reward_that_gives_nan_is_named(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--reward", "exact", "--reward", "numeric")
    assert ended.code == 0, ended.err  # answers are "7": both rewards can be computed


def test_an_episode_that_raises_is_data_and_the_run_goes_on(atropos, tmp_path):
    score = "if hash(reply['content']) % 4 == 0:\n    raise KeyError('lost')\nreturn reply['content'].count('7') / 8"
    ended = atropos(*TOY, "--env", environment(tmp_path, score), "--set", "evaluation.problems=0", PYTHONHASHSEED="0")
    assert ended.code == 0, ended.err
    last = metrics_of(tmp_path / "run")[-1]
    assert last["rollouts/failed"] > 0
    assert last["rollouts/failed"] + last["rollouts/count"] == 128
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert any(row.get("failed") == "KeyError: 'lost'" for row in rows)
    assert ended.err.count("a rollout of environment 'mine' failed: KeyError: 'lost'") == 1, "said once"


def test_episodes_that_all_raise_end_the_run_from_the_original_error(atropos, tmp_path):
    ended = atropos(*TOY, "--env", environment(tmp_path, "return {}['no such key']"))
    assert ended.code == 1
    assert "KeyError: 'no such key'" in ended.err
    assert "mine.py" in ended.err, "with the line of the user's own code"


@pytest.mark.parametrize(("split", "warned"), [("'train'", True), ("split", False)])
def test_a_run_warns_if_held_out_tasks_are_training_tasks(atropos, tmp_path, split, warned):
    path = environment(tmp_path, "return 1.0")
    file = tmp_path / "mine.py"
    same = f"\n\nclass Same(Mine):\n    def tasks(self, split):\n        return super().tasks({split})\n"
    file.write_text(file.read_text() + same)
    ended = atropos(*TOY, "--env", path.replace("Mine", "Same"), "--steps", "1")
    assert ended.code == 0, ended.err
    assert ("held-out tasks are training tasks as well" in ended.err) is warned


def test_an_episode_that_never_ends_is_cancelled_at_its_deadline(atropos, tmp_path):
    score = (
        "if hash(reply['content']) % 8 == 0:\n    await asyncio.Event().wait()\nreturn reply['content'].count('7') / 8"
    )
    ended = atropos(
        *TOY,
        "--env",
        environment(tmp_path, score),
        "--set",
        "training.rollout_deadline_s=1.0",
        "--set",
        "evaluation.problems=0",
        PYTHONHASHSEED="0",
    )
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert any("rollout() gave no answer within 1 s" in row.get("failed", "") for row in rows)


def test_an_episode_that_blocks_the_event_loop_is_interrupted_where_it_blocks(atropos, tmp_path):
    score = "if task.id == 'train-3':\n    while True:\n        pass\nreturn reply['content'].count('7') / 8"
    ended = atropos(
        *TOY, "--env", environment(tmp_path, score), "--steps", "1", "--set", "evaluation.problems=0",
        "--set", "training.group_size=2", ATROPOS_BLOCKED_AFTER_S="0.5",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert any("mine.py" in row.get("failed", "") and "blocked the event loop" in row["failed"] for row in rows)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as where:
        yield where


def test_a_full_disk_is_named_and_the_checkpoint_before_is_whole(atropos, sevens, small_disk):
    (small_disk / "ballast").write_bytes(b"x" * 200_000)
    ended = atropos(
        "run", "--model", "toy", "--env", sevens, "--dir", str(small_disk / "run"), "--steps", "400",
        "--set", "checkpoint.every=1", "--set", "evaluation.problems=2",
    )  # fmt: skip
    assert ended.code == 1
    assert "the disk is full" in ended.err
    assert "atropos resume" in ended.out + ended.err
    os.remove(small_disk / "ballast")
    done = len(metrics_of(small_disk / "run"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = atropos("resume", str(small_disk / "run"), "--steps", str(done + 3))
    assert resumed.code == 0, resumed.err
    assert [line["step"] for line in metrics_of(small_disk / "run")] == list(range(done + 4))


def test_a_read_only_run_directory_is_named(atropos, sevens, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = atropos(*TOY, "--env", sevens, "--dir", str(small_disk / "run"))
    assert ended.code == 1
    assert "Read-only file system" in ended.err
    assert "--dir" in ended.err


SLOW = """
import asyncio
from atropos_core.builtin.toy import ToyEngine, ToyEngineOptions

class Slow(ToyEngine):
    Options = ToyEngineOptions
    transports = {"in_process"}

    async def open(self):
        await asyncio.sleep(3600)
"""


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("super().tasks(split) if split == 'test' else []", "environment 'mine' has no training tasks"),
        ("super().tasks(split) if split == 'train' else []", "no environment has held-out tasks"),
        (
            "{'train': super().tasks(split)}[split]",
            "environment 'mine': tasks('test') raised KeyError: 'test' (mine.py:",
        ),
        ("None", "environment 'mine': tasks('train') returned None, not a sequence of tasks."),
        ("(one for one in super().tasks(split))", "tasks('train') returned a generator, not a sequence of tasks."),
    ],
)
def test_tasks_that_are_missing_are_found_while_the_model_loads(atropos, tmp_path, tasks, said):
    named = environment(tmp_path, "return 1.0")
    mine = tmp_path / "mine.py"
    mine.write_text(f"{mine.read_text()}\n\nclass Mine(Mine):\n    def tasks(self, split):\n        return {tasks}\n")
    (tmp_path / "slow.py").write_text(SLOW)
    ended = atropos(*TOY, "--env", named, "--engine", "./slow.py:Slow", timeout=60)
    assert ended.code == 1 and said in ended.err, ended.err
