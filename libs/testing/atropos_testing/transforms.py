"""The contract of a transform: it returns some of its groups, in their order, with finite advantages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from atropos_core.codec import encode_bytes
from atropos_core.interfaces import Finding, Stateful, Transform
from atropos_core.types import ScoredGroup
from atropos_testing import eventloop
from atropos_testing.report import RAISED, Report, of_error
from atropos_testing.samples import make_group, make_groups
from atropos_testing.subject import Subject

CHECKS = ("opens", "odd steps", "order", "advantages", "groups unchanged", "same again", "state")
DEADLINE_S = 60.0


class TransformContract:
    """Checks one transform on made-up steps."""

    def __init__(self, subject: Subject, *, skip: Sequence[str] = ()) -> None:
        self._subject = subject
        self._report = Report(CHECKS, skip)
        self._errors: list[str] = []

    def findings(self) -> list[Finding]:
        eventloop.run(self._check())
        return self._report.findings

    async def _check(self) -> None:
        problems = []
        try:
            self._subject.make()
        except RAISED as error:  # the plugin boundary: a transform's code
            problems.append(of_error(error))
        if not self._report.check("opens", problems, good="built", remedy="Everything else is checked once it builds."):
            return
        steps = {
            "no groups": [],
            "flat groups alone": [make_group(0, (1, 1, 1)), make_group(1, (0, 0, 0))],
            "groups of one": [make_group(0, (1,)), make_group(1, (0,))],
            "one group": [make_group(0, (0, 1))],
            "groups of several sizes": [make_group(0, (0, 1)), make_group(1, (0, 1, 2, 3, 4))],
            "ordinary groups": make_groups(),
        }
        before = {name: [encode_bytes(group) for group in groups] for name, groups in steps.items()}
        given = {name: await self._apply(self._subject.make(), groups, name) for name, groups in steps.items()}
        self._report.check(
            "odd steps",
            self._errors,
            good=f"{len(steps)} steps, empty and flat ones among them",
            remedy="A step may be empty, and a group flat or of one episode: give what is left.",
        )
        self._report.check(
            "order",
            [
                f"{name}: {wrong}"
                for name, groups in given.items()
                if groups is not None and (wrong := _misplaced(steps[name], groups))
            ],
            good="groups come back in their order, each once",
            remedy="Return a part of the groups, in the order given; never one of your own.",
        )
        kept = [group for groups in given.values() if groups is not None for group in groups]
        self._report.check(
            "advantages",
            [wrong for group in kept if (wrong := _bad_advantages(group))],
            good=_how_many(kept),
            remedy="Advantages are finite, one an episode: group.with_advantages(values[G]).",
        )
        changed = [name for name, groups in steps.items() if [encode_bytes(group) for group in groups] != before[name]]
        self._report.check(
            "groups unchanged",
            [f"{name}: changed in place" for name in changed],
            good="the groups given are as they were",
            remedy="Groups are shared with the hub and the sinks: use dataclasses.replace and copies of arrays.",
        )
        await self._check_again()

    async def _check_again(self) -> None:
        """Make the transform again and load its state, as a resume does."""
        first: Any = self._subject.make()  # a Transform, and perhaps Stateful as well
        second = self._subject.make()
        problems = []
        for step in range(3):
            one, other = [
                _portrait(await self._apply(each, make_groups(10 * step), "again")) for each in (first, second)
            ]
            if one != other:
                problems.append(f"step {step}: two instances give different groups")
        self._report.check(
            "same again",
            problems,
            good="two instances give the same, step by step",
            remedy="Leave chance out, or seed it from the RunContext.",
        )
        if isinstance(first, Stateful):
            await self._check_state(first)

    async def _check_state(self, first: Any) -> None:
        problems = []
        try:
            third = self._subject.make()
            third.load(json.loads(json.dumps(first.state())))
            one, other = [_portrait(await self._apply(each, make_groups(90), "resumed")) for each in (first, third)]
            if one != other:
                problems.append("with the state loaded, a new instance gives other groups than the old one")
        except RAISED as error:  # the plugin boundary: a transform's code
            problems.append(of_error(error))
        self._report.check(
            "state",
            problems,
            good="saved as JSON, loaded, and gone on with",
            remedy="state() gives JSON values, and load() takes up exactly there.",
        )

    async def _apply(self, transform: Transform, groups: Sequence[ScoredGroup], name: str) -> list[ScoredGroup] | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return list(await transform(groups))
        except RAISED as error:  # the plugin boundary: a transform's code
            self._errors.append(f"{name}: {of_error(error)}")
            return None


def _misplaced(given: Sequence[ScoredGroup], back: Sequence[ScoredGroup]) -> str:
    order = {group.draw.id: at for at, group in enumerate(given)}
    strangers = [group.draw.id for group in back if group.draw.id not in order]
    if strangers:
        return f"draw {strangers[0]} was never given"
    positions = [order[group.draw.id] for group in back]
    return "" if positions == sorted(set(positions)) else f"groups {positions} came back, by their positions before"


def _bad_advantages(group: ScoredGroup) -> str:
    columns = [] if group.advantages is None else [("advantages", group.advantages, (len(group.episodes),))]
    for episode in group.episodes:
        for rollout in episode.rollouts:
            if rollout.advantages is not None:
                columns.append(("token advantages", rollout.advantages, rollout.tokens.shape))
    for name, values, shape in columns:
        if np.shape(values) != shape:
            return f"rewards {group.rewards.tolist()}: {name} of shape {np.shape(values)}, not {shape}"
        if not np.isfinite(values).all():
            return f"rewards {group.rewards.tolist()}: {name} {np.asarray(values).tolist()[:8]} are not all finite"
    return ""


def _how_many(groups: Sequence[ScoredGroup]) -> str:
    have = sum(group.advantages is not None for group in groups)
    return f"{have} of {len(groups)} groups have them, all finite" if have else "it gives none: another transform must"


def _portrait(groups: Sequence[ScoredGroup] | None) -> list[bytes]:
    return [encode_bytes(group) for group in groups or ()]
