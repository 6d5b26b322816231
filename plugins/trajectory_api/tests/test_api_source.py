"""The trainer's source of groups over HTTP, against a real server: what is drawn, settled, adopted and left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.api_source import ApiSource
from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.client import Api, Worker, WorkerSpec
from atropos_core.config import RunConfig
from atropos_core.errors import DeadlineExceeded, LeaseLost, NoProgress
from atropos_core.interfaces import ModelInfo
from atropos_core.producer import PATIENCE
from atropos_core.types import Draw, Failed, ScoredGroup, Task
from plugins.trajectory_api.tests.played import VOCABULARY, Server, played, serving

MODEL = ModelInfo("Toy", 1, VOCABULARY, "float32", "cpu", "print")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, "--silent-s", "8") as started:
        yield started


@asynccontextmanager
async def worker(server: Server, environment: str = "words", tasks: int = 1000) -> AsyncIterator[Worker]:
    api = Api(server.url)
    made = await Worker.register(api, WorkerSpec("one", environment, tasks, tokenizer="print"))
    try:
        yield made
    finally:
        await made.close()
        await api.close()


class Run:
    """A source, its curriculum, and the directory of a run that may be resumed."""

    def __init__(self, server: Server, directory: Path, *, staleness: int = 100, **api: Any) -> None:
        self.config = RunConfig.model_validate(
            {"api": {"url": server.url, "wait_s": 5, **api}, "training": {"max_staleness": staleness}}
        )
        self.directory = directory
        self.curriculum = OrderedCurriculum(0, shuffled=False)
        self.source = ApiSource(self.config, self.curriculum, MODEL, directory)

    async def lease(self, n: int, version: int = 0, deadline_s: float = 20.0) -> list[int]:
        self.leases = await self.source.lease(n, version, deadline_s)
        return [lease.group.draw.id for lease in self.leases]

    async def train(self) -> None:
        for lease in self.leases:
            if lease.group.draw.id >= 0:
                self.curriculum.settle(lease.group.draw, "trained", lease.group)
        await self.source.trained(self.leases)

    def unsettled(self) -> list[int]:
        return [fields[0] for fields in self.curriculum.state()["unsettled"]]


@asynccontextmanager
async def run(server: Server, directory: Path, *, state: Any = None, **options: Any) -> AsyncIterator[Run]:
    made = Run(server, directory, **options)
    try:
        await made.source.open(state)
        yield made
    finally:
        await made.source.close()


def failed(draw: Draw) -> ScoredGroup:
    return ScoredGroup(draw, Task("t", ()), (), np.zeros(0, np.float32), failed=(Failed("KeyError: 'x'", "play"),))


async def play(worker: Worker, n: int, *, version: int = 0) -> list[Draw]:
    """Take `n` draws and send their groups."""
    draws: list[Draw] = []
    while len(draws) < n:
        draws += (await worker.draws(n - len(draws), 5.0)).draws
    for draw in draws:
        await worker.put(played(draw, version=version), deadline_s=10)
    return draws


async def test_what_is_wanted_is_offered_played_and_leased(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.want(3)
        playing = asyncio.create_task(play(one, 3))
        assert sorted(await here.lease(3)) == [0, 1, 2]
        await playing
        await here.train()
        assert here.unsettled() == []
        assert len(here.source.state()["trained"]) == 3
        await here.source.commit()
        assert here.source.state() == {"trained": []}


async def test_a_draw_whose_plays_all_failed_is_settled_told_and_replaced(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.want(2)
        leasing = asyncio.create_task(here.lease(2))
        first, second = (await one.draws(2, 10.0)).draws
        await one.failed(failed(first))
        await one.put(played(second), deadline_s=10)
        [third] = await play(one, 1)
        assert sorted(await leasing) == [second.id, third.id]
        assert [group.draw for group in here.source.news().failed] == [first]
        assert here.unsettled() == [second.id, third.id]


async def test_failures_without_end_end_the_run_with_their_cause(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.want(1)
        leasing = asyncio.create_task(here.lease(1))
        for _ in range(PATIENCE):
            [draw] = (await one.draws(1, 10.0)).draws
            await one.failed(failed(draw))
        with pytest.raises(NoProgress, match=f"last {PATIENCE} groups all failed.*in play: KeyError"):
            await leasing


async def test_what_grew_stale_is_settled_counted_and_replaced(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path, staleness=1) as here:
        here.source.want(2)
        leasing = asyncio.create_task(here.lease(1, version=1))
        await play(one, 2, version=1)
        await leasing
        await here.train()
        leasing = asyncio.create_task(here.lease(1, version=3))
        [third] = await play(one, 1, version=3)
        assert await leasing == [third.id]
        assert here.source.news().dropped == {"stale": 1}
        assert third.id in here.unsettled()
        assert 1 not in here.unsettled()


async def test_groups_that_came_while_the_run_was_dead_are_taken_up_and_none_is_drawn_twice(server, tmp_path):
    async with worker(server) as one:
        async with run(server, tmp_path) as before:
            before.source.want(4)
            playing = asyncio.create_task(play(one, 4))
            await before.lease(2)
            await playing
            await before.train()
            saved = before.source.state(), before.curriculum.state()  # the commit never arrives
        async with run(server, tmp_path, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            after.source.want(3)
            playing = asyncio.create_task(play(one, 1))
            assert sorted(await after.lease(3)) == [2, 3, 4], "0 and 1 are in the checkpoint"
            assert [draw.id for draw in await playing] == [4], "2 and 3 were there"
            await after.train()
            assert after.unsettled() == []


async def test_draws_that_are_newer_than_the_checkpoint_are_recognised(server, tmp_path):
    async with worker(server) as one:
        async with run(server, tmp_path) as before:
            saved = before.source.state(), before.curriculum.state()  # nothing is drawn yet
            before.source.want(2)
            leasing = asyncio.create_task(before.lease(2))
            await play(one, 2)
            await leasing
        async with run(server, tmp_path, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            after.source.want(2)
            assert sorted(await after.lease(2)) == [0, 1]
            assert after.unsettled() == [0, 1]


async def test_an_environment_without_a_worker_holds_nothing_up(server, tmp_path):
    async with worker(server, "words") as words:
        async with worker(server, "sums"), run(server, tmp_path) as here:
            here.source.want(8)
            with pytest.raises(DeadlineExceeded, match="0 of 8 groups"):
                await here.lease(8, deadline_s=0.5)
            open_sums = len([fields for fields in here.curriculum.state()["unsettled"] if fields[1] == "sums"])
            assert 0 < open_sums < 8
        (tmp_path / "other").mkdir()
        async with run(server, tmp_path / "other") as here:  # of "words" alone
            here.source.want(4)
            playing = asyncio.create_task(play(words, 4))
            assert len(await here.lease(4)) == 4
            await playing


async def test_an_environment_that_comes_later_is_drawn_as_well(server, tmp_path):
    async with worker(server, "words") as words, run(server, tmp_path) as here:
        here.source.want(1)
        playing = asyncio.create_task(play(words, 1))
        await here.lease(1)
        await playing
        async with worker(server, "sums") as sums:
            here.source.want(8)
            leasing = asyncio.create_task(here.lease(2))
            await asyncio.gather(play(words, 1), play(sums, 1))
            await leasing
            assert {lease.group.draw.environment for lease in here.leases} == {"words", "sums"}


async def test_a_second_trainer_ends_the_first(server, tmp_path):
    async with worker(server), run(server, tmp_path) as first:
        (tmp_path / "second").mkdir()
        async with run(server, tmp_path / "second"):
            with pytest.raises(LeaseLost):
                await first.lease(1)


async def test_nobody_drew_what_an_old_environment_sent(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        nobody = Draw(-1, "old", "train", -1, 0)
        for _ in range(2):
            await one.put(played(nobody), deadline_s=10)
        assert all(number < 0 for number in await here.lease(2))
        assert len({lease.group.draw.id for lease in here.leases}) == 2
        await here.train()
