"""The contract of a teacher: it returns the groups in their order, with annotations of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from atropos_core.codec import encode_bytes
from atropos_core.types import Rollout, ScoredGroup
from atropos_testing.samples import make_group, make_groups
from atropos_testing.stages import StagedContract


class TeacherContract(StagedContract):
    """Checks one teacher on made-up groups."""

    stages = {  # noqa: RUF012 - ClassVar of the base
        "odd steps": ("no groups, and groups of one", "A step may be empty, and a group of one episode."),
        "same groups": (
            "the same groups, in their order",
            "annotate() gives every group that it was given, in that order, and changes nothing but Rollout.teacher.",
        ),
        "annotations": (
            "what it says is of every position",
            "Rollout.teacher has an entry for each token and log-probabilities of at most 0; entry t is of the "
            "distribution that predicts token t, and entry 0 has none.",
        ),
        "groups unchanged": ("the groups given are as they were", "Use dataclasses.replace: groups are shared."),
        "same again": ("the same twice", "Leave chance out."),
    }  # fmt: skip

    async def check_odd_steps(self) -> Sequence[str]:
        wrong = []
        for name, groups in {"no groups": [], "a group of one": [_small(make_group(0, (1,)))]}.items():
            if len(back := await self.made.annotate(groups)) != len(groups):
                wrong.append(f"{name}: {len(groups)} were given and {len(back)} came back")
        return wrong

    async def check_same_groups(self) -> Sequence[str]:
        given = self._groups()
        back = list(await self.made.annotate(given))
        if [group.draw.id for group in back] != [group.draw.id for group in given]:
            return [
                f"draws {[group.draw.id for group in given]} were given, and {[group.draw.id for group in back]} came back"
            ]
        plain = [encode_bytes(_without_teacher(group)) for group in given]
        return [
            f"group {at} came back with more changed than Rollout.teacher"
            for at, group in enumerate(back)
            if encode_bytes(_without_teacher(group)) != plain[at]
        ]

    async def check_annotations(self) -> Sequence[str]:
        wrong, said = [], 0
        for rollout in _rollouts(await self.made.annotate(self._groups())):
            if rollout.teacher is None:
                continue
            said += 1
            if len(rollout.teacher.offsets) != len(rollout.tokens) + 1:
                wrong.append(f"{len(rollout.teacher.offsets) - 1} positions of {len(rollout.tokens)} tokens")
            elif rollout.teacher.offsets[1] != 0:
                wrong.append("it says something of the first token, which nothing predicts")
            elif len(rollout.teacher.logprobs) and rollout.teacher.logprobs.max() > 1e-4:
                wrong.append(f"a log-probability of {rollout.teacher.logprobs.max():.3g}")
        if not said:
            self.report.note("says", "nothing of any of these groups")
        return wrong

    async def check_groups_unchanged(self) -> Sequence[str]:
        groups = self._groups()
        before = [encode_bytes(group) for group in groups]
        await self.made.annotate(groups)
        return [f"group {i} was changed in place" for i, group in enumerate(groups) if encode_bytes(group) != before[i]]

    async def check_same_again(self) -> Sequence[str]:
        one, other = [list(map(encode_bytes, await self.made.annotate(self._groups()))) for _ in range(2)]
        return [] if one == other else ["two calls give different annotations of the same groups"]

    def _groups(self) -> list[ScoredGroup]:
        return [_small(group) for group in make_groups()]


def _small(group: ScoredGroup) -> ScoredGroup:
    """Return the group with token ids that every vocabulary has."""
    return _with_rollouts(group, lambda rollout: replace(rollout, tokens=(rollout.tokens % 32).astype(np.int32)))


def _without_teacher(group: ScoredGroup) -> ScoredGroup:
    return _with_rollouts(group, lambda rollout: replace(rollout, teacher=None))


def _with_rollouts(group: ScoredGroup, change: Callable[[Rollout], Rollout]) -> ScoredGroup:
    return replace(
        group,
        episodes=tuple(replace(one, rollouts=tuple(change(each) for each in one.rollouts)) for one in group.episodes),
    )


def _rollouts(groups: Sequence[ScoredGroup]) -> Iterator[Rollout]:
    for group in groups:
        for episode in group.episodes:
            yield from episode.rollouts
