"""Runs that earn nothing, each for one reason: the run names that reason and no other, and so do `atropos doctor` and the viewer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_doctor.diagnose import diagnose
from atropos_viewer.viewed_run import ViewedRun
from tests.conftest import in_front, plant

NEVER = """
from atropos_core import Environment, Task


class Never(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"{split} {n}"},)) for n in range(64)]

    async def score(self, task, reply):
        return 0.0


class Longer(Never):
    async def score(self, task, reply):
        return len(str(reply.get("content") or "")) / 100
"""
TURNS = """
from atropos_core.builtin.config import ToyTrainerOptions
from atropos_core.builtin.toy import ToyTrainer
from atropos_core.plugins.model_provider import TrainerProvider
from atropos_core.plugins.spec import hookimpl


class Turns(ToyTrainer):
    '''A model that writes the headers of other turns, and never ends.'''

    def __init__(self, options, context):
        super().__init__(options, context)
        table = self.weights["table"]
        ids = self._tokenizer.encode("User:\\n")
        table[:, ids[0]] = 30.0
        for one, after in zip(ids, [*ids[1:], ids[0]]):
            table[one, after] = 60.0


@hookimpl
def atropos_trainers():
    return [TrainerProvider("turns", "writes other turns", ToyTrainerOptions, lambda options, context: Turns(options, context),
                            transports=lambda options: frozenset({"in_process"}))]
