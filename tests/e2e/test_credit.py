"""Turn rewards in a whole run: the transform's advantages are what the trainer gets, token for token."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish

TALK = """
from atropos_core import Conversation, Environment, Score, Task


class Talk(Environment):
    '''A reply earns a point for each 7. A policy that says none loses some, and is asked once more.'''

    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},), answer="7") for n in range(8)]

    async def rollout(self, task, policy, *, seed):
        talk = Conversation(policy, seed=seed)
        earned = [float((await talk.reply(*task.messages))["content"].count("7"))]
        if not earned[0]:
            earned[0] = -0.75
            reply = await talk.reply({"role": "user", "content": "again"})
            earned.append(float(reply["content"].count("7")) - 0.5)
        return talk.episode(Score(sum(earned) + 0.25, turns=earned, correct=earned[0] > 0))
"""
RUN = """
model = "toy"
[training]
steps = 2
groups_per_step = 3
group_size = 4
[sampling]
max_tokens = 6
[evaluation]
problems = 0
[environment.talk]
use = "./talk.py:Talk"
[transform.turn_returns]
[transform.group_advantage]
use = "none"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_turn_is_trained_with_what_was_earned_from_it_on_against_the_others(folder):
    assert run_app(["run", "run.toml", "--dir", "run"]) == 0
    assert all(1 <= line["transform/turn_returns/turns"] <= 2 for line in metrics_of(folder / "run") if line["step"])
    records = RolloutRecords(folder / "run")
    second_turns = differ = 0
    for step in map(records.step, records.steps()):
        groups = defaultdict(list)
        for episode in step.episodes:
            [tokens] = step.sequences(episode)
            runs = np.split(
                np.flatnonzero(tokens.sampled), np.flatnonzero(np.diff(np.flatnonzero(tokens.sampled)) > 1) + 1
            )
            said = [message["content"].count("7") for message in episode.messages if message["role"] == "assistant"]
            assert len(runs) == len(said)
            second_turns += len(said) - 1
            earned = [said[0] + 0.25] if len(said) == 1 else [-0.75, said[1] - 0.5 + 0.25]
            returns = np.cumsum(earned[::-1])[::-1]
            assert episode.reward == pytest.approx(returns[0])
            groups[episode.draw].append((episode, tokens.advantages, runs, returns))
        for members in groups.values():
            if members[0][0].outcome != "trained":
                continue
            for at, (_, advantages, runs, returns) in enumerate(members):
                others = [other for number, (*_, other) in enumerate(members) if number != at]
                for t, run in enumerate(runs):
                    there = [other[t] for other in others if len(other) > t] or [other[-1] for other in others]
                    np.testing.assert_allclose(advantages[run], returns[t] - np.mean(there), atol=1e-6)
                assert np.isfinite(advantages).sum() == sum(map(len, runs)), "only sampled tokens have one"
                differ += len({advantages[run[0]] for run in runs}) > 1
    assert second_turns and differ


def test_a_second_transform_of_advantages_is_refused_with_the_lines_that_help(folder, capsys):
    (folder / "run.toml").write_text(RUN.replace('[transform.group_advantage]\nuse = "none"\n', ""))
    assert run_app(["run", "run.toml", "--dir", "run"]) != 0
    error = " ".join(capsys.readouterr().err.split())
    assert "transform.group_advantage has no effect" in error and "--set transform.group_advantage.use=none" in error


