"""The contract of an environment: its tasks, its plays under scripted policies, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from atropos_core.interfaces import Environment, Finding
from atropos_core.testing import eventloop
from atropos_core.testing.eventloop import Watch, watched
from atropos_core.testing.leaks import check_leaks
from atropos_core.testing.lifetimes import cancel_a_play, fail_a_play
from atropos_core.testing.plays import Played, attempt, difference, has_own_group, wrong_with
from atropos_core.testing.replies import ADVERSARIAL, EMPTY, ORACLE, RANDOM, hedges, stands_in
from atropos_core.testing.report import Report, brief, of_error
from atropos_core.testing.scripted import Script, ScriptedPolicy
from atropos_core.testing.subject import Subject
from atropos_core.testing.tasks import check_tasks, look_at, portrait
from atropos_core.testing.tasks import wrong_with as wrong_with_task
from atropos_core.types import Episode, Failed, Task

CHECKS = (
    "opens", "tasks", "stable tasks", "unique ids", "splits", "no leaks", "plays", "episodes", "groups", "oracle",
    "no hedging", "adversarial replies", "same again", "plays at once", "cancellation", "late engine", "event loop",
    "closes",
)  # fmt: skip
SEED = 20260131
SPREAD_S = 0.02  # replies overtake one another by up to this
GROUP = 4
TASKS = 6


class EnvironmentContract:
    """Checks one environment. `tasks` are how many of its tasks are played, `deadline_s` what one play may take."""

    def __init__(self, subject: Subject, *, tasks: int = TASKS, deadline_s: float = 30.0, skip: Sequence[str] = ()) -> None:
        self._subject = subject
        self._played_tasks = tasks
        self._deadline_s = deadline_s
        self._report = Report(CHECKS, skip)
        self._environment: Environment
        self._tasks: list[Task] = []  # those that are played

    def findings(self) -> list[Finding]:
        eventloop.run(self._check())
        return self._report.findings

    async def _check(self) -> None:
        with watched() as watch:
            if not await self._open():
                return
            try:
                if self._look():
                    await self._play()
            finally:
                await self._close()
            self._check_event_loop(watch)

    # -- what needs no play

    async def _open(self) -> bool:
        problems = []
        try:
            self._environment = self._subject.make()
            async with asyncio.timeout(self._deadline_s):
                await self._environment.open()
        except (Exception, eventloop.Blocked) as error:  # noqa: BLE001 - the plugin boundary
            problems.append(of_error(error) if str(error) else f"open() did not end within {self._deadline_s:g} s")
        return self._report.check(
            "opens", problems, good="built and opened", remedy="Everything else is checked once the environment opens."
        )

    def _look(self) -> bool:
        train, test = look_at(self._environment, "train"), look_at(self._environment, "test")
        check_tasks(self._report, train, test)
        whole = [task for task in (*train.tasks.values(), *test.tasks.values()) if not wrong_with_task(task)]
        check_leaks(self._report, whole)
        self._answers = list(dict.fromkeys(str(task.answer) for task in whole if task.answer is not None))
        chosen = [task for task in train.tasks.values() if not wrong_with_task(task)]
        step = max(len(chosen) // self._played_tasks, 1)
        self._tasks = chosen[::step][: self._played_tasks]
        return bool(self._tasks)

    # -- plays

    async def _play(self) -> None:
        self._portraits = [portrait(task) for task in self._tasks]
        before = {script.name: await self._each(script) for script in (RANDOM, EMPTY, ORACLE)}
        hedged = [await self._each(script) for script in hedges(self._answers)]
        hostile = [await self._each(script) for script in ADVERSARIAL]
        everything = [*before.values(), *hedged, *hostile]
        self._check_plays([played for plays in everything for played in plays])
        await self._check_groups()
        self._check_oracle(before)
        self._check_cheap("no hedging", [played for plays in hedged for played in plays], before[ORACLE.name])
        self._check_cheap("adversarial replies", [played for plays in hostile for played in plays], before[ORACLE.name])
        await self._check_same_again(before)
        await self._check_at_once(before)
        await self._check_lifetimes(before)

    async def _each(self, script: Script) -> list[Played]:
        return [await self._one(task, script) for task in self._tasks]

    async def _one(self, task: Task, script: Script, spread_s: float = 0.0) -> Played:
        return await attempt(
            self._environment, task, script, seed=SEED, deadline_s=self._deadline_s, spread_s=spread_s
        )

    def _check_plays(self, plays: Sequence[Played]) -> None:
        self._report.check(
            "plays",
            [f"{played.label}: {played.error}" for played in plays if played.episode is None],
            good=f"{len(plays)} plays of {len(self._tasks)} tasks, each ended in an episode",
            remedy="Score whatever the policy says: a reply that cannot be read is a wrong reply, not an error.",
        )
        scores = [played.score for played in plays if played.episode is not None]
        within = f"scores from {np.nanmin(scores):g} to {np.nanmax(scores):g}" if np.isfinite(scores).any() else ""
        self._report.check(
            "episodes",
            [each for played in plays if played.episode is not None for each in wrong_with(played)],
            good=within,
            remedy="Return an Episode with a finite score, made by Conversation.episode(), which keeps tokens as sampled.",
        )

    async def _check_groups(self) -> None:
        task, seeds = self._tasks[0], [SEED + member for member in range(GROUP)]
        policy = ScriptedPolicy(RANDOM, task, spread_s=SPREAD_S)
        problems = []
        try:
            async with asyncio.timeout(self._deadline_s):
                played = await self._environment.play_group(task, policy, GROUP, seeds=seeds)
            if len(played) != GROUP:
                problems.append(f"play_group() was asked for {GROUP} plays and gave {len(played)}")
            for one in played:
                if isinstance(one, BaseException):
                    problems.append(f"a play of the group failed: {of_error(one)}")
                elif not isinstance(one, Episode | Failed):
                    problems.append(f"a play of the group is a {type(one).__name__}")
        except (Exception, eventloop.Blocked) as error:  # noqa: BLE001 - the plugin boundary
            problems.append(f"play_group() failed: {of_error(error)}")
        self._report.check(
            "groups",
            problems,
            good=f"{GROUP} plays of one task, by {'its own' if has_own_group(self._environment) else 'the'} play_group",
            remedy="play_group returns one Episode, Failed or exception for each of the seeds.",
        )

    def _check_oracle(self, plays: dict[str, list[Played]]) -> None:
        rows = [
            (oracle, noise, empty)
            for oracle, noise, empty in zip(plays["oracle"], plays["random"], plays["empty"], strict=True)
            if oracle.task.answer is not None and oracle.episode is not None
        ]
        if not rows:
            self._report.note("oracle", "no task has an answer to reply with")
            return
        problems = []
        for oracle, _, _ in rows:
            assert oracle.episode is not None, "filtered above"
            if oracle.episode.correct is False:
                problems.append(
                    f"task {oracle.task.id!r}: replying its own answer {brief(str(oracle.task.answer), 40)} is not correct"
                    f" (score {oracle.score:g})"
                )
        best = float(np.mean([oracle.score for oracle, _, _ in rows]))
        for name, at in (("random", 1), ("empty", 2)):
            other = float(np.mean([row[at].score for row in rows if row[at].episode is not None] or [-np.inf]))
            if not best > other:
                problems.append(f"the tasks' own answers score {best:g} on average, {name} replies {other:g}")
        self._report.check(
            "oracle",
            problems,
            good=f"the tasks' own answers score {best:g} on average",
            remedy="Task.answer is what a perfect policy would reply, in the form that the score wants; or None.",
        )

    def _check_cheap(self, name: str, plays: Sequence[Played], oracle: Sequence[Played]) -> None:
        """No reply that was written without looking at the task earns what its answer earns."""
        best = {played.task.id: played for played in oracle if played.episode is not None}
        problems = []
        asked = 0
        for played in plays:
            task = played.task
            if played.episode is None or task.answer is None or task.id not in best:
                continue
            reply = played.script.reply(task, played.seed)
            if name == "adversarial replies" and stands_in(task.answer, reply):
                continue  # by chance
            asked += 1
            paid = played.correct
            if played.episode.correct is None:
                paid = bool(reply) and played.score >= best[task.id].score
            if paid:
                problems.append(f"{played.label}: {brief(reply, 50)} is scored {played.score:g} as if it were the answer")
        if not asked:
            self._report.note(name, "no task has an answer to be mistaken for")
            return
        self._report.check(
            name,
            problems,
            good=f"none of {asked} such replies counts as correct",
            remedy="Let one reply give one answer: compare the last number, or what stands in the last tag, with the answer.",
        )

    # -- the same again

    async def _check_same_again(self, before: dict[str, list[Played]]) -> None:
        earlier = [*before[RANDOM.name], *before[ORACLE.name]]
        problems = await self._compare(earlier, [await self._one(each.task, each.script) for each in earlier])
        changed = [
            f"task {task.id!r} was changed by its plays"
            for task, then in zip(self._tasks, self._portraits, strict=True)
            if portrait(task) != then
        ]
        self._report.check(
            "same again",
            [*problems, *changed],
            good=f"{len(earlier)} plays repeated: tokens, scores and parts are the same",
            remedy="Derive everything random from the play's seed (atropos_core.seeds.derive), and keep no state between plays.",
        )

    async def _check_at_once(self, before: dict[str, list[Played]]) -> None:
        earlier = [*before[RANDOM.name], *before[ORACLE.name], *before[EMPTY.name]]
        again = await asyncio.gather(*(self._one(each.task, each.script, SPREAD_S) for each in earlier * 2))
        problems = await self._compare(earlier * 2, again)
        self._report.check(
            "plays at once",
            problems,
            good=f"{len(again)} plays at once gave what each gives alone",
            remedy="Keep what belongs to a play in local variables, not on self: many plays run at once.",
        )

    async def _compare(self, earlier: Sequence[Played], later: Sequence[Played]) -> list[str]:
        pairs = zip(earlier, later, strict=True)
        return [f"{then.label}: {what}" for then, now in pairs if (what := difference(then, now))]

    # -- when things go wrong

    async def _check_lifetimes(self, before: dict[str, list[Played]]) -> None:
        task = self._tasks[0]
        wrong = await cancel_a_play(self._environment, task)
        remedy = "Let asyncio.CancelledError pass: catch Exception, never BaseException, and clean up in `finally`."
        if wrong is None:
            self._report.note("cancellation", f"a play of task {task.id!r} never asks the policy")
        else:
            then = before[RANDOM.name][0]
            after = await self._one(task, RANDOM)
            problems = [wrong] if wrong else []
            problems += [f"after a cancelled play, {what}" for what in await self._compare([then], [after])]
            self._report.check("cancellation", problems, good="a cancelled play ends, later ones are as before", remedy=remedy)
        late = await fail_a_play(self._environment, task)
        self._report.check(
            "late engine",
            [late] if late else [],
            good="a play ends when the engine does not answer in time",
            remedy="Let DeadlineExceeded pass, or end the episode: the policy has waited long enough already.",
        )

    async def _close(self) -> None:
        problems = []
        try:
            for _ in range(2):
                async with asyncio.timeout(self._deadline_s):
                    await self._environment.close()
        except (Exception, eventloop.Blocked) as error:  # noqa: BLE001 - the plugin boundary
            problems.append(of_error(error))
        await asyncio.sleep(0.05)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            problems.append(f"{len(left)} tasks still run after close(), {_name(left[0])} among them")
        self._report.check(
            "closes", problems, good="closed twice, nothing left running", remedy="close() may be called twice, and ends what open() and the plays started."
        )

    def _check_event_loop(self, watch: Watch) -> None:
        if not watch.active:
            self._report.note("event loop", "not watched: the check does not run in the main thread")
            return
        self._report.check(
            "event loop",
            [f"{where} held it for {eventloop.BLOCKED_AFTER_S:g} s" for where in dict.fromkeys(watch.blocked)],
            good=f"never held for longer than {max(watch.longest_s, 0):.2f} s",
            remedy="Await whatever takes long: asyncio.sleep, an async client, asyncio.to_thread for computations.",
        )
        if not watch.blocked and watch.longest_s > eventloop.NOTED_AFTER_S:
            self._report.note("event loop", "while it is held no other play proceeds; long computations belong into asyncio.to_thread")


def _name(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()  # a coroutine, or another awaitable without a name
    return getattr(coroutine, "__qualname__", task.get_name())
