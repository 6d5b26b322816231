"""Turn rewards in a whole run: the transform's advantages are what the trainer gets, token for token."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import metrics_of

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
