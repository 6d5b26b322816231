"""The trainer's source of groups over HTTP, against a real server: what is drawn, settled, adopted and left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import ApiError, CheckpointError, DeadlineExceeded, LeaseLost, NoProgress
from atropos_core.guards.patience import Patience
from atropos_core.interfaces import ModelInfo
from atropos_core.rollouts.producer import PATIENCE
from atropos_core.types import UNKNOWN_VERSION, Draw, Failed, ScoredGroup, Task
from atropos_trajectory_client.client import Api, SessionSpec, TrainerSession, Worker, WorkerSpec
from atropos_trajectory_client.source import ApiSource
from plugins.trajectory_api.tests.running import ENVIRONMENT, group
from plugins.trajectory_api.tests.sent_groups import SAMPLING, VOCABULARY, Server, drawn, group_of, serving
from tests.waiting import until

MODEL = ModelInfo("Toy", 1, VOCABULARY, "float32", "cpu", "print")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, "--silent-s", "8") as started:
        yield started


@asynccontextmanager
async def worker(
    server: Server, environment: str = "words", tasks: int = 1000, digest: str = ""
) -> AsyncIterator[Worker]:
    api = Api(server.url)
    made = await Worker.register(api, WorkerSpec("one", environment, tasks, tokenizer="print", digest=digest))
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
        await self.source.settle([(lease, "trained") for lease in self.leases])

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
    return ScoredGroup(draw, Task("t", ()), (), np.zeros(0, np.float32), failed=(Failed("KeyError: 'x'", "rollout"),))


async def play(worker: Worker, n: int, *, version: int = 0) -> list[Draw]:
    """Take `n` draws and send their groups."""
    draws: list[Draw] = []
    while len(draws) < n:
        draws += (await worker.draws(n - len(draws), 5.0)).draws
    for draw in draws:
        await worker.put(group_of(draw, version=version), deadline_s=10)
    return draws


async def test_what_is_wanted_is_offered_run_and_leased(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.request(3)
        running = asyncio.create_task(play(one, 3))
        assert sorted(await here.lease(3)) == [0, 1, 2]
        await running
        await here.train()
        assert here.unsettled() == []
        assert len(here.source.state()["trained"]) == 3
        await here.source.commit()
        assert here.source.state()["trained"] == []


async def test_a_draw_whose_rollouts_all_failed_is_settled_reported_and_replaced(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.request(2)
        leasing = asyncio.create_task(here.lease(2))
        first, second = (await one.draws(2, 10.0)).draws
        await one.failed(failed(first))
        await one.put(group_of(second), deadline_s=10)
        [third] = await play(one, 1)
        assert sorted(await leasing) == [second.id, third.id]
        assert [group.draw for group in here.source.take_lost().failed] == [first]
        assert here.unsettled() == [second.id, third.id]


async def test_failures_without_end_end_the_run_with_their_cause(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        here.source.request(1)
        leasing = asyncio.create_task(here.lease(1))
        for _ in range(PATIENCE):
            [draw] = (await one.draws(1, 10.0)).draws
            await one.failed(failed(draw))
        with pytest.raises(NoProgress, match=f"last {PATIENCE} groups all failed.*in rollout: KeyError"):
            await leasing


async def test_what_grew_stale_is_settled_counted_and_replaced(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path, staleness=1) as here:
        await here.source.publish(1)
        here.source.request(2)
        leasing = asyncio.create_task(here.lease(1, version=1))
        await play(one, 2, version=1)
        await leasing
        await here.train()
        await here.source.publish(3)
        leasing = asyncio.create_task(here.lease(1, version=3))
        [third] = await play(one, 1, version=3)
        assert await leasing == [third.id]
        assert here.source.take_lost().dropped == {"stale": 1}
        assert third.id in here.unsettled()
        assert 1 not in here.unsettled()


async def test_groups_that_came_while_the_run_was_dead_are_taken_up_and_none_is_drawn_twice(server, tmp_path):
    async with worker(server) as one:
        async with run(server, tmp_path) as before:
            before.source.request(4)
            running = asyncio.create_task(play(one, 4))
            await before.lease(2)
            await running
            await before.train()
            saved = before.source.state(), before.curriculum.state()  # the commit never arrives
        async with run(server, tmp_path, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            after.source.request(3)
            running = asyncio.create_task(play(one, 1))
            assert sorted(await after.lease(3)) == [2, 3, 4], "0 and 1 are in the checkpoint"
            assert [draw.id for draw in await running] == [4], "2 and 3 were there"
            await after.train()
            assert after.unsettled() == []


async def test_draws_that_are_newer_than_the_checkpoint_are_recognised(server, tmp_path):
    async with worker(server) as one:
        async with run(server, tmp_path) as before:
            saved = before.source.state(), before.curriculum.state()  # nothing is drawn yet
            before.source.request(2)
            leasing = asyncio.create_task(before.lease(2))
            await play(one, 2)
            await leasing
        async with run(server, tmp_path, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            after.source.request(2)
            assert sorted(await after.lease(2)) == [0, 1]
            assert after.unsettled() == [0, 1]


async def test_an_environment_without_a_worker_holds_nothing_up(server, tmp_path):
    async with worker(server, "words") as words:
        async with worker(server, "sums"), run(server, tmp_path) as here:
            here.source.request(8)
            with pytest.raises(DeadlineExceeded, match="0 of 8 groups"):
                await here.lease(8, deadline_s=0.5)
            open_sums = len([fields for fields in here.curriculum.state()["unsettled"] if fields[1] == "sums"])
            assert 0 < open_sums < 8
        (tmp_path / "other").mkdir()
        async with run(server, tmp_path / "other") as here:  # only of "words"
            here.source.request(4)
            running = asyncio.create_task(play(words, 4))
            assert len(await here.lease(4)) == 4
            await running


async def test_an_environment_that_comes_later_is_drawn_as_well(server, tmp_path):
    async with worker(server, "words") as words, run(server, tmp_path) as here:
        here.source.request(1)
        running = asyncio.create_task(play(words, 1))
        await here.lease(1)
        await running
        async with worker(server, "sums") as sums:
            here.source.request(8)
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
            await one.put(group_of(nobody), deadline_s=10)
        assert all(number < 0 for number in await here.lease(2))
        assert len({lease.group.draw.id for lease in here.leases}) == 2
        await here.train()


@asynccontextmanager
async def plays(*workers: Worker) -> AsyncIterator[dict[str, int]]:
    """Each runs whatever it is given, from the "version" that the test says."""
    now = {"version": 0}

    async def play_on(worker: Worker) -> None:
        while True:
            for draw in (await worker.draws(8, 5.0)).draws:
                await worker.put(group_of(draw, version=now["version"]), deadline_s=10)

    tasks = [asyncio.create_task(play_on(worker)) for worker in workers]
    try:
        yield now
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def send_old_group(server: Server) -> None:
    number = httpx.post(f"{server.url}/register-env", json=ENVIRONMENT).json()["env_id"]
    assert httpx.post(f"{server.url}/scored_data", json={**group(4), "env_id": number}).status_code == 200


def versions(here: Run) -> set[int]:
    """Of all tokens that the last lease brought."""
    rollouts = [r for lease in here.leases for episode in lease.group.episodes for r in episode.rollouts]
    return {int(version) for rollout in rollouts for version in rollout.policy_version}


async def step(here: Run, now: dict[str, int], version: int) -> list[int]:
    """One of the loop's, at max_staleness 0: what it leased."""
    now["version"] = version
    await here.source.publish(version)
    here.source.request(8)
    ids = await here.lease(8, version)
    await here.train()
    return ids


