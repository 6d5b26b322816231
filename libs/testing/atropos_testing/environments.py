"""The contract of an environment: its tasks, its rollouts under scripted policies, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from atropos_core.console.waits import Wait, waiting
from atropos_core.interfaces import Environment, Finding, SelfChecked
from atropos_core.rollouts.runner import runs_groups
from atropos_core.types import Episode, Failed, Task
from atropos_testing import eventloop
from atropos_testing.answers_in_prompts import check_leaks
from atropos_testing.attempts import CAUGHT, Outcome, attempt, cancel, difference
from atropos_testing.eventloop import Blocked, Watch, watched
from atropos_testing.lifetimes import cancel_rollout, fail_rollout
from atropos_testing.outcomes import (
    CATCHES_ALL,
    ENDLESS,
    check_cheap,
    check_messages,
    check_oracle,
    check_rollouts,
    check_tokenised_once,
)
from atropos_testing.replies import ADVERSARIAL, EMPTY, ORACLE, RANDOM, hedges
from atropos_testing.report import Report, of_error
from atropos_testing.scripted import OtherIds, Script, ScriptedPolicy
from atropos_testing.splits import Looked, check_tasks, look_at, portrait, wrong_with
from atropos_testing.subject import Subject

CHECKS = (
    "opens", "tasks", "stable tasks", "unique ids", "splits", "no leaks", "re-tokenisation", "rollouts", "messages", "episodes", "groups",
    "oracle", "no hedging", "adversarial replies", "same again", "rollouts at once", "cancellation", "late engine", eventloop.EVENT_LOOP,
    "closes", "made anew",
)  # fmt: skip
SEED = 20260131
SPREAD_S = 0.02  # replies overtake one another by up to this
GROUP = 4
OPEN_DEADLINE_S = 300.0  # a data set may have to be fetched
STREAM = "an endless stream: each rollout takes the next item, so that none is compared with its repetition"
TOKENISED = 2  # tasks that are run once more, for where their tokens come from
SHOWN_AFTER_S = 5.0  # a rollout that takes longer is named while it runs


class EnvironmentContract:
    """Checks one environment. `tasks` is how many of its tasks are run, `deadline_s` how long one rollout may take."""

    def __init__(self, subject: Subject, *, tasks: int = 6, deadline_s: float = 30.0, skip: Sequence[str] = ()) -> None:
        self._subject = subject
        self._at_most = tasks
        self._deadline_s = deadline_s
        self._report = Report(CHECKS, skip)
        self._environment: Environment
        self._splits: list[Looked] = []
        self._tasks: list[Task] = []  # those that are run
        self._unended: Outcome | None = None  # the first rollout that did not end: no other is begun after it
        self._ended = 0
        self._wait: Wait

    def findings(self) -> list[Finding]:
        with waiting(f"the check of {self._subject.label}", after_s=SHOWN_AFTER_S) as self._wait:
            eventloop.run(self._check())
        return self._report.findings

    async def _check(self) -> None:
        if not await self._opens():
            return
        earlier: list[Outcome] = []
        with watched() as watch:
            try:
                with watch.off():
                    has_tasks = self._look()
                if has_tasks:
                    earlier = await self._check_rollouts(watch)
                    watch.tell(
                        self._report,
                        "Await whatever takes long: asyncio.sleep, an async client, asyncio.to_thread for what blocks or computes.",
                    )
                    await self._check_its_own()
            finally:
                await self._closes()
            if earlier:
                await self._made_anew(earlier, watch)

    async def _opens(self) -> bool:
        problems = await self._trouble(self._open(), OPEN_DEADLINE_S)
        return self._report.check(
            "opens",
            problems,
            good="built and opened",
            remedy=(f"{CATCHES_ALL} " if any(CAUGHT in one for one in problems) else "")
            + "Everything else is checked once the environment opens.",
        )

    async def _open(self) -> None:
        self._environment = self._subject.make()
        await self._environment.open()

    def _look(self) -> bool:
        self._splits = [look_at(self._environment, "train"), look_at(self._environment, "test")]
        check_tasks(self._report, *self._splits)
        whole = [task for split in self._splits for task in split.tasks.values() if not wrong_with(task)]
        check_leaks(self._report, whole)
        self._answers = list(dict.fromkeys(str(task.answer) for task in whole if task.answer is not None))
        whole_tasks = [task for task in self._splits[0].tasks.values() if not wrong_with(task)]
        self._tasks = whole_tasks[:: max(len(whole_tasks) // self._at_most, 1)][: self._at_most]
        return bool(self._tasks)

    # -- rollouts

    async def _check_rollouts(self, watch: Watch) -> list[Outcome]:
        """Run all checks of rollouts. Return the rollouts that must have the same result whenever they are repeated."""
        if needed := self._environment.waits_for:
            self._report.note("rollouts", f"a rollout waits for {needed}: nothing that needs one was checked")
            return []
        portraits = [portrait(task) for task in self._tasks]
        tokenised = await self._with_other_ids()
        noise, empty, oracle = [await self._each(script) for script in (RANDOM, EMPTY, ORACLE)]
        others = await self._each(RANDOM, SEED + 1)
        hedged = [outcome for script in hedges(self._answers) for outcome in await self._each(script)]
        hostile = [outcome for script in ADVERSARIAL for outcome in await self._each(script)]
        outcomes = [*noise, *empty, *oracle, *others, *hedged, *hostile]
        with watch.off():  # comparing is the check's own work, however long it takes
            if self._unended is not None:
                remedy = f"{CATCHES_ALL} {ENDLESS}" if CAUGHT in self._unended.error else ENDLESS
                self._report.check(
                    "rollouts", [f"{self._unended.label}: {self._unended.error}"], good="", remedy=remedy
                )
                self._report.note("rollouts", "nothing else that needs rollouts was checked, because one did not end")
                return []
            check_tokenised_once(self._report, tokenised)
            check_rollouts(self._report, outcomes, oracle, len(self._tasks))
            check_messages(self._report, outcomes)
        ended = any(outcome.episode is not None for outcome in outcomes)
        if ended or runs_groups(self._environment):
            await self._check_group()
        if not ended:
            self._report.note("rollouts", "no rollout ended in an episode: nothing else that needs one was checked")
            return []
        with watch.off():
            check_oracle(self._report, oracle, {"random": noise, "empty": empty})
            check_cheap(self._report, "no hedging", "hedging", hedged, oracle)
            check_cheap(self._report, "adversarial replies", "adversarial", hostile, oracle)
        earlier = [*noise, *others, *oracle, *empty]
        if self._environment.repeats:
            await self._check_same_again(earlier, portraits)
        else:
            self._report.note("same again", STREAM)
        await self._check_at_once(earlier)
        await self._check_lifetimes(noise[0])
        return earlier

    async def _each(self, script: Script, seed: int = SEED) -> list[Outcome]:
        return [await self._one(task, script, seed) for task in self._tasks]

    async def _one(
        self, task: Task, script: Script, seed: int, spread_s: float = 0.0, policy: ScriptedPolicy | None = None
    ) -> Outcome:
        if self._unended is not None:
            return Outcome(task, script, seed, ScriptedPolicy(script, task), given_up=True)
        with waiting(f"a rollout of task {task.id!r}, policy {script.name!r}", after_s=SHOWN_AFTER_S):
            outcome = await attempt(
                self._environment,
                task,
                script,
                seed=seed,
                deadline_s=self._deadline_s,
                spread_s=spread_s,
                policy=policy,
            )
        if outcome.unended:
            self._unended = self._unended or outcome
        self._ended += 1
        self._wait.done = f"{self._ended} rollouts ended"
        return outcome

    async def _with_other_ids(self) -> list[Outcome]:
        """Use a policy that samples a text as other ids than its tokenizer makes of it, as every model sometimes does."""
        return [
            await self._one(task, script, SEED, policy=OtherIds(script, task))
            for task in self._tasks[:TOKENISED]
            for script in (RANDOM, ORACLE)
        ]

    async def _check_group(self) -> None:
        task = self._tasks[0]
        problems: list[str] = []

        async def run_group() -> None:
            policy, seeds = ScriptedPolicy(RANDOM, task, spread_s=SPREAD_S), [SEED + member for member in range(GROUP)]
            outcome = await self._environment.rollout_group(task, policy, GROUP, seeds=seeds)
            if len(outcome) != GROUP:
                problems.append(f"rollout_group() was called for {GROUP} rollouts and gave {len(outcome)}")
            for one in outcome:
                if isinstance(one, BaseException):
                    problems.append(f"a rollout of the group failed: {of_error(one)}")
                elif not isinstance(one, Episode | Failed):
                    problems.append(f"a rollout of the group is a {type(one).__name__}")

        problems += await self._trouble(run_group(), self._deadline_s)
        whose = "the environment's own" if runs_groups(self._environment) else "the usual"
        self._report.check(
            "groups",
            problems,
            good=f"{GROUP} rollouts of one task, by {whose} rollout_group()",
            remedy=CATCHES_ALL
            if any(CAUGHT in one for one in problems)
            else "rollout_group() returns one Episode, Failed or exception for each of the seeds."
            if runs_groups(self._environment)
            else "Do what `rollouts` says: these are the same rollouts, run at once.",
        )

    async def _check_same_again(self, earlier: Sequence[Outcome], portraits: Sequence[str]) -> None:
        changed = [
            f"task {task.id!r} was changed by its rollouts"
            for task, then in zip(self._tasks, portraits, strict=True)
            if portrait(task) != then
        ]
        self._report.check(
            "same again",
            [*await self._repeat(earlier), *changed],
            good=f"{len(earlier)} rollouts repeated: the same tokens, scores and parts",
            remedy="Derive everything random from the rollout's seed (atropos_core.seeds.derive), and keep no state between rollouts.",
        )

    async def _check_at_once(self, earlier: Sequence[Outcome]) -> None:
        again = await asyncio.gather(*(self._one(each.task, each.script, each.seed, SPREAD_S) for each in earlier))
        self._report.check(
            "rollouts at once",
            self._differences(earlier, again),
            good=f"{len(again)} rollouts at once gave the same as one after another"
            if self._environment.repeats
            else f"{len(again)} rollouts at once each ended in an episode",
            remedy="Keep what belongs to a rollout in local variables, not on self: many rollouts run at once.",
        )

    async def _repeat(self, earlier: Sequence[Outcome]) -> list[str]:
        return self._differences(earlier, [await self._one(each.task, each.script, each.seed) for each in earlier])

    def _differences(self, earlier: Sequence[Outcome], later: Sequence[Outcome]) -> list[str]:
        """Compare rollouts; for an endless stream, only whether one of the two failed."""
        pairs = [(then, now) for then, now in zip(earlier, later, strict=True) if not (then.given_up or now.given_up)]
        if not self._environment.repeats:
            pairs = [(then, now) for then, now in pairs if (then.episode is None) != (now.episode is None)]
        return [f"{then.label}: {what}" for then, now in pairs if (what := difference(then, now))]

    # -- when things go wrong

    async def _check_lifetimes(self, earlier: Outcome) -> None:
        task = self._tasks[0]
        wrong = await cancel_rollout(self._environment, task)
        if wrong is None:
            self._report.note("cancellation", f"a rollout of task {task.id!r} never calls the policy")
        else:
            later = [f"after a cancelled rollout, {what}" for what in await self._repeat([earlier])]
            self._report.check(
                "cancellation",
                [*([wrong] if wrong else []), *later],
                good="a cancelled rollout ends, and later ones are as before",
                remedy="Let asyncio.CancelledError pass: catch Exception, never BaseException; clean up in `finally`.",
            )
        late = await fail_rollout(self._environment, task)
        self._report.check(
            "late engine",
            [late] if late else [],
            good="a rollout ends when the engine does not answer in time",
            remedy="Let DeadlineExceeded pass, or end the episode: the policy has waited long enough already.",
        )

    async def _check_its_own(self) -> None:
        """Run the environment's own checks, which go beyond the contract."""
        if isinstance(self._environment, SelfChecked) and self._tasks:
            task = self._tasks[0]
            self._report.findings += await self._environment.own_findings(task, ScriptedPolicy(EMPTY, task))

    async def _closes(self) -> None:
        problems = await self._trouble(self._environment.close(), self._deadline_s)
        problems += [
            f"{each}, the second time" for each in await self._trouble(self._environment.close(), self._deadline_s)
        ]
        await asyncio.sleep(0.05)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            problems.append(f"{len(left)} asyncio tasks still run afterwards, {_name(left[0])} among them")
        self._report.check(
            "closes",
            problems,
            good="closed twice, nothing left running",
            remedy=(f"{CATCHES_ALL} " if any(CAUGHT in one for one in problems) else "")
            + "close() may be called twice, and ends whatever open() and the rollouts started.",
        )

    async def _made_anew(self, earlier: Sequence[Outcome], watch: Watch) -> None:
        """Make the environment again, as a resume does: it must have the same tasks and the same scores."""
        with watch.off():
            problems = await self._trouble(self._open(), OPEN_DEADLINE_S)
            opened = not problems
            for split in self._splits if opened else ():
                again = look_at(self._environment, split.name, at=list(split.tasks)[:: max(len(split.tasks) // 50, 1)])
                problems += [
                    f"tasks({split.name!r})[{index}] is another task"
                    for index, task in again.tasks.items()
                    if portrait(task) != portrait(split.tasks[index])
                ]
        if opened:
            problems += await self._repeat(earlier[: 2 * len(self._tasks)])
            problems += await self._trouble(self._environment.close(), self._deadline_s)
        self._report.check(
            "made anew",
            problems,
            good="a second instance has the same tasks and runs them alike"
            if self._environment.repeats
            else "a second instance has the same tasks, and runs them",
            remedy="Order and content of the tasks may depend only on the options: sort what is listed, seed what is shuffled.",
        )

    async def _trouble(self, work: Any, deadline_s: float) -> list[str]:
        """Await `work`, and describe what it raised. Work that catches its own cancellation is left behind."""

        async def awaited() -> None:
            await work

        task = asyncio.ensure_future(awaited())
        try:
            await asyncio.wait({task}, timeout=deadline_s)
            if not task.done():
                caught = await cancel(task)
                return [
                    f"{getattr(work, '__qualname__', 'it')}() did not end within {deadline_s:g} s{CAUGHT if caught else ''}"
                ]
            if task.cancelled():
                return ["raised asyncio.CancelledError, though nothing cancelled it"]
            task.result()
        except (Exception, Blocked) as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            return [of_error(error)]
        finally:
            task.cancel()
        return []


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))
