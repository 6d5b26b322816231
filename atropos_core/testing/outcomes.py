"""What the scores of scripted plays say: the answer earns the most, and nothing that was not meant as one earns as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atropos_core.testing.plays import Played, wrong_with
from atropos_core.testing.replies import stands_in
from atropos_core.testing.report import Report, brief


def check_plays(report: Report, plays: Sequence[Played], tasks: int) -> None:
    """`plays` and `episodes`."""
    report.check(
        "plays",
        [f"{played.label}: {played.error}" for played in plays if played.episode is None and not played.given_up],
        good=f"{len(plays)} plays of {tasks} tasks, each ended in an episode",
        remedy="Score whatever the policy says: a reply that cannot be read is a wrong reply, not an error.",
    )
    ended = [played for played in plays if played.episode is not None]
    scores = [played.score for played in ended if np.isfinite(played.score)]
    report.check(
        "episodes",
        [each for played in ended for each in wrong_with(played)],
        good=f"scores from {min(scores):g} to {max(scores):g}" if scores else "there is none",
        remedy="Return an Episode with a finite score, made by Conversation.episode(), which keeps tokens as sampled.",
    )


def check_oracle(report: Report, oracle: Sequence[Played], others: Mapping[str, Sequence[Played]]) -> None:
    """`oracle`: the task's own answer is correct, and earns more than `others`, replies made without looking."""
    rows = [played for played in oracle if played.task.answer is not None and played.episode is not None]
    if not rows:
        report.note("oracle", "no task has an answer to reply with")
        return
    problems = [
        f"task {played.task.id!r}: replying its own answer {brief(str(played.task.answer), 40)} is not correct"
        f" (score {played.score:g})"
        for played in rows
        if played.episode is not None and played.episode.correct is False
    ]
    best = float(np.mean([played.score for played in rows]))
    tested = {played.task.id for played in rows}
    for name, plays in others.items():
        scores = [played.score for played in plays if played.episode is not None and played.task.id in tested]
        if scores and not best > float(np.mean(scores)):
            problems.append(f"the tasks' own answers score {best:g} on average, {name} replies {np.mean(scores):g}")
    report.check(
        "oracle",
        problems,
        good=f"the tasks' own answers score {best:g} on average",
        remedy="Task.answer is what a perfect policy would reply, in the form that the score wants; or None.",
    )


def check_cheap(report: Report, name: str, plays: Sequence[Played], oracle: Sequence[Played]) -> None:
    """No reply that was made without looking at the task earns what its answer earns. Where the environment does not
    say what is correct, the score stands for it."""
    best = {played.task.id: played.score for played in oracle if played.episode is not None}
    problems = []
    tested = 0
    for played in plays:
        task, reply = played.task, played.script.reply(played.task, played.seed)
        by_chance = played.script.innocent and task.answer is not None and stands_in(task.answer, reply)
        if played.episode is None or task.id not in best or task.answer is None or by_chance:
            continue
        tested += 1
        unsaid = played.episode.correct is None
        if played.correct or (unsaid and played.score >= best[task.id]):
            problems.append(f"{played.label}: {brief(reply, 50)} scores {played.score:g}, as the answer does")
    if not tested:
        report.note(name, "no task has an answer to be mistaken for")
        return
    report.check(
        name,
        problems,
        good=f"none of {tested} such replies counts as correct",
        remedy="Let one reply give one answer: compare the last number, or what stands in the last tag, with the answer.",
    )
