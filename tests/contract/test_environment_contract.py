"""The contract kit finds every planted bug by the right check, and accuses no good environment."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import pytest

from atropos_core.conversation import Conversation
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Environment, Finding
from atropos_core.plugins.references import load_reference
from atropos_core.types import Message, Score, Split, Task
from atropos_testing import ContractBroken, check, environment_contract

HERE = Path(__file__).parent
BUGS: dict[type[Environment], set[str]] = load_reference(f"{HERE / 'broken_environments.py'}:BUGS")
Sums: type[Environment] = load_reference(f"{HERE / 'broken_environments.py'}:Sums")
GOOD: tuple[type[Environment], ...] = load_reference(f"{HERE / 'good_environments.py'}:GOOD")


def broken(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings if finding.ok is False}


@pytest.mark.parametrize("environment", BUGS, ids=lambda one: one.__name__)
def test_a_planted_bug_is_found_by_the_check_that_names_it(environment: type[Environment]) -> None:
    found = broken(check("environment", environment))
    assert BUGS[environment] <= set(found), found
    for name in BUGS[environment]:
        assert found[name].detail and found[name].remedy


ALONE = [one for one, names in BUGS.items() if names in ({"unique ids"}, {"splits"}, {"no leaks"}, {"no hedging"},
         {"rollouts at once"}, {"groups"}, {"closes"}, {"adversarial replies"}, {"event loop"}, {"messages"})]  # fmt: skip


@pytest.mark.parametrize("environment", ALONE, ids=lambda one: one.__name__)
def test_a_bug_of_its_own_breaks_no_other_check(environment: type[Environment]) -> None:
    assert set(broken(check("environment", environment))) == BUGS[environment]


@pytest.mark.parametrize("environment", GOOD, ids=lambda one: one.__name__)
def test_a_good_environment_keeps_the_contract(environment: type[Environment]) -> None:
    assert not broken(check("environment", environment))
    environment_contract(environment)()


def test_a_failed_rollout_is_named_by_task_policy_and_error() -> None:
    found = broken(check("environment", f"{HERE / 'broken_environments.py'}:RaisesOnEmptyReply"))["rollouts"]
    assert (
        "task 'train-0', policy 'empty': IndexError: list index out of range (broken_environments.py:" in found.detail
    )


def test_code_that_sleeps_for_minutes_is_ended_within_seconds() -> None:
    start = perf_counter()
    found = broken(check("environment", f"{HERE / 'broken_environments.py'}:Sleeps"))["event loop"]
    assert perf_counter() - start < 40
    assert "broken_environments.py" in found.detail and "in score()" in found.detail


def test_a_contract_fails_as_a_test_that_says_what_to_do() -> None:
    with pytest.raises(
        ContractBroken, match=r"(?s)unique ids: train\[0\] and train\[150\] share.*what to do: Give every"
    ):
        environment_contract(f"{HERE / 'broken_environments.py'}:DuplicateIds")()


def test_a_skipped_check_is_reported_and_does_not_fail() -> None:
    reference = f"{HERE / 'broken_environments.py'}:DuplicateIds"
    findings = check("environment", reference, skip=["unique ids"])
    assert not broken(findings)
    assert any(finding.subject == "unique ids" and finding.detail.startswith("skipped; train") for finding in findings)


def test_skipping_a_check_that_there_is_not_suggests_the_near_miss() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'unique ids'"):
        check("environment", f"{HERE / 'broken_environments.py'}:DuplicateIds", skip=["unique_ids"])


async def test_a_contract_inside_a_running_loop_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="ordinary test function"):
        check("environment", GOOD[0])


BROKEN = f"{HERE / 'broken_environments.py'}"


@pytest.mark.parametrize(
    ("environment", "subject", "ok", "said", "remedy"),
    [
        ("UnpicklableItems", "tasks", False, "a builtins.frozenset has no encoding", "a Task has"),
        (
            "TasksFromAGenerator",
            "tasks",
            False,
            "tasks('train') gives a generator",
            "returns a sequence, such as a list",
        ),
        ("TasksOfACoroutine", "tasks", False, "tasks('train') gives a coroutine", "returns a sequence, such as a list"),
        ("YieldsItsScore", "rollouts", False, "async_generator", "with `return`, never `yield`"),
        ("BlocksForAMoment", "event loop", False, "in score() kept it waiting for", "asyncio.to_thread"),
        ("EncodesEarlierRepliesAgain", "re-tokenisation", None, "has an earlier reply encoded again", "after=tokens"),
        ("MissingAnswersAsText", "tasks", None, "have the answer 'None', as text", "has answer=None"),
        ("MissingAnswers", "oracle", None, "have no answer, and were left out", ""),
    ],
)
def test_what_others_environments_teach_is_named_with_what_to_do(environment, subject, ok, said, remedy) -> None:
    target = {"MissingAnswers": MissingAnswers}.get(environment, f"{BROKEN}:{environment}")
    found = [one for one in check("environment", target) if one.subject == subject and one.ok is ok]
    assert any(said in one.detail and remedy.lower() in one.remedy.lower() for one in found), found


def test_computing_is_no_waiting_and_an_endless_stream_is_compared_with_nothing() -> None:
    findings = check("environment", Stream)
    assert not broken(findings)
    [same] = [one for one in findings if one.subject == "same again"]
    assert same.ok is None and "each rollout takes the next item" in same.detail


class MissingAnswers(Sums):  # type: ignore[misc,valid-type]
    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, answer=None) if at % 2 else task for at, task in enumerate(super().tasks(split))]


class Stream(Sums):  # type: ignore[misc,valid-type]
    """Another question with each rollout, whatever the task; and it computes for a moment."""

    repeats = False

    def __init__(self) -> None:
        self.taken = 0

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, answer=None) for task in super().tasks(split)]

    async def rollout(self, task, policy, *, seed):
        self.taken += 1
        sum(range(20_000))
        question = ({"role": "user", "content": f"Question {self.taken}?"},)
        return await super().rollout(replace(task, messages=question), policy, seed=seed)


class TestInTrain(Sums):  # type: ignore[misc,valid-type]
    """Two hundred sums of 8,100: as in many a first environment, some test questions are in train by chance."""

    def tasks(self, split: Split) -> Sequence[Task]:
        rng = random.Random(split)
        pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(3000 if split == "train" else 200)]
        return [
            Task(f"{split}-{i}", ({"role": "user", "content": f"What is {a} + {b}?"},), str(a + b))
            for i, (a, b) in enumerate(pairs)
        ]


def test_test_questions_that_are_in_train_are_a_warning_with_their_share() -> None:
    environment = TestInTrain()
    trained = {task.messages[0]["content"] for task in environment.tasks("train")}
    shared = sum(task.messages[0]["content"] in trained for task in environment.tasks("test"))
    assert 40 < shared < 80, "a leak that is no accident of one task"
    [found] = [finding for finding in check("environment", TestInTrain) if finding.subject == "splits"]
    assert found.ok is None
    assert f"{shared / 200:.1%} of the test tasks ({shared} of 200) are also train tasks" in found.detail
    assert "held-out accuracy counts what was trained on" in found.detail and found.remedy


class WithoutTestTasks(Sums):  # type: ignore[misc,valid-type]
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks(split) if split == "train" else []


class RefusesTest(Sums):  # type: ignore[misc,valid-type]
    def tasks(self, split: Split) -> Sequence[Task]:
        return {"train": super().tasks("train")}[split]


class OneSplitForBoth(Sums):  # type: ignore[misc,valid-type]
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks("train")


class SameNumbers(Sums):  # type: ignore[misc,valid-type]
    """Different tasks, each split numbered from 0."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, id=str(number)) for number, task in enumerate(super().tasks(split))]


