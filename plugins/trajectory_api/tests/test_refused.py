"""Groups that the server refuses: the worker continues, the trainer hears why, and the draw is settled."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atropos_core.conversation import Policy
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.types import Episode, Failed, Task
from atropos_trajectory_api.roles.environment_worker import Shift, WorkerOptions
from atropos_trajectory_client.client import Api, SessionSpec, TrainerSession, Worker, WorkerSpec
from plugins.trajectory_api.tests.sent_groups import SAMPLING, drawn, group_of, serving

MEMBERS = 4
HUB_MB, BODY_MB = 0.4, 0.8
LONG = "long " * 101


def episode(mb: float = 0.001, **changes: Any) -> Episode:
    """`mb` are those of a group of it: a frame has columns that several members share once."""
    [one] = group_of(drawn(0), int(mb * 1e6 / 8), members=1).episodes
    return replace(one, **changes)


PLAYS: tuple[
    tuple[str, Episode | Failed, str], ...
] = (  # a task's id, what each of its rollouts gives, what is refused
    ("fine", episode(), ""),
    ("a metric that is none", episode(metrics={"depth": math.nan}), r"metrics\['depth'\] is nan"),
    (f"{LONG}id", episode(), "task.id has [0-9]+ characters, more than 500"),
    (
        f"{LONG}id of rollouts that failed",
        Failed("it broke", "rollout"),
        "task.id has [0-9]+ characters, more than 500",
    ),
    ("half of a pair: \ud800", episode(), "half of a surrogate pair"),
    ("what has no encoding", episode(messages=({"role": object()},)), "has no encoding"),
    ("for no hub", episode(0.6), r"more than the whole hub \(0.4 MB"),
    ("for no body", episode(1.2), "the limit is 0.8 MB|more than the 800,000"),
    ("for no body by far", episode(6.0), "the limit is 0.8 MB|more than the 800,000"),
    ("fine as well", episode(), ""),
)


class Odd(Environment):
    def tasks(self, split: Any) -> list[Task]:
        return [Task(name, ()) for name, _, _ in PLAYS]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Any:
        return next(group_of for name, group_of, _ in PLAYS if name == task.id)


@pytest.mark.parametrize("same_host", [False, True], ids=["http", "ring"])
async def test_a_worker_goes_on_after_each_group_that_is_refused_and_the_trainer_hears_why(
    same_host: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    limits = ("--hub-mb", str(HUB_MB), "--body-mb", str(BODY_MB))
    with serving(tmp_path, *limits, same_host=same_host) as server:
        api, stop, environments = Api(server.url), asyncio.Event(), {"words": Odd()}
        trainer = await TrainerSession.open(api, SessionSpec("run", MEMBERS, 1, SAMPLING, 1))
        worker = await Worker.register(api, WorkerSpec("one", "words", len(PLAYS)))
        assert (worker._ring is not None) == same_host
        nothing: Any = None
        runner = RolloutRunner(environments, (), nothing, nothing, deadline_s=10, deterministic=False)
        shift = asyncio.create_task(Shift(worker, lambda deadline_s: runner, WorkerOptions("words", 2), stop).run())
        try:
            await trainer.offer_draws([drawn(number) for number in range(len(PLAYS))])
            causes: dict[int, str] = {}
            async with asyncio.timeout(60):
                while len(causes) < len(PLAYS) and not shift.done():
                    answer = await trainer.lease(1, 0, 0.5)
                    causes |= {group.draw.id: group.failed[0].cause for group in answer.failed}
                    causes |= {group.draw.id: "" for _, group in answer.entries}
                    await trainer.commit([number for number, _ in answer.entries])
            stop.set()
            assert await asyncio.wait_for(shift, 10) == sum(not why for _, _, why in PLAYS)
            assert sorted(causes) == list(range(len(PLAYS)))
            for number, (_, _, why) in enumerate(PLAYS):
                assert re.search(why or "^$", causes[number])
            assert (await api.status())["draws"] == {"waiting": 0, "playing": 0}
            assert "half of a pair" in capsys.readouterr().err
        finally:
            shift.cancel()
            await asyncio.gather(shift, return_exceptions=True)
            await worker.close()
            await trainer.close()
            await api.close()