async def test_what_was_sampled_after_the_checkpoint_that_a_run_resumes_from_is_run_again(server, tmp_path):
    async with worker(server, "words") as words, worker(server, "sums") as sums, plays(words, sums) as now:
        async with run(server, tmp_path, staleness=0) as before:
            first = await step(before, now, 0)
            saved = before.source.state(), before.curriculum.state()
            for version in (1, 2, 3):
                await step(before, now, version)
        async with run(server, tmp_path, staleness=0, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            again: list[int] = []
            for version in (1, 2, 3):  # the first of them is the version of the resumed run's own weights
                again += await step(after, now, version)
                assert versions(after) == {version}, "none of another timeline, none stale"
            lost = after.source.take_lost()
            assert lost.dropped["other_timeline"] == 16, "of versions 2 and 3"
            async with httpx.AsyncClient() as client:
                told = (await client.get(f"{server.url}/metrics")).text
            assert 'atropos_dropped_groups_total{cause="other_timeline"} 16\n' in told
            assert "atropos_hub_committed_groups_total 8\n" in told, "only those of the checkpoint"
            assert sorted(first + again) == list(range(32)), "every draw once"


async def test_a_token_of_a_version_that_nobody_had_yet_is_run_again(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as here:
        await here.source.publish(4)
        here.source.request(1)
        leasing = asyncio.create_task(here.lease(1, version=3))
        await play(one, 1, version=4)
        await play(one, 1, version=3)
        assert await leasing == [0]
        assert versions(here) == {3}
        assert here.source.take_lost().dropped == {"other_timeline": 1}


async def test_what_nobody_drew_is_trained_and_its_version_is_unknown_where_that_is_lost(server, tmp_path):
    async with worker(server) as one:
        for version in (3, 5):
            await one.put(group_of(Draw(-1, "old", "train", -1, version), version=version), deadline_s=10)
        async with run(server, tmp_path) as here:
            await here.lease(2, version=3)
            assert versions(here) == {3, UNKNOWN_VERSION}


async def test_a_version_that_this_session_heard_of_only_as_lost_is_unknown(server, tmp_path):
    async with worker(server) as one:
        async with run(server, tmp_path) as before:
            await before.source.publish(9)
            await one.put(group_of(Draw(-1, "old", "train", -1, 1), version=9), deadline_s=10)
            await before.lease(1, version=9)
        async with run(server, tmp_path) as here:  # nothing was saved: version 0 again, and nine are lost
            for version in (7, 2, 8):
                await one.put(group_of(Draw(-1, "old", "train", -1, version), version=version), deadline_s=10)
            await here.lease(3, version=2)
            assert versions(here) == {UNKNOWN_VERSION, 2}


async def test_a_run_that_resumes_before_its_workers_waits_for_them(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as before:
        saved = before.source.state(), before.curriculum.state()
        before.source.request(2)
        running = asyncio.create_task(play(one, 2))
        await before.lease(2)
        await running
    after = Run(server, tmp_path)
    after.curriculum.load(saved[1])
    opening = asyncio.create_task(after.source.open(saved[0]))
    done, _ = await asyncio.wait([opening], timeout=1.5)
    assert not done, "two groups that a worker sent do not make a worker"
    async with worker(server):
        await opening
        after.source.request(2)
        assert sorted(await after.lease(2)) == [0, 1]
        await after.source.close()


async def test_groups_that_are_leased_before_their_draws_are_drawn_are_not_waited_for(server, tmp_path):
    async with worker(server) as one, run(server, tmp_path) as before:
        saved = before.source.state(), before.curriculum.state()
        before.source.request(4)
        running = asyncio.create_task(play(one, 4))
        await before.lease(4)
        await running
    await asyncio.to_thread(send_old_group, server)
    async with run(server, tmp_path, state=saved[0]) as after:  # an old environment is there, the worker is not yet
        after.curriculum.load(saved[1])
        after.source.request(4)
        assert all(id < 0 for id in await after.lease(4))
        await after.train()
        resaved = after.source.state(), after.curriculum.state()
    async with run(server, tmp_path, state=resaved[0]) as again, worker(server) as one:
        again.curriculum.load(resaved[1])
        again.source.request(4)
        running = asyncio.create_task(play(one, 3))
        assert sorted(await again.lease(4))[1:] == [4, 5, 6], "0 to 3 are trained"
        await running
        await again.train()
        assert again.unsettled() == []


async def test_late_groups_of_a_second_environment_are_known_by_their_draws(server, tmp_path):
    async with worker(server, "words") as words, worker(server, "sums") as sums:
        async with run(server, tmp_path) as before:
            saved = before.source.state(), before.curriculum.state()
            before.source.request(16)
            leasing = asyncio.create_task(before.lease(16))
            taken = [list((await one.draws(16, 10.0)).draws) for one in (words, sums)]
            for draw in taken[0]:
                await words.put(group_of(draw), deadline_s=10)
            leasing.cancel()  # the others are still being run
        async with run(server, tmp_path, state=saved[0]) as after:
            after.curriculum.load(saved[1])
            for draw in reversed(taken[1]):
                await sums.put(group_of(draw), deadline_s=10)
            async with plays(words, sums) as now:
                leased = [id for _ in range(4) for id in await step(after, now, 0)]
            assert sorted(leased)[:16] == list(range(16)), "every one under its own number"
            assert len(set(leased)) == 32 and min(leased) == 0


async def test_a_second_run_of_the_same_seed_gets_nothing_that_was_run_for_the_first(server, tmp_path):
    (tmp_path / "second").mkdir()
    async with worker(server) as one:
        async with run(server, tmp_path, staleness=0) as first:
            first.source.request(2)
            leasing = asyncio.create_task(first.lease(2, 40))
            draws = (await one.draws(2, 10.0)).draws
            leasing.cancel()
        async with run(server, tmp_path / "second", staleness=0) as second:
            second.source.request(2)
            leasing = asyncio.create_task(second.lease(2))
            status = {"accept": "application/json"}
            await until(
                lambda: httpx.get(f"{server.url}/v1/status", headers=status).json()["draws"]["waiting"] == 2,
                "the draws that are offered",
            )
            assert [await one.put(group_of(draw, version=0), deadline_s=10) for draw in draws] == [None, None]
            assert sorted(draw.id for draw in await play(one, 2)) == [0, 1]
            assert sorted(await leasing) == [0, 1]
            assert versions(second) == {0}


async def test_old_groups_that_come_while_a_resumed_run_starts_are_of_its_version(server, tmp_path):
    async with worker(server), run(server, tmp_path) as before:
        await before.source.publish(40)
        saved = before.source.state()
    async with worker(server), run(server, tmp_path, staleness=0, state=saved) as after:
        await asyncio.to_thread(send_old_group, server)
        await after.source.publish(40)
        assert len(await after.lease(1, version=40)) == 1, "not stale"


async def test_ids_of_another_server_settle_nothing(server, tmp_path):
    async with worker(server) as one:
        for _ in range(2):
            await one.put(group_of(Draw(-1, "old", "train", -1, 0)), deadline_s=10)
        async with run(server, tmp_path, state={"trained": [0, 1], "hub_id": "another", "version": 0}) as here:
            assert len(await here.lease(2)) == 2


async def test_workers_get_how_long_a_rollout_may_take(server, tmp_path):
    async with worker(server) as one:
        assert (await one.draws(1, 0.0)).deadline_s is None, "there is no trainer"
        async with run(server, tmp_path) as here:
            assert (await one.draws(1, 0.0)).deadline_s == here.config.training.rollout_deadline_s


async def test_a_session_tries_on_for_as_long_as_its_patience_while_the_server_is_away(server):
    api = Api(server.url, timeout_s=0.5)
    spec = SessionSpec("run", 4, 1, SAMPLING, 2, vocabulary=VOCABULARY)
    session = await TrainerSession.open(api, spec, deadline_s=10)
    try:
        server.kill()
        calls = [session.offer_draws([drawn(0)]), session.fetch_environments(), session.add_engine("http://a.b")]
        calling = asyncio.gather(*calls)
        done, _ = await asyncio.wait([calling], timeout=2.0)
        assert not done, "longer than the other calls are tried"
        await asyncio.to_thread(server.start)
        await calling
    finally:
        await session.close()
        await api.close()


async def test_a_session_gives_a_server_that_is_away_up_at_the_bound_of_its_patience(server):
    api = Api(server.url, timeout_s=0.5, patience=Patience(say_s=0.2, least_s=1.0, times=1.0))
    spec = SessionSpec("run", 4, 1, SAMPLING, 2, vocabulary=VOCABULARY)
    session = await TrainerSession.open(api, spec, deadline_s=10)
    try:
        server.kill()
        calls = [session.offer_draws([drawn(0)]), session.fetch_environments(), session.add_engine("http://a.b")]
        async with asyncio.timeout(45):  # and no minute
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [ApiError] * 3
    finally:
        await session.close()
        await api.close()


async def test_a_run_is_not_resumed_with_workers_of_other_tasks_and_one_that_comes_later_is_named(
    server, tmp_path, capsys
):
    async with worker(server, digest="aa"), run(server, tmp_path) as one:
        async with worker(server, digest="bb"):
            await one.source._look(await one.source._here.fetch_environments())
            await one.source._look(await one.source._here.fetch_environments())
        assert (
            " ".join(capsys.readouterr().err.split()).count(
                "has other training tasks than those that the run has drawn"
            )
            == 1
        )
        state = json.loads(json.dumps(one.source.state()))
    for digest, ends in (("aa", True), ("cc", False), ("", True)):
        async with worker(server, digest=digest):
            if ends:
                async with run(server, tmp_path, state=state):
                    pass
                continue
            with pytest.raises(CheckpointError, match=r"other training tasks(.|\n)*checkpoint.other_tasks=true"):
                async with run(server, tmp_path, state=state):
                    pass
    del state["tasks"]  # of a checkpoint from before there was a digest
    async with worker(server, digest="cc"), run(server, tmp_path, state=state):
        pass