@pytest.mark.parametrize(
    ("environment", "subject", "ok", "said", "remedy"),
    [
        (WithoutTestTasks, "tasks", None, "nothing is held out", "run with --set evaluation.problems=0"),
        (WithoutTestTasks, "splits", True, "no tasks are held out", ""),
        (RefusesTest, "tasks", False, "tasks('test') raises KeyError: 'test'", "[] for 'test' if none are held out"),
        (OneSplitForBoth, "splits", False, "{n} of {n} test tasks are train tasks as well", "Divide the data once"),
        (SameNumbers, "splits", False, "have the id of another task in train, '0' among them", "with a unique id"),
    ],
)
def test_what_a_split_is_and_what_is_wrong_with_it_is_said(environment, subject, ok, said, remedy) -> None:
    findings = [one for one in check("environment", environment) if one.subject == subject]
    found = next(one for one in findings if one.ok is ok)
    n = len(Sums().tasks("train"))
    assert said.format(n=n) in found.detail and remedy in found.remedy, found


@pytest.mark.parametrize(("environment", "notes"), [("ComputesLong", 1), ("IsStopped", 0)])
def test_what_computes_for_long_is_noted_and_a_machine_that_is_busy_is_not(environment, notes) -> None:
    reference = f"{HERE / 'good_environments.py'}:{environment}"
    checked = subprocess.run(
        [sys.executable, "-m", "atropos_core", "check", "--json", reference],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("asyncio.to_thread is for long computations") == notes, checked.stdout


class NeverEnds(Sums):  # type: ignore[misc,valid-type]
    policies: ClassVar[set[int]] = set()  # of the rollouts that were begun

    async def rollout(self, task, policy, *, seed):
        self.policies.add(id(policy))
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        while True:
            await talk.reply({"role": "user", "content": "Again."})


class CatchesItsCancellation(NeverEnds):
    async def rollout(self, task, policy, *, seed):
        while True:
            try:
                await super().rollout(task, policy, seed=seed)
            except (Exception, asyncio.CancelledError):
                continue


@pytest.mark.parametrize("environment", [NeverEnds, CatchesItsCancellation])
def test_after_one_rollout_that_does_not_end_no_other_is_begun(environment, monkeypatch) -> None:
    monkeypatch.setattr(environment, "policies", set())
    findings = check("environment", environment, deadline_s=0.5)
    found = broken(findings)["rollouts"]
    caught = ", and catches asyncio.CancelledError, which would end it" if environment is not NeverEnds else ""
    assert found.detail == f"task 'train-0', policy 'random': did not end within 0.5 s{caught}"
    assert "bound the number of its turns" in found.remedy
    assert [one.detail for one in findings if one.subject == "rollouts" and one.ok is None] == [
        "nothing else that needs rollouts was checked, because one did not end"
    ]
    assert len(environment.policies) == 1


class LongToolMessage(Sums):  # type: ignore[misc,valid-type]
    async def rollout(self, task, policy, *, seed):
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        await talk.reply({"role": "tool", "content": "x" * 10_000_000})
        return talk.episode(Score(1.0))


class ReadsAMissingKey(Sums):  # type: ignore[misc,valid-type]
    async def score(self, task, reply):
        return task.data["gold"]


class RolloutWithoutSeed(Sums):  # type: ignore[misc,valid-type]
    async def rollout(self, task, policy):  # type: ignore[override]
        raise NotImplementedError


class RolloutReturnsNone(Sums):  # type: ignore[misc,valid-type]
    async def rollout(self, task, policy, *, seed):
        await Conversation(policy, seed=seed).reply(*task.messages)


async def for_ever() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except:  # noqa: E722 - the bug
            pass


class ScoresForEver(Sums):  # type: ignore[misc,valid-type]
    async def score(self, task, reply):
        await for_ever()


class ClosesForEver(Sums):  # type: ignore[misc,valid-type]
    async def close(self):
        await for_ever()


class GroupsForEver(Sums):  # type: ignore[misc,valid-type]
    async def rollout_group(self, task, policy, n, *, seeds):
        if n > 1:  # the check of groups, after that of single rollouts
            await for_ever()
        return await super().rollout_group(task, policy, n, seeds=seeds)


@pytest.mark.parametrize(
    ("environment", "subject"), [(ScoresForEver, "rollouts"), (ClosesForEver, "closes"), (GroupsForEver, "groups")]
)
def test_code_that_catches_its_own_cancellation_does_not_hang_the_check(environment, subject) -> None:
    found = broken(check("environment", environment, deadline_s=0.5))[subject]
    assert "did not end within 0.5 s, and catches asyncio.CancelledError" in found.detail, found
    assert "Write `except Exception:`" in found.remedy


def test_a_process_ends_that_has_checked_code_which_catches_its_own_cancellation() -> None:
    code = (
        "from tests.contract.test_environment_contract import ScoresForEver, check\n"
        "check('environment', ScoresForEver, deadline_s=0.5)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


class WithoutScore(Environment):
    def tasks(self, split: Split) -> Sequence[Task]:
        return Sums().tasks(split)


class ReadsOnlyNumbers(Sums):  # type: ignore[misc,valid-type]
    async def score(self, task, reply):
        return float(int(reply["content"]) == int(task.answer))


class Misspelt(WithoutScore):
    async def scores(self, task: Task, message: Message) -> float:
        return 1.0


class OtherName(WithoutScore):
    async def grade(self, task: Task, reply: Message) -> float:
        return 1.0


class WithoutTasks(Environment):
    def examples(self, split: Split) -> Sequence[Task]:
        return ()

    async def score(self, task: Task, reply: Message) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("environment", "said", "remedy"),
    [
        (
            WithoutScore,
            r"lacks score\(\), and no rollout\(\) replaces it\.$",
            "Write `async def score(self, task, reply)`",
        ),
        (Misspelt, r"It has scores\(\), which is never called", "Rename scores to score."),
        (OtherName, r"It has grade\(\), which is never called", "Rename grade to score."),
        (
            WithoutTasks,
            r"lacks tasks\(\).* It has examples\(\)",
            "Rename examples to tasks. Write `def tasks(self, split)`",
        ),
    ],
)
def test_a_class_without_a_method_that_it_needs_is_one_error_with_class_and_file(environment, said, remedy) -> None:
    with pytest.raises(ConfigError) as raised:
        check("environment", environment)
    fact = str(raised.value).splitlines()[0]
    assert f"the class {environment.__name__} in {__file__} lacks" in fact and re.search(said, fact), fact
    assert remedy in (raised.value.remedy or "")


@pytest.mark.parametrize(
    ("environment", "said", "remedy"),
    [
        (LongToolMessage, "the prompt has 10,000,0", "Cut what a tool or a file returns before it becomes a message."),
        (
            ReadsAMissingKey,
            "KeyError: 'gold'",
            "the reply is not the cause, because the own answer of task 'train-0' fails",
        ),
        (RolloutWithoutSeed, "unexpected keyword argument 'seed'", "rollout(self, task, policy, *, seed)"),
        (RolloutReturnsNone, "rollout() returned None, not an Episode", "return talk.episode(...)"),
    ],
)
def test_rollouts_that_fail_whatever_the_reply_are_not_blamed_on_it(environment, said, remedy) -> None:
    findings = check("environment", environment)
    found = broken(findings)
    assert set(found) == {"rollouts"} and said in found["rollouts"].detail and remedy in found["rollouts"].remedy, found
    rest = " ".join(one.detail for one in findings)
    assert "no rollout ended in an episode: nothing else that needs one was checked" in rest
    assert "there is none" not in rest and "no task has an answer" not in rest and "repeated" not in rest


def test_the_line_to_fix_is_named() -> None:
    found = broken(check("environment", ReadsAMissingKey))["rollouts"]
    line = inspect.getsourcelines(ReadsAMissingKey.score)[1] + 1
    assert found.remedy.startswith(f"Fix {Path(__file__).name}:{line}: "), found


def test_a_reply_is_blamed_only_if_the_answers_of_the_tasks_were_scored() -> None:
    findings = check("environment", ReadsOnlyNumbers)
    assert "a reply that cannot be read is a wrong reply" in broken(findings)["rollouts"].remedy
    assert "no task has an answer" not in " ".join(one.detail for one in findings)


class ScoresTooMuch(Sums):  # type: ignore[misc,valid-type]
    async def score(self, task, reply):
        return Score(1e300 if reply["content"] == task.answer else 0.0, reply["content"] == task.answer)


def test_a_score_that_float32_cannot_hold_is_called_too_large() -> None:
    found = broken(check("environment", ScoresTooMuch))["episodes"]
    assert "score is 1e+300, too large for float32 (at most 3.4e+38)" in found.detail
