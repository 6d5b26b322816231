"""Checks of scores: the answer earns the most, and no other reply earns as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atropos_core.interfaces import NO_COROUTINE
from atropos_testing.attempts import Outcome, was_given, wrong_with
from atropos_testing.replies import is_answer_by_chance
from atropos_testing.report import Report, brief
from atropos_testing.scripted import END, OTHER, ROLES, OtherIds

ENDLESS = "End every rollout, whatever the policy replies: bound the number of its turns, and the time that it waits for anything."
CATCHES_ALL = (
    "Write `except Exception:` around what is awaited: a bare `except:` and `except BaseException:` also catch "
    "asyncio.CancelledError, so that the code cannot be ended."
)
AWAITED = ("object async_generator", "can't be used in 'await' expression", NO_COROUTINE)
REMEDIES = {  # by text of an error
    **dict.fromkeys(AWAITED, "rollout() and score() are `async def` with `return`, never `yield`."),
    "rollout() got an unexpected keyword argument 'seed'": "Declare it as `async def rollout(self, task, policy, *, seed)`.",
    "rollout() returned ": "End rollout() with `return talk.episode(...)`: it returns one Episode.",
    "must override either score() or rollout()": "Write `async def score(self, task, reply)`, which returns a number.",
    "more than any model reads": "Cut what a tool or a file returns before it becomes a message.",
}
SHORTEST = 3  # ids of a reply that stands in a prompt by no chance


def check_rollouts(report: Report, outcomes: Sequence[Outcome], oracle: Sequence[Outcome], tasks: int) -> None:
    """Check `rollouts` and `episodes`. `oracle`: those of the outcomes whose policy replies the task's own answer."""
    failed = [outcome for outcome in outcomes if outcome.episode is None and not outcome.given_up]
    report.check(
        "rollouts",
        [f"{outcome.label}: {outcome.error}" for outcome in failed],
        good=f"{len(outcomes)} rollouts of {tasks} tasks, each ended in an episode",
        remedy=_how_to_end_in_episodes(failed, oracle),
    )
    ended = [outcome for outcome in outcomes if outcome.episode is not None]
    scores = [outcome.score for outcome in ended if np.isfinite(outcome.score)]
    if ended:
        report.check(
            "episodes",
            [each for outcome in ended for each in wrong_with(outcome)],
            good=f"scores from {min(scores):g} to {max(scores):g}" if scores else "no score is a finite number",
            remedy="Return an Episode with a finite score, made by Conversation.episode(), which keeps tokens as sampled.",
        )


def _how_to_end_in_episodes(failed: Sequence[Outcome], oracle: Sequence[Outcome]) -> str:
    """Return what to do about rollouts that failed. Only if the tasks' own answers ended well is it about how replies are read."""
    for text, remedy in REMEDIES.items():
        if any(text in outcome.error for outcome in failed):
            return remedy
    answered = [outcome for outcome in oracle if outcome.task.answer is not None]
    if answered and all(outcome.episode is not None for outcome in answered):
        return "Score whatever the policy says: a reply that cannot be read is a wrong reply, not an error."
    right = next((outcome for outcome in answered if outcome.episode is None), None)
    lines = list(dict.fromkeys(outcome.where for outcome in ([right] if right else failed) if outcome.where))
    fix = f"Fix {lines[0]}" if lines else "Fix what the error says"
    if right is None:
        return f"{fix}: a rollout must end in an episode, whatever the policy replies."
    return f"{fix}: the reply is not the cause, because the own answer of task {right.task.id!r} fails as well."