"""
# The toy's likeliest token ends a reply, so that a greedy evaluation is empty.
TOY = (
    "--model",
    "toy",
    "--set",
    "evaluation.temperature=1",
    "--set",
    "training.groups_per_step=4",
    "--set",
    "training.group_size=8",
)
ROWS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(64)]


def findings(run: Path) -> list[dict[str, Any]]:
    """Of the viewer, those that are ill."""
    return [one for one in ViewedRun(run).metrics_since(-1, -1)["findings"] if one["state"] == "ill"]


def named(run: Path, ended: Any, check: str, since: int, *texts: str, off: bool = False) -> None:
    """The run, its records, the doctor and the viewer name this check and no other."""
    rows = [json.loads(line) for line in (run / "health.jsonl").read_text().splitlines()]
    ill = [row for row in rows if row["state"] == "ill" and row["check"] not in ("slow_disk", "throughput")]
    assert [(row["check"], row["since"]) for row in ill] == [(check, since)], (ill, ended.err[-2000:])
    when = f"since step {since}" if since else "in the evaluation before step 1"
    assert f"health.{check}: {when}, {ill[0]['says']}." in " ".join(ended.err.split()), ended.err
    for text in (*texts, 'One reply ends: "'):
        assert text in f"{ill[0]['says']} {ill[0]['do']}", ill
    assert ".md" not in ill[0]["do"], "who installed wheels has no docs/"
    [found] = [one for one in diagnose(run) if one.subject == check]
    assert found.ok is False and ill[0]["says"] in found.detail and found.remedy == ill[0]["do"]
    [shown] = [one for one in findings(run) if one["check"] == check]
    assert (shown["since"], shown["says"], shown["do"]) == (since, ill[0]["says"], ill[0]["do"])


@pytest.fixture
def never(tmp_path: Path) -> Path:
    (tmp_path / "never.py").write_text(NEVER)
    return tmp_path


def test_everything_is_cut_off(atropos: Callable[..., Any], tmp_path: Path) -> None:
    ended = atropos("run", "--env", "gsm8k", "--steps", "1", "--dir", "run", "--set", "sampling.max_tokens=4",
                    "--set", "evaluation.problems=16", "--set", "training.groups_per_step=2")  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        tmp_path / "run",
        ended,
        "cut_off",
        0,
        "of the rollouts are cut off at sampling.max_tokens = 4",
        "raise sampling.max_tokens to 32",
    )


def test_a_learning_rate_destroys_the_policy_in_one_update(atropos: Callable[..., Any], tmp_path: Path) -> None:
    ended = atropos("run", "--env", "gsm8k", "--steps", "3", "--dir", "run", "--set", "trainer.learning_rate=1", "--set",
                    "trainer.warmup_steps=0", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=4")  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        tmp_path / "run", ended, "broken_policy", 2, "the learning rate is 1", "trainer.learning_rate to 0.01 or less"
    )


def test_all_rewards_are_0_without_another_cause(atropos: Callable[..., Any], never: Path) -> None:
    ended = atropos("run", "--env", "./never.py:Never", *TOY, "--steps", "2", "--dir", "run", "--set", "health.cut_off.action=off",
                    "--set", "evaluation.problems=32")  # fmt: skip
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (never / "run/health.jsonl").read_text().splitlines()]
    assert [(row["check"], row["since"]) for row in rows if row["state"] == "ill"] == [("reward_collapse", 0)]
    assert "all 32 rollouts got the same reward, 0. One reply ends: " in rows[0]["says"]
    assert "in the evaluation before step 1, all 32 rollouts got the same reward, 0" in " ".join(ended.err.split())


def test_replies_never_reach_the_answer_format(atropos: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    ended = atropos("run", "--env", "dataset", "--set", "environment.dataset.tasks=rows.jsonl", "--steps", "1", "--dir", "run",
                    "--set", "environment.dataset.pattern=<answer>(.*)</answer>", "--set", "environment.dataset.held_out=0.6",
                    "--set", "evaluation.problems=32", "--set", "training.groups_per_step=2")  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        tmp_path / "run", ended, "answer_format", 0, "100% of the replies have no answer in the format",
        "environment.dataset.pattern finds, '<answer>(.*)</answer>'", "environment.dataset.instruction",
    )  # fmt: skip


def test_replies_continue_with_another_turn(atropos: Callable[..., Any], never: Path) -> None:
    plant(never, "turns", TURNS)
    ended = atropos("run", "--env", "./never.py:Never", *TOY, "--trainer", "turns", "--steps", "1", "--dir", "run",
                    "--set", "sampling.max_tokens=32", "--set", "evaluation.problems=16", PYTHONPATH=in_front(never))  # fmt: skip
    assert ended.code == 0, ended.err
    named(never / "run", ended, "chat_template", 0, "100% of the replies do not end", 'add "\\nUser:" to sampling.stop')


def test_the_reward_only_grows_with_length(atropos: Callable[..., Any], never: Path) -> None:
    ended = atropos("run", "--env", "./never.py:Longer", "--steps", "6", "--dir", "run", "--set", "trainer.learning_rate=1e-3", "--set",
                    "trainer.warmup_steps=0", "--set", "sampling.max_tokens=64", "--set", "evaluation.problems=0", "--set",
                    "training.groups_per_step=4")  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        never / "run", ended, "length_reward", 2, "within a group, reward follows length", "reward.length.free_tokens"
    )


def test_the_doctor_names_the_cause_of_a_run_whose_checks_were_off(atropos: Callable[..., Any], never: Path) -> None:
    ended = atropos("run", "--env", "./never.py:Never", *TOY, "--steps", "1", "--dir", "run", "--set", "health.action=off",
                    "--set", "sampling.max_tokens=4", "--set", "evaluation.problems=16")  # fmt: skip
    assert ended.code == 0 and "health." not in ended.err, ended.err
    [found] = [one for one in diagnose(never / "run") if one.ok is False]
    assert found.subject == "cut_off" and "in the evaluation before step 1" in found.detail
    assert 'One reply ends: "' in found.detail and "raise sampling.max_tokens to" in (found.remedy or "")


def test_an_evaluation_outside_a_run_names_the_same_cause(atropos: Callable[..., Any], tmp_path: Path) -> None:
    evaluation = ("eval", "--env", "gsm8k", "--model", "tiny", "--problems", "32", "--set", "engine.threads=1")
    cut = atropos(*evaluation, "--set", "evaluation.max_tokens=4", "--json")
    assert cut.code == 0 and json.loads(cut.out)["metrics"]["eval/problems"] == 32, cut.err
    said = " ".join(cut.err.split())
    assert "health.cut_off: " in said and "are cut off at evaluation.max_tokens = 4" in said, said
    assert 'One reply ends: "' in said and "raise evaluation.max_tokens to 16" in said and "before step" not in said, (
        said
    )
    whole = atropos(*evaluation)
    assert whole.code == 0 and "health." not in whole.err, whole.err


def test_a_run_can_pause_at_a_finding_before_its_first_step_and_be_resumed(
    atropos: Callable[..., Any], never: Path
) -> None:
    ended = atropos("run", "--env", "./never.py:Never", *TOY, "--steps", "1", "--dir", "run", "--set", "health.cut_off.action=pause",
                    "--set", "sampling.max_tokens=4", "--set", "evaluation.problems=16")  # fmt: skip
    assert ended.code == 3 and "RunPaused health.cut_off: in the evaluation before step 1, " in ended.err, ended.err
    assert not any(json.loads(line)["step"] for line in (never / "run/metrics.jsonl").read_text().splitlines())
    resumed = atropos("resume", "run")
    assert resumed.code == 0 and "health.cut_off: in the evaluation" not in resumed.err.split("at the end")[0], (
        resumed.err
    )