def test_a_transform_that_drops_groups_by_their_totals_before_one_of_turns_is_refused(folder, capsys):
    (folder / "run.toml").write_text(
        RUN.replace("[transform.turn_returns]\n", "[transform.drop_flat]\n[transform.turn_returns]\n")
    )
    assert run_app(["run", "run.toml", "--dir", "run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "transform.drop_flat comes before transform.turn_returns and would leave out groups whose totals are equal"
        in error
    )
    assert "--set transform.drop_flat.use=none" in error and not (folder / "run" / "metrics.jsonl").exists()
    assert run_app(["run", "run.toml", "--dir", "run", "--set", "transform.drop_flat.use=none"]) == 0


@pytest.mark.parametrize("transform", ["gigpo", "turn_gae", "turn_returns", "maxrl"])
def test_groups_of_one_are_refused_with_flags_that_train(folder, capsys, transform):
    text = RUN.replace("turn_returns", transform).replace("group_size = 4", "group_size = 1")
    (folder / "run.toml").write_text(text)
    assert run_app(["run", "run.toml", "--dir", "run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"transform.{transform} compares a reward with the group's" in error
    flags = error.partition("to train only by rewards: ")[2].split()
    assert run_app(["run", "run.toml", "--dir", "run", *flags]) == 0, capsys.readouterr().err
    assert all(line["groups/trained"] == 3 for line in metrics_of(folder / "run") if line["step"])


@pytest.mark.parametrize(("options", "warns"), [("", False), ("discount = 1.0\ndivide_by_std = true\n", True)])
def test_zscore_before_gigpo_is_said_to_matter_exactly_where_it_does(folder, capsys, options, warns):
    zscore = "[transform.zscore]\nclip = 5.0\n"
    (folder / "run.toml").write_text(RUN.replace("[transform.turn_returns]\n", f"{zscore}[transform.gigpo]\n{options}"))
    assert run_app(["run", "run.toml", "--dir", "run"]) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert ("the transform zscore cannot matter here: gigpo undoes any common offset and factor" in error) == warns
    assert ("It matters with divide_by_std = false in [transform.gigpo]." in error) == warns


NAN = """
import numpy as np


async def broken(groups):
    # a deviation of 0
    return [group.with_advantages(group.rewards / np.float32(0)) for group in groups]
"""


def test_an_advantage_that_is_not_finite_ends_the_run_with_the_transform_that_gave_it(folder, capsys):
    (folder / "broken.py").write_text(NAN)
    (folder / "run.toml").write_text(
        RUN.replace("[transform.turn_returns]\n", '[transform.mine]\nuse = "./broken.py:broken"\n')
    )
    assert run_app(["run", "run.toml", "--dir", "run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "PluginError transform 'mine' gave the group of task 'train-" in error
    assert "an advantage that is not a finite number" in error


EVERY_TWO = "[checkpoint]\nevery = 2\n[engine]\nlatency_s = 0.02\n[trainer]\nlearning_rate = 20.0\n"


def rewards_and_advantages(run: Path) -> list[object]:
    """Everything of turns that a run recorded, in order."""
    records = RolloutRecords(run)
    found: list[object] = []
    for step in map(records.step, records.steps()):
        for one in step.episodes:
            turns = [None if of is None else (of.ends.tolist(), of.values.tolist()) for of in one.turn_rewards]
            advantages = [of.advantages.tobytes() for of in step.sequences(one)]
            found.append((one.step, one.task, one.reward, one.advantage, turns, advantages))
    return found


@pytest.mark.parametrize("transform", ["turn_returns", "gigpo"])
def test_a_run_killed_in_the_middle_and_resumed_trains_each_turn_with_the_same_bits(folder, transform):
    text = RUN.replace('model = "toy"', 'model = "toy"\ndeterministic = true').replace("steps = 2", "steps = 6")
    (folder / "run.toml").write_text(text.replace("turn_returns", transform) + EVERY_TWO)
    finish(folder / "whole", "run", "run.toml", "--dir", str(folder / "whole"))
    run = RunningRun(folder / "run", "run", "run.toml", "--dir", str(folder / "run"))
    run.wait_for_step(3)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.process.wait(60) == -signal.SIGKILL
    finish(folder / "run", "resume", str(folder / "run"))
    tables = [(folder / name / "checkpoints/step-000006/policy/table.npy").read_bytes() for name in ("whole", "run")]
    assert tables[0] == tables[1]
    whole = rewards_and_advantages(folder / "whole")
    assert rewards_and_advantages(folder / "run") == whole
    assert len(whole) == 6 * 3 * 4 and len({one[0] for one in whole}) == 6


MARKS = """
import os
from pathlib import Path

from atropos_core import Score


async def marks(task, episodes):
    with Path("processes.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    scores = []
    for episode in episodes:
        said = [one["content"] for one in episode.messages if one["role"] == "assistant"]
        turns = [len(one) / 8 - one.count("7") for one in said]
        scores.append(Score(sum(turns), turns=turns))
    return scores
"""


def test_turn_rewards_of_a_reward_in_a_child_process_are_those_of_the_reward_here(folder):
    (folder / "marks.py").write_text(MARKS)
    found, processes = {}, {}
    for place in ("here", "process"):
        reward = f'[reward.environment]\nweight = 0.5\n[reward.marks]\nuse = "./marks.py:marks"\nruns_in = "{place}"\nweight = 2.0\n'
        (folder / "run.toml").write_text(RUN.replace('model = "toy"', 'model = "toy"\ndeterministic = true') + reward)
        assert run_app(["run", "run.toml", "--dir", place]) == 0
        found[place] = rewards_and_advantages(folder / place)
        processes[place] = {*map(int, (folder / "processes.txt").read_text().split())}
        (folder / "processes.txt").unlink()
    assert found["here"] == found["process"]
    assert processes["here"] == {os.getpid()} and os.getpid() not in processes["process"]
    step = RolloutRecords(folder / "process").step(1)
    for one in step.episodes:
        said = [message["content"] for message in one.messages if message["role"] == "assistant"]
        earned = [float(text.count("7")) for text in said]
        earned = [-0.75, earned[1] - 0.5] if len(said) == 2 else earned
        expected = [0.5 * own + 2 * (len(text) / 8 - text.count("7")) for own, text in zip(earned, said, strict=True)]
        [turns] = one.turn_rewards
        assert turns is not None and turns.values.tolist() == pytest.approx(expected)
        assert one.reward == pytest.approx(sum(expected) + 0.125)


CALCULATOR = """
model = "tiny-tools"
[training]
steps = 2
groups_per_step = 2
group_size = 6
[sampling]
top_p = 0.8
[evaluation]
problems = 0
[environment.calculator]
[reward.environment]
[reward.no_errors]
use = "./tools.py:no_errors"
[transform.{transform}]
[transform.group_advantage]
use = "none"
[trainer]
loss = "{loss}"
minibatches = 2
"""
NO_ERRORS = """
from atropos_core import Score


async def no_errors(task, episodes):
    '''-0.5 for each call that was answered with an error, and a little for each digit, at the reply.'''
    scores = []
    for episode in episodes:
        turns = []
        for message in episode.messages:
            if message["role"] == "assistant":
                turns.append(0.01 * sum(one.isdigit() for one in message["content"]))
            elif message["role"] == "tool" and message["content"].startswith("error"):
                turns[-1] -= 0.5
        scores.append(Score(sum(turns), turns=turns))
    return scores
"""


@pytest.mark.parametrize(("transform", "loss"), [("gigpo", "gmpo"), ("gigpo", "reinforce"), ("turn_returns", "gmpo")])
def test_turns_of_a_cut_distribution_are_trained_with_their_own_advantages(folder, transform, loss):
    """With top_p the engine's logprobs are of the kept tokens only, and the trainer's must be of the same."""
    (folder / "tools.py").write_text(NO_ERRORS)
    (folder / "run.toml").write_text(CALCULATOR.format(transform=transform, loss=loss))
    finish(folder / "run", "run", "run.toml", "--dir", str(folder / "run"))
    lines = [line for line in metrics_of(folder / "run") if line["step"]]
    assert len(lines) == 2 and all(line["alignment/max_abs_logprob_diff"] < 1e-4 for line in lines)
    assert all(np.isfinite(line["loss"]) for line in lines)
    records, differ, cut = RolloutRecords(folder / "run"), 0, 0
    for step in map(records.step, records.steps()):
        for episode in step.episodes:
            for tokens in step.sequences(episode):
                assert tokens.truncated and tokens.kept is not None
                cut += int((tokens.kept.sizes > 0).sum())
                own = tokens.advantages[tokens.sampled & tokens.trained]
                differ += len(np.unique(own)) > 1
                unsampled = tokens.advantages[~tokens.sampled]
                assert not np.isfinite(unsampled).any(), "only sampled tokens have one"
    assert differ and cut


LEAD_AND_SUB_AGENT = """
import json, os, urllib.request

def ask(*messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    key = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]

task = json.load(open(os.environ["ATROPOS_TASK_FILE"]))
plan, read, more = ({"role": "user", "content": text} for text in (task["prompt"], "read", "more"))
lead = ask(plan)
book = ask(read)
ask(read, book, more)
print(ask(plan, lead, more)["content"])
"""
GRADE = """
def grade(case):
    turns = [1.0 + case.answer.count("7"), 2.0, 4.0, 8.0]  # of the four calls, in their order
    return {"score": sum(turns) + 0.5, "turns": turns}
"""
AGENTS = """
model = "toy"
deterministic = true
[training]
steps = 1
groups_per_step = 2
group_size = 2
[sampling]
max_tokens = 6
[evaluation]
problems = 0
[environment.agent]
command = ["{{python}}", "-S", "{folder}/agent.py"]
sandbox = "process"
network = true
tasks = "{folder}/tasks.jsonl"
held_out = 0.0
[environment.agent.reward]
function = "{folder}/grade.py:grade"
[transform.turn_returns]
baseline = "none"
[transform.group_advantage]
use = "none"
"""


def test_the_calls_of_a_sub_agent_are_credited_between_those_of_its_lead(folder, capsys):
    for name, text in (
        ("agent.py", LEAD_AND_SUB_AGENT),
        ("grade.py", GRADE),
        ("run.toml", AGENTS.format(folder=folder)),
    ):
        (folder / name).write_text(text)
    (folder / "tasks.jsonl").write_text("".join(f'{{"prompt": "plan {n}", "answer": "7"}}\n' for n in range(4)))
    finish(folder / "run", "run", "run.toml", "--dir", str(folder / "run"))
    step = RolloutRecords(folder / "run").step(1)
    assert len(step.episodes) == 4 and not any(one.failed for one in step.episodes)
    for episode in step.episodes:
        assert sorted(episode.turn_order) == [(0, 3), (1, 2)]
        assert episode.reward is not None
        first = episode.reward - 14.5
        earned = {}
        for order, turns, tokens in zip(episode.turn_order, episode.turn_rewards, step.sequences(episode), strict=True):
            assert turns is not None
            for number, value, end in zip(order, turns.values.tolist(), turns.ends.tolist(), strict=True):
                earned[number] = value, float(tokens.advantages[end - 1])
        assert [value for value, _ in (earned[at] for at in range(4))] == [first, 2.0, 4.0, 8.0]
        assert [advantage for _, advantage in (earned[at] for at in range(4))] == [first + 14.5, 14.5, 12.5, 8.5]
    capsys.readouterr()
    assert run_app(["rescore", str(folder / "run"), "--json"]) == 0, capsys.readouterr().err
    [again] = json.loads(capsys.readouterr().out)["steps"]
    assert again["direction"] == pytest.approx(1.0, abs=1e-12)