def check_messages(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Check `messages`: the roles of what rollouts send. Note if the model needs a chat template that shows tools."""
    sent = {role for outcome in outcomes for role in outcome.policy.roles}
    unknown = {role: outcome for outcome in outcomes for role in sorted(outcome.policy.roles - set(ROLES))}
    report.check(
        "messages",
        [
            f"{outcome.label}: a message has the role {role!r}, which chat templates do not know and leave out of the prompt"
            for role, outcome in unknown.items()
        ],
        good=f"of the roles {', '.join(role for role in ROLES if role in sent)}" if sent else "none was sent",
        remedy=f"Use one of the roles {', '.join(ROLES)}.",
    )
    if "tool" in sent or any(outcome.policy.has_tools for outcome in outcomes):
        report.note(
            "messages",
            "rollouts send tools or results of tools, so a run needs a model whose chat template shows them",
            "tiny-tools shows them (--model tiny-tools). tiny, the default model, does not: a run with it ends with an error.",
        )


def check_tokenised_once(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Check `re-tokenisation`, with rollouts of a policy that samples other ids than its tokenizer makes of the same text."""
    ended = [outcome for outcome in outcomes if outcome.episode is not None and isinstance(outcome.policy, OtherIds)]
    remedy = "Keep what was sampled: Conversation does, or policy.render(messages, after=tokens) and the ids of each Completion."
    report.check(
        "re-tokenisation",
        [
            f"{outcome.label}: what is marked as sampled are ids of the reply's text, not those that the policy sampled"
            for outcome in ended
            if outcome.episode is not None
            and not all(was_given(rollout, outcome.policy.given) for rollout in outcome.episode.rollouts)
        ],
        good=f"{sum(len(outcome.policy.given) for outcome in ended)} replies kept the ids that were sampled",
        remedy=remedy,
    )
    again = [outcome for outcome in ended if _encodes_again(outcome)]
    if again:
        report.note(
            "re-tokenisation",
            f"{again[0].label}: a later prompt has an earlier reply encoded again from its text, so that it extends nothing",
            remedy,
        )


def _encodes_again(outcome: Outcome) -> bool:
    assert isinstance(outcome.policy, OtherIds)
    for at, prompt in enumerate(outcome.policy.prompts):
        for ids in outcome.policy.given[:at]:
            text = (ids[ids < OTHER + END] - OTHER).tobytes()
            if len(text) > SHORTEST * ids.itemsize and text in prompt.tobytes():
                return True
    return False


def check_oracle(report: Report, oracle: Sequence[Outcome], others: Mapping[str, Sequence[Outcome]]) -> None:
    """Check `oracle`: the task's own answer is correct, and earns more than `others`, replies that ignore the task."""
    rows = [outcome for outcome in oracle if outcome.task.answer is not None and outcome.episode is not None]
    if not rows:
        report.note("oracle", _untested(oracle, "no task has an answer to reply with"))
        return
    problems = [
        f"task {outcome.task.id!r}: replying its own answer {brief(str(outcome.task.answer), 40)} is not correct"
        f" (score {outcome.score:g})"
        for outcome in rows
        if outcome.episode is not None and outcome.episode.correct is False
    ]
    without = {outcome.task.id for outcome in oracle if outcome.task.answer is None}
    if without:
        report.note("oracle", f"{len(without)} of the tasks that were run have no answer, and were left out")
    best = float(np.mean([outcome.score for outcome in rows]))
    tested = {outcome.task.id for outcome in rows}
    for name, outcomes in others.items():
        scores = [outcome.score for outcome in outcomes if outcome.episode is not None and outcome.task.id in tested]
        if scores and not best > float(np.mean(scores)):
            problems.append(f"the tasks' own answers score {best:g} on average, {name} replies {np.mean(scores):g}")
    report.check(
        "oracle",
        problems,
        good=f"the tasks' own answers score {best:g} on average",
        remedy="Task.answer is what a perfect policy would reply, in the form that the score wants; or None.",
    )


def check_cheap(report: Report, name: str, kind: str, outcomes: Sequence[Outcome], oracle: Sequence[Outcome]) -> None:
    """Check that no reply that ignores the task earns as much as the task's answer. If the environment does not say what is correct,
    scores are compared."""
    best = {outcome.task.id: outcome.score for outcome in oracle if outcome.episode is not None}
    problems = []
    tested = 0
    for outcome in outcomes:
        task, reply = outcome.task, outcome.script.reply(outcome.task, outcome.seed)
        if outcome.episode is None or task.id not in best or task.answer is None:
            continue
        unsaid = outcome.episode.correct is None
        earns = outcome.correct or (unsaid and outcome.score >= best[task.id])
        if earns and outcome.script.innocent and is_answer_by_chance(task.answer, reply):
            continue
        tested += 1
        if earns:
            problems.append(f"{outcome.label}: {brief(reply, 50)} scores {outcome.score:g}, as the answer does")
    if not tested:
        report.note(name, _untested(oracle, "no task has an answer to be mistaken for", outcomes))
        return
    report.check(
        name,
        problems,
        good=f"none of {tested} {kind} replies counts as correct",
        remedy="Let one reply give one answer: compare the last number, or what stands in the last tag, with the answer.",
    )


def _untested(oracle: Sequence[Outcome], otherwise: str, others: Sequence[Outcome] | None = None) -> str:
    """Return why scores could not be compared."""
    answered = [outcome for outcome in oracle if outcome.task.answer is not None]
    if answered and all(outcome.episode is None for outcome in answered):
        return "not checked: no rollout with a task's own answer ended in an episode"
    if answered and others and all(outcome.episode is None for outcome in others):
        return "not checked: none of its rollouts ended in an episode"
    return otherwise
