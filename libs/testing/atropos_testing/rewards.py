"""The contract of a reward: one finite number per episode, the same each time, whatever other calls run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_core.codec import encode_bytes
from atropos_core.interfaces import Finding, Reward
from atropos_core.training.parts import Openable
from atropos_core.turn_rewards import split_scores
from atropos_core.types import Episode, Floats, Task
from atropos_testing import eventloop
from atropos_testing.eventloop import Blocked, watched
from atropos_testing.replies import ADVERSARIAL
from atropos_testing.report import RAISED, Report, brief, of_error
from atropos_testing.samples import make_episode, make_task
from atropos_testing.subject import Subject

CHECKS = (
    "opens",
    "shape",
    "hostile replies",
    "same again",
    "order",
    "calls at once",
    "episodes unchanged",
    eventloop.EVENT_LOOP,
    "closes",
)
PATIENCE = 2  # calls that do not end, before no more are made
OPEN_DEADLINE_S = 300.0  # a model may have to be loaded


class RewardContract:
    """Checks one reward on the episodes of one task, with optional `answer` and `data`."""

    def __init__(
        self,
        subject: Subject,
        *,
        answer: str = "42",
        data: Mapping[str, Any] | None = None,
        deadline_s: float = 60.0,
        skip: Sequence[str] = (),
    ) -> None:
        self._subject = subject
        self._task = make_task(answer, **dict(data or {}))
        self._deadline_s = deadline_s
        self._report = Report(CHECKS, skip)
        self._reward: Reward
        self._errors: list[str] = []
        self._unended = 0

    def findings(self) -> list[Finding]:
        eventloop.run(self._check())
        return self._report.findings

    async def _check(self) -> None:
        problems = await self._open()
        if not self._report.check(
            "opens", problems, good="built and opened", remedy="Everything else is checked once the reward opens."
        ):
            return
        with watched() as watch:
            await self._check_calls()
        watch.tell(
            self._report, 'Add runs_in="process" to the Provider, so that heavy grading runs in a child process.'
        )
        await self._closes()

    async def _open(self) -> list[str]:
        """Build the reward, and await its `open()` if it has one, as a run does. Return what went wrong."""
        try:
            self._reward = self._subject.make()
            async with asyncio.timeout(OPEN_DEADLINE_S):
                if isinstance(self._reward, Openable):
                    await self._reward.open()
        except TimeoutError:
            return [f"open() did not end within {OPEN_DEADLINE_S:g} s"]
        except RAISED as error:  # the plugin boundary: a reward's code
            return [of_error(error)]
        return []

    async def _check_calls(self) -> None:
        task = self._task
        answer = str(task.answer)
        replies = [
            answer,
            "41",
            "",
            f"So it is {answer}.",
            f"#### {answer}",
            f"<think>hm</think>{answer}",
            "no idea",
            answer,
        ]
        usual = [make_episode(task, reply, float(reply == answer)) for reply in replies]
        hostile = [make_episode(task, script.reply(task, 0)) for script in ADVERSARIAL]
        before = [encode_bytes(episode) for episode in (*usual, *hostile)]
        whole = await self._call(usual)
        self._report_errors(
            "shape", [usual, usual[:1], usual[:2]], [whole, await self._call(usual[:1]), await self._call(usual[:2])]
        )
        answers = [await self._call([episode]) for episode in hostile]
        self._report_errors("hostile replies", [[episode] for episode in hostile], answers)
        if whole is None:
            return
        again = await self._call(usual)
        self._report.check(
            "same again",
            _differ(whole, again, "called twice"),
            good="the same answer twice",
            remedy="Leave chance and memory out of a reward.",
        )
        order = np.random.default_rng(0).permutation(len(usual))
        turned = await self._call([usual[at] for at in order])
        self._report.check(
            "order",
            _differ(whole[order], turned, "in another order"),
            good="rewards follow their episodes",
            remedy="An episode's reward must not depend on its place in the group.",
        )
        other = [make_episode(task, "another reply"), *usual[:3]]
        alone = await self._call(other)
        at_once = await asyncio.gather(*(self._call(episodes) for episodes in [usual, other] * 4))
        problems = [each for got in at_once[::2] for each in _differ(whole, got, "beside other calls")]
        if alone is not None:
            problems += [each for got in at_once[1::2] for each in _differ(alone, got, "beside other calls")]
        self._report.check(
            "calls at once",
            problems,
            good="8 calls at once gave the same as one after another",
            remedy="Keep what belongs to a call in local variables.",
        )
        changed = [f"episode {i}" for i, e in enumerate((*usual, *hostile)) if encode_bytes(e) != before[i]]
        self._report.check(
            "episodes unchanged",
            changed,
            good="episodes are as they were",
            remedy="Episodes belong to the run: copy what you change.",
        )

    async def _call(self, episodes: Sequence[Episode], task: Task | None = None) -> Floats | None:
        """Return the rewards, or None after adding to `_errors`. A reward that does not return is not called again."""
        if self._unended >= PATIENCE:
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._reward(task or self._task, episodes)
            given = np.asarray(split_scores(answer, episodes)[0])
        except (TimeoutError, Blocked) as error:
            self._unended += 1
            self._errors.append(str(error) or f"no answer within {self._deadline_s:g} s")
            return None
        except RAISED as error:  # the plugin boundary: a reward's code
            self._errors.append(f"{_replies(episodes)}: {of_error(error)}")
            return None
        if given.shape != (len(episodes),):
            self._errors.append(f"shape {given.shape} for {len(episodes)} episodes")
            return None
        if given.dtype.kind not in "biuf" or not np.isfinite(given.astype(np.float32)).all():
            self._errors.append(f"{_replies(episodes)}: {brief(repr(given.tolist()))}, not all finite numbers")
            return None
        return given.astype(np.float32)

    def _report_errors(self, name: str, calls: Sequence[Sequence[Episode]], given: Sequence[Floats | None]) -> None:
        values = [value for rewards in given if rewards is not None for value in rewards.tolist()]
        self._report.check(
            name,
            self._errors,
            good=f"{len(calls)} calls; rewards from {min(values, default=0):g} to {max(values, default=0):g}",
            remedy="Give one finite number for each episode, [G], whatever its reply is.",
        )
        self._errors = []

    async def _closes(self) -> None:
        close = getattr(self._reward, "close", None)
        if close is None:
            return
        problems = []
        try:
            for _ in range(2):
                await close()
        except RAISED as error:  # the plugin boundary: a reward's code
            problems.append(of_error(error))
        self._report.check("closes", problems, good="closed twice", remedy="close() may be called twice.")


def _differ(one: Floats, other: Floats | None, when: str) -> list[str]:
    if other is None:
        return [f"no answer {when}"]
    return (
        []
        if np.array_equal(one, other)
        else [f"{brief(repr(one.tolist()))} in a single call, {brief(repr(other.tolist()))} {when}"]
    )


def _replies(episodes: Sequence[Episode]) -> str:
    first = brief(str(episodes[0].messages[-1]["content"]), 30)
    return f"reply {first}" if len(episodes) == 1 else f"{len(episodes)} replies, {first} first"
