"""A worker and a trainer of core's client against real servers, which are killed under them."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from atropos_core.errors import AccessRefused, ApiError, DataError, HubFull, LeaseLost, TokenizerMismatch, TooLarge
from atropos_core.types import Draw
from atropos_trajectory_client.client import Api, LeaseReply, SessionSpec, TrainerSession, Worker, WorkerSpec
from atropos_trajectory_client.http import in_background
from plugins.trajectory_api.tests.sent_groups import SAMPLING, VOCABULARY, Server, drawn, group_of, serving
from tests.waiting import until

SPEC = SessionSpec("run", 4, 1, SAMPLING, 2, tokenizer="print", vocabulary=VOCABULARY, max_staleness=100)
WORDS = WorkerSpec("one", "words", 1000, tokenizer="print")


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with serving(tmp_path, "--lease-s", "8", "--silent-s", "8") as started:
        yield started


@asynccontextmanager
async def opened(server: Server, **changes: Any) -> AsyncIterator[tuple[TrainerSession, Worker]]:
    api = Api(server.url)
    trainer = await TrainerSession.open(api, SessionSpec(**{**vars(SPEC), **changes}))
    worker = await Worker.register(api, WORDS)
    try:
        yield trainer, worker
    finally:
        await worker.close()
        await trainer.close()
        await api.close()


async def leased(trainer: TrainerSession, groups: int, wait_s: float = 20.0) -> LeaseReply:
    answer = await trainer.lease(groups, 0, wait_s)
    assert len(answer.entries) == groups, answer
    return answer


async def until_printed(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    printed = ""
    async with asyncio.timeout(60):
        while text not in printed:
            await asyncio.sleep(0.02)
            printed += capfd.readouterr().err


async def test_draws_are_run_elsewhere_and_their_groups_come_back_as_they_were_sent(server: Server):
    async with opened(server) as (trainer, worker):
        assert trainer.environments == {}
        assert (await trainer.fetch_environments())["words"]["tasks"] == 1000
        await trainer.set_version(3)
        await trainer.offer_draws([drawn(0), drawn(1)])
        work = await worker.draws(5)
        assert (work.draws, work.group_size, work.sampling, work.version) == ((drawn(0), drawn(1)), 4, SAMPLING, 3)
        for draw in work.draws:
            assert await worker.put(group_of(draw), deadline_s=30) is not None
        answer = await leased(trainer, 2)
        for draw, (_, group) in zip(work.draws, answer.entries, strict=True):
            sent = group_of(draw)
            assert group.draw == draw and group.rewards.tolist() == sent.rewards.tolist()
            for got, gave in zip(group.episodes, sent.episodes, strict=True):
                assert got.rollouts[0].tokens.tolist() == gave.rollouts[0].tokens.tolist()
                assert got.rollouts[0].logprobs is not None and gave.rollouts[0].logprobs is not None
                assert got.rollouts[0].logprobs.tolist() == gave.rollouts[0].logprobs.tolist()
        ids = [number for number, _ in answer.entries]
        trainer.trained(ids)
        assert await trainer.commit(ids) == 2


async def test_what_was_trained_is_reported_with_the_next_lease_or_renewal_and_never_leased_again(server: Server):
    async def states() -> tuple[int, int]:
        hub = (await trainer.api.status())["hub"]
        return hub["leased"], hub["trained"]

    async with opened(server) as (trainer, worker):
        for _ in range(3):
            await worker.put(group_of(drawn(-1)), deadline_s=30)
        [(first, _)] = (await leased(trainer, 1)).entries
        trainer.trained([first])
        assert await states() == (1, 0)
        [(second, _)] = (await leased(trainer, 1)).entries
        assert await states() == (1, 1)
        trainer.trained([second])
        await trainer.renew()
        assert await states() == (0, 2)
        [(third, _)] = (await leased(trainer, 1)).entries
        assert len({first, second, third}) == 3
        assert await trainer.commit([first, second, third]) == 3
        assert await states() == (0, 0)


async def test_a_second_session_ends_the_first_and_says_so_on_every_call(server: Server):
    async with opened(server) as (trainer, _), opened(server, holder="other") as (second, _):
        with pytest.raises(LeaseLost, match="session 2 was opened"):
            await trainer.lease(1, 0, 1.0)
        await second.renew()
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(trainer.lost, 10)  # its own renewal finds out


async def test_a_worker_with_another_tokenizer_is_refused(server: Server):
    async with opened(server) as (trainer, _):
        with pytest.raises(TokenizerMismatch, match="fingerprint"):
            await Worker.register(trainer.api, WorkerSpec("odd", "words", 1, tokenizer="another"))


async def test_a_long_poll_ends_the_moment_there_is_something(server: Server):
    async with opened(server) as (trainer, worker):
        waiting = asyncio.create_task(worker.draws(1, 15.0))
        leasing = asyncio.create_task(trainer.lease(1, 0, 15.0))
        await asyncio.sleep(0.2)
        began = asyncio.get_running_loop().time()
        await trainer.offer_draws([drawn(0)])
        [draw] = (await waiting).draws
        await worker.put(group_of(draw), deadline_s=30)
        assert len((await leasing).entries) == 1
        assert asyncio.get_running_loop().time() - began < 12.0, "and not after 15 s"


async def test_a_full_hub_is_waited_for_until_the_deadline(tmp_path: Path):
    with serving(tmp_path, "--hub-sequences", "4") as server:
        async with opened(server) as (trainer, worker):
            await worker.put(group_of(drawn(-1)), deadline_s=30)
            with pytest.raises(HubFull, match="no room"):
                await worker.put(group_of(drawn(-1)), deadline_s=2.0)
            waiting = asyncio.create_task(worker.put(group_of(drawn(-1)), deadline_s=60))
            [(number, _)] = (await leased(trainer, 1)).entries
            await trainer.commit([number])
            assert await waiting is not None


async def test_a_trainer_waits_for_room_on_the_servers_disk_where_even_the_reserve_is_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with serving(tmp_path) as server:
        async with opened(server) as (trainer, worker):
            for _ in range(3):
                await worker.put(group_of(drawn(-1)), deadline_s=30)
            [(first, _)] = (await leased(trainer, 1)).entries
            api = Api(server.url)
            calls = [
                lambda: trainer.lease(1, 0, 20.0),
                lambda: trainer.commit([first]),
                lambda: TrainerSession.open(api, replace(SPEC, holder="next")),
            ]
            answers = []
            for call in calls:
                server.limit_files(sum(path.stat().st_size for path in tmp_path.glob("api/journal/*.journal")))
                waiting = asyncio.ensure_future(call())
                await until_printed("cannot be written: File too large", capfd)
                await asyncio.sleep(0.3)
                assert not waiting.done()
                server.limit_files(None)
                answers.append(await asyncio.wait_for(waiting, 60))
            one, committed, following = answers
            assert len(one.entries) == committed == 1
            assert len((await following.lease(2, 0, 5.0)).entries) == 2
            await following.close()
            await api.close()


async def test_a_full_hub_is_a_full_hub_for_a_worker_on_the_servers_own_machine_too(tmp_path: Path):
    with serving(tmp_path, "--hub-sequences", "4", same_host=True) as server:
        async with opened(server) as (trainer, worker):
            assert worker._ring is not None
            await worker.put(group_of(drawn(-1)), deadline_s=30)
            key = worker.new_key()
            with pytest.raises(HubFull, match="no room"):
                await worker.put(group_of(drawn(-1)), deadline_s=2.0, key=key)
            waiting = asyncio.create_task(worker.put(group_of(drawn(-1)), deadline_s=60, key=key))
            await asyncio.sleep(0.2)
            [(number, _)] = (await leased(trainer, 1)).entries
            await trainer.commit([number])
            assert await waiting is not None
            [(number, _)] = (await leased(trainer, 1)).entries
            await trainer.commit([number])
            assert not (await trainer.lease(1, 0, 0.3)).entries  # both tries were of one group


async def test_a_body_however_far_beyond_the_limit_is_refused_by_name(tmp_path: Path):
    with serving(tmp_path, "--body-mb", "0.8") as server:
        api = Api(server.url)
        for size in (
            1_000_000,
            40_000_000,
            40_000_000,
        ):  # who is still sending reads no answer, and a reset takes it away
            with pytest.raises(TooLarge, match="the limit is 0.8 MB"):
                await api.call("POST", "/v1/groups", {"groups": bytes(range(250)) * (size // 250)}, deadline_s=60)
        await api.close()


async def test_draws_of_a_worker_that_signs_off_go_to_another(server: Server):
    async with opened(server) as (trainer, worker):
        other = await Worker.register(trainer.api, WorkerSpec("two", "words", 1000))
        await trainer.offer_draws([drawn(0), drawn(1)])
        assert [draw.id for draw in (await worker.draws(2)).draws] == [0, 1]
        await worker.give_back([drawn(1)])
        assert [draw.id for draw in (await other.draws(2)).draws] == [1]
        await worker.drain()
        assert (await worker.draws(2, 0.0)).draws == ()
        await worker.close()
        assert [draw.id for draw in (await other.draws(2)).draws] == [0]
        await other.close()


async def test_a_server_that_is_stopped_ends_though_somebody_waits(tmp_path: Path):
    with serving(tmp_path) as server:
        async with opened(server) as (_, worker):
            waiting = asyncio.create_task(worker.draws(1, 20.0))
            await asyncio.sleep(0.3)
            assert await asyncio.to_thread(server.stop) == 0
            waiting.cancel()


async def test_without_the_token_every_call_is_refused_by_name(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters-for-anyone")
    token.chmod(0o600)
    with serving(tmp_path, "--token-file", str(token)) as server:
        api = Api(server.url)
        with pytest.raises(AccessRefused):
            await api.about()
        await api.close()
        api = Api(server.url, token.read_text())
        assert (await api.about())["protocol"] == 1
        await api.close()


async def test_a_trainer_and_a_worker_live_through_a_killed_server(server: Server):
    """Draws that waited, were being run, had failed, or had come back: each group arrives, and once."""
    async with opened(server) as (trainer, worker):
        await trainer.offer_draws([drawn(number) for number in range(7)])
        first = (await worker.draws(5)).draws
        for draw in first[:2]:
            await worker.put(group_of(draw), deadline_s=30)
        held = [number for number, _ in (await leased(trainer, 1)).entries]
        await worker.failed(replace(group_of(first[4]), episodes=(), rewards=np.zeros(0, np.float32)))
        server.kill()
        putting = asyncio.create_task(worker.put(group_of(first[2]), deadline_s=30))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        assert await putting is not None
        await worker.put(group_of(first[3]), deadline_s=30)
        await trainer.renew()  # or any call: it offers again what it has heard nothing of
        rest = (await worker.draws(6)).draws
        assert [draw.id for draw in rest] == [4, 5, 6]  # the notice that 4 had failed died with the server
        for draw in rest:
            await worker.put(group_of(draw), deadline_s=30)
        got = [group.draw.id for _, group in (await leased(trainer, 6)).entries]
        assert sorted(got) == [1, 2, 3, 4, 5, 6]
        trainer.trained(held)
        assert await trainer.commit(held) == 1
        assert not (await trainer.lease(1, 0, 0.3)).entries


async def test_no_group_is_lost_and_none_counts_twice_however_often_the_server_is_killed(server: Server):
    total, rounds = 80, 2
    async with opened(server) as (trainer, worker):
        committed: list[int] = []

        async def work() -> None:
            while True:
                found = (await worker.draws(8, 5.0)).draws
                await asyncio.gather(*(worker.put(group_of(draw), deadline_s=60) for draw in found))

        async def train() -> None:
            await trainer.offer_draws([drawn(number) for number in range(total)])
            while len(committed) < total:
                answer = await trainer.lease(4, 0, 5.0)
                ids = [number for number, _ in answer.entries]
                trainer.trained(ids)
                await trainer.commit(ids)
                committed.extend(group.draw.id for _, group in answer.entries)

        async def harm() -> None:
            for _ in range(rounds):
                await asyncio.sleep(random.uniform(0.05, 0.4))
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        working = asyncio.create_task(work())
        try:
            async with asyncio.timeout(120):
                await asyncio.gather(train(), harm())
        finally:
            working.cancel()
        assert sorted(committed) == list(range(total))


async def test_on_the_servers_own_machine_groups_travel_through_shared_memory_and_over_http_where_that_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with serving(tmp_path, same_host=True) as server:
        async with opened(server) as (trainer, worker):
            assert "through shared memory" in capsys.readouterr().out
            await trainer.offer_draws([drawn(number) for number in range(3)])
            first, second, third = (await worker.draws(3)).draws
            assert await worker.put(group_of(first), deadline_s=30) == 0
            with pytest.raises(DataError, match="outside the policy's vocabulary"):
                odd = group_of(drawn(-1))
                odd.episodes[0].rollouts[0].tokens[0] = VOCABULARY
                await worker.put(odd, deadline_s=30)
            assert await worker.put(group_of(Draw(0, "words", "train", 0, 0)), deadline_s=30) is None  # once is enough
            server.kill()
            putting = asyncio.create_task(worker.put(group_of(second), deadline_s=30))
            await asyncio.to_thread(server.start)
            assert await putting == 1
            said = " ".join(capsys.readouterr().out.split())
            assert "the ring has ended; groups travel over HTTP" in said
            await worker.drain()  # now at the latest it learns that it is unknown, registers, and finds the new ring
            said += " ".join(capsys.readouterr().out.split())
            assert "through shared memory" in said.partition("the ring has ended")[2]
            assert await worker.put(group_of(third), deadline_s=30) == 2
            assert sorted(group.draw.id for _, group in (await leased(trainer, 3)).entries) == [0, 1, 2]


async def test_a_trainer_that_was_away_for_longer_than_its_lease_has_lost_it(tmp_path: Path):
    with serving(tmp_path, "--lease-s", "1") as server:
        async with opened(server) as (trainer, worker):
            await worker.put(group_of(drawn(-1)), deadline_s=30)
            await leased(trainer, 1)
            trainer._renewing.cancel()  # as a process that hangs
            status = {"accept": "application/json"}
            await until(
                lambda: httpx.get(f"{server.url}/v1/status", headers=status).json()["trainer"] is None,
                "the lease's end",
            )
            trainer.trained([0])
            with pytest.raises(LeaseLost):
                await trainer.renew()


async def test_that_a_draw_failed_is_reported_however_long_the_server_is_away(server: Server):
    api = Api(server.url, timeout_s=1.0)
    async with opened(server) as (trainer, _):
        worker = await Worker.register(api, WORDS)
        await trainer.offer_draws([drawn(0)])
        [draw] = (await worker.draws(1)).draws
        server.kill()
        saying = asyncio.create_task(
            worker.failed(replace(group_of(draw), episodes=(), rewards=np.zeros(0, np.float32)))
        )
        await asyncio.sleep(3.0)
        assert not saying.done()
        saying.cancel()
        with pytest.raises(ApiError, match="got no answer in time"):
            await worker.failed(replace(group_of(draw), episodes=(), rewards=np.zeros(0, np.float32)), deadline_s=0.5)
        await worker.close()
    await api.close()


async def test_a_server_that_stays_away_is_an_error_at_the_deadline(server: Server):
    async with opened(server) as (_, worker):
        server.kill()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ApiError, match="got no answer in time"):
            await worker.put(group_of(drawn(-1)), deadline_s=1.0)
        assert asyncio.get_running_loop().time() - began < 30


async def test_a_session_and_a_worker_closed_before_their_first_renewal_leave_no_coroutine_behind(server: Server):
    """Whatever collected it later, with an error of its own: seen inside a named tuple of SkyRL's."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        api = Api(server.url)
        trainer = await TrainerSession.open(api, SPEC)
        trainer._renewing.cancel()  # as a loop that ends with the very step in which the session was opened
        worker = Worker(api, WORDS)
        broken = asyncio.get_running_loop().create_future()
        asyncio.create_task(in_background(worker._beat, broken)).cancel()
        await asyncio.sleep(0)
        await api.close()
        gc.collect()
    assert [str(one.message) for one in warned if "never awaited" in str(one.message)] == []
