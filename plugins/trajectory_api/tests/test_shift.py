"""A worker's shift: how many draws it asks for, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atropos_core.conversation import Policy
from atropos_core.errors import AccessRefused, HubFull
from atropos_core.interfaces import Environment
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.types import Draw, Sampling, ScoredGroup, Task
from atropos_trajectory_api.roles.environment_worker import Shift, WorkerOptions
from atropos_trajectory_api.service.draws import Draws, Rules
from atropos_trajectory_client.worker import Assignment
from plugins.trajectory_api.tests.sent_groups import drawn, group_of

RULES = Rules(4, 1, Sampling())


class Server:
    """The worker's end of one, without the wire."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []  # draw ids, by answer
        self.asked = 0
        self.sent: list[int] = []
        self.puts: list[tuple[str, int]] = []
        self.failures: list[ScoredGroup] = []
        self.full = 0  # puts that find no room
        self.keys = 0
        self.deadline_s: float | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draws_offered = Draws()
        self.draws_offered.begin(RULES, (), anew=True)

    def offer(self, *numbers: int) -> None:
        self.draws_offered.offer([drawn(number) for number in numbers], {})

    async def draws(self, n: int, wait_s: float = 20.0) -> Assignment:
        self.asked += 1
        await asyncio.sleep(0.001)  # a call takes its time
        draws = await self.draws_offered.take("w", "words", n, wait_s)
        if draws:
            self.given.append([draw.id for draw in draws])
        rules = self.draws_offered.rules
        size, least = (rules.group_size, rules.min_group) if rules else (0, 0)
        return Assignment(tuple(draws), size, least, RULES.sampling, 0, self.deadline_s)

    def new_key(self) -> str:
        self.keys += 1
        return str(self.keys)

    async def put(self, group: ScoredGroup, *, deadline_s: float, key: str) -> int:
        self.puts.append((key, group.draw.id))
        if self.full:
            self.full -= 1
            raise HubFull("no room")
        self.sent.append(group.draw.id)
        return group.draw.id

    async def failed(self, group: ScoredGroup) -> None:
        self.failures.append(group)

    async def drain(self) -> None: ...


class Plays:
    """Each draw ends when it is let go."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Event] = {}

    def schedule_keys(self, draw: Draw, n: int) -> list[Any]:
        return []

    async def run(self, draw: Draw, *given: Any) -> ScoredGroup:
        self.running[draw.id] = asyncio.Event()
        await self.running[draw.id].wait()
        del self.running[draw.id]
        return group_of(draw)

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.running[number].set()


def shift_of(server: Server, plays: Any, stop: asyncio.Event) -> Shift:
    return Shift(server, lambda deadline_s: plays, WorkerOptions("words", 4), stop)  # type: ignore[arg-type]


async def test_draws_that_come_together_are_taken_together_though_rollouts_ended_one_by_one():
    server, plays, stop = Server(), Plays(), asyncio.Event()
    shift = asyncio.create_task(shift_of(server, plays, stop).run())
    try:
        server.offer(0, 1, 2, 3)
        await until(lambda: len(plays.running) == 4)
        for number in range(4):
            plays.let_go(number)
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        server.offer(*range(4, 10))
        await until(lambda: len(plays.running) == 4)
        assert server.given == [[0, 1, 2, 3], [4, 5, 6, 7]]
        plays.let_go(5, 6)
        await until(lambda: plays.running.keys() == {4, 7, 8, 9})
        assert server.given[2:] in ([[8, 9]], [[8], [9]])
    finally:
        stop.set()
        await until(lambda: shift.done() or bool(plays.let_go(*plays.running)))
        assert await shift == 10


async def test_a_worker_whose_last_rollout_takes_long_does_not_ask_all_the_time():
    server, plays, stop = Server(), Plays(), asyncio.Event()
    shift = asyncio.create_task(shift_of(server, plays, stop).run())
    server.offer(0)
    await until(lambda: 0 in plays.running)
    asked = server.asked
    await asyncio.sleep(1.6)
    assert 1 <= server.asked - asked <= 4  # after 0.2, 0.6 and 1.4 s
    stop.set()
    plays.let_go(0)
    assert await asyncio.wait_for(shift, 60) == 1


async def until(claim: Any, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not claim():
            await asyncio.sleep(0.01)


async def test_a_worker_says_that_its_trainer_has_gone_and_that_one_has_come(capsys: pytest.CaptureFixture[str]):
    server, plays, stop = Server(), Plays(), asyncio.Event()
    server.draws_offered.begin(None, (), anew=False)
    shift = asyncio.create_task(shift_of(server, plays, stop).run())
    try:
        server.draws_offered.stop()  # every poll is answered at once
        await until(lambda: server.asked > 1)
        server.draws_offered.begin(RULES, (), anew=False)
        asked = server.asked
        await until(lambda: server.asked > asked + 1)
        said = capsys.readouterr()
        assert (said.out + said.err).count("no trainer is there: waiting for one") == 1
        assert (said.out + said.err).count("a trainer is there: continuing") == 1
    finally:
        shift.cancel()
        await asyncio.gather(shift, return_exceptions=True)


async def test_a_group_that_finds_no_room_is_sent_again_under_its_own_key():
    server, plays, stop = Server(), Plays(), asyncio.Event()
    server.full = 2
    shift = asyncio.create_task(shift_of(server, plays, stop).run())
    server.offer(0, 1)
    await until(lambda: len(plays.running) == 2)
    plays.let_go(0)
    await until(lambda: server.sent == [0])
    plays.let_go(1)
    await until(lambda: server.sent == [0, 1])
    assert server.puts == [("1", 0)] * 3 + [("2", 1)]
    stop.set()
    assert await asyncio.wait_for(shift, 60) == 2


async def test_a_rollout_that_fails_while_the_rest_is_finished_ends_the_worker_with_its_error():
    class Refusing(Server):
        async def put(self, group: ScoredGroup, *, deadline_s: float, key: str) -> int:
            raise AccessRefused("the token is no longer known")

    server, plays, stop = Refusing(), Plays(), asyncio.Event()
    shift = asyncio.create_task(shift_of(server, plays, stop).run())
    server.offer(0)
    await until(lambda: 0 in plays.running)
    stop.set()
    await asyncio.sleep(0.05)  # it finishes what is being run
    plays.let_go(0)
    with pytest.raises(AccessRefused):
        await asyncio.wait_for(shift, 60)


class Endless(Environment):
    def tasks(self, split: Any) -> list[Task]:
        return [Task("t", ())]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Any:
        await asyncio.Event().wait()


async def test_a_rollout_has_the_deadline_that_the_trainer_says():
    server, stop = Server(), asyncio.Event()
    server.deadline_s = 0.2
    named: Any = {"words": Endless()}

    def runner(deadline_s: float | None) -> RolloutRunner:
        own_s = 600.0
        engine: Any = None
        return RolloutRunner(named, (), engine, engine, deadline_s=deadline_s or own_s, deterministic=False)

    shift = asyncio.create_task(Shift(server, runner, WorkerOptions("words", 4), stop).run())  # type: ignore[arg-type]
    server.offer(0)
    await until(lambda: server.failures)
    assert [one.cause for one in server.failures[0].failed] == [
        "DeadlineExceeded: rollout() gave no answer within 0.2 s"
    ] * 4
    stop.set()
    assert await asyncio.wait_for(shift, 60) == 0
