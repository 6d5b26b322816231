"""Groups of workers on the server's machine travel through shared memory, and over HTTP if that ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_core.codec import encode, encode_bytes
from atropos_core.errors import DataError, HubFull, ProcessDied
from atropos_core.hub.records import BatchSize
from atropos_http_server.body_limits import Budget
from atropos_trajectory_api.http.answers import REFUSALS
from atropos_trajectory_api.native import same_host
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.service import Service
from atropos_trajectory_client.shm.producer import RingProducer
from atropos_trajectory_client.shm.socket import short
from plugins.trajectory_api.tests.sent_groups import drawn, group_of
from tests.waiting import until


@asynccontextmanager
async def door(
    folder: Path, budget: Budget | None = None, *, hold_s: float = 20.0, **options: Any
) -> AsyncIterator[tuple[Service, RingProducer]]:
    """A service in this process, and a ring into it."""
    settings = ServeOptions(**({"directory": folder / "api", "journal": False} | options))
    service = Service.open(settings)
    async with same_host.listening(service, settings, budget or Budget(1 << 30), hold_s=hold_s):
        assert service.same_host is not None
        offer = service.same_host
        ring = await RingProducer.open(Path(offer["path"]), offer["nonce"], slots=4, slot_bytes=1 << 16, name="one")
        yield service, ring
        ring.close()
    await service.close()
    assert service.same_host is None and not Path(offer["path"]).exists()


async def test_a_frame_is_put_once_for_its_key_and_answered_with_its_id(tmp_path):
    async with door(tmp_path) as (service, ring):
        groups = [group_of(drawn(-1 - number), length=16 + 4000 * (number == 3)) for number in range(20)]
        acks = await asyncio.gather(*(ring.put(encode(group), key=str(n)) for n, group in enumerate(groups)))
        assert (await ring.put(encode(groups[5]), key="5")).value == acks[5].value
        assert service.hub.status().groups == 20
        session = service.hub.open("test")
        entries = session.try_lease(BatchSize(groups=20), 0)
        assert entries is not None
        assert [entry.id for entry in entries] == [ack.value for ack in acks]
        assert [entry.payload for entry in entries] == [encode_bytes(group) for group in groups]


async def test_groups_for_which_there_is_room_cost_no_task_each(tmp_path):
    made: list[str] = []

    def noting(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        made.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **more)

    async with door(tmp_path) as (service, ring):
        asyncio.get_running_loop().set_task_factory(noting)
        await asyncio.gather(*(ring.put(encode(group_of(drawn(-1 - n))), key=str(n)) for n in range(40)))
        asyncio.get_running_loop().set_task_factory(None)
        assert service.hub.status().groups == 40
    assert [name for name in made if name != "RingProducer.put"] == []


async def test_what_must_be_on_the_disk_first_is_answered_then_and_is_there_after_a_restart(tmp_path):
    groups = [group_of(drawn(-1 - n)) for n in range(20)]
    async with door(tmp_path, journal=True, sync="always") as (_, ring):
        acks = await asyncio.gather(*(ring.put(encode(group), key=str(n)) for n, group in enumerate(groups)))
        with pytest.raises(DataError):
            await ring.put([b"no frame"], key="x")
    async with door(tmp_path, journal=True, sync="always") as (service, ring):
        assert [number for number, _ in service.hub.labels()] == sorted(ack.value for ack in acks)
        assert (await ring.put(encode(groups[7]), key="7")).value == acks[7].value


async def test_what_is_no_group_is_refused_by_name_and_the_ring_goes_on(tmp_path):
    async with door(tmp_path) as (service, ring):
        for wrong in (b"", b"no frame", encode_bytes({"not": "a group"})):
            with pytest.raises(DataError):
                await ring.put([wrong], key="x")
        assert (await ring.put(encode(group_of(drawn(-1))), key="y")).value >= 0
        assert service.hub.status().groups == 1


async def test_a_full_hub_is_reported_to_the_worker_and_its_slots_are_free_again(tmp_path):
    async with door(tmp_path, hold_s=0.1, hub_mb=0.02) as (service, ring):
        outcomes = await asyncio.gather(
            *(ring.put(encode(group_of(drawn(-1), length=200)), key=str(n)) for n in range(20)), return_exceptions=True
        )
        full = [one for one in outcomes if isinstance(one, HubFull)]
        assert full and len(full) + service.hub.status().groups == 20
        assert ring.unanswered == 0


async def test_groups_that_wait_for_room_count_as_bodies_in_flight_and_the_rest_stays_in_its_slots(tmp_path):
    frame = encode_bytes(group_of(drawn(-1), length=200))
    budget = Budget(int(1.5 * len(frame)))
    async with door(tmp_path, budget, hub_sequences=4) as (service, ring):
        await ring.put([frame], key="first")
        puts = [asyncio.create_task(ring.put([frame], key=str(n))) for n in range(4)]
        async with asyncio.timeout(60):
            while len(budget._waiting) < 2:
                await asyncio.sleep(0.01)
        assert service.hub.status().puts_waiting == 2 and ring.unanswered == 4
        assert budget.held == 2 * len(frame), "one at a time may go beyond it"
        session = service.hub.open("test")
        for _ in range(5):
            async with asyncio.timeout(60):
                while (entries := session.try_lease(BatchSize(groups=1), 0)) is None:
                    await asyncio.sleep(0.01)
            session.commit([entry.id for entry in entries])
        assert len({(await put).value for put in puts}) == 4
        assert budget.held == 0


async def test_a_group_for_which_there_is_no_budget_is_refused_and_leaves_nothing(tmp_path):
    frame = encode_bytes(group_of(drawn(-1), length=200))
    budget = Budget(len(frame), REFUSALS.in_flight)
    held, beyond = budget.share(), budget.share()
    await budget.take(held, len(frame), 1)
    await budget.take(beyond, len(frame), 1)
    async with door(tmp_path, budget, hold_s=0.1) as (_, ring):
        with pytest.raises(HubFull, match="in-flight-mb"):
            await ring.put([frame], key="a")
        held.end()
        beyond.end()
        assert (await ring.put([frame], key="a")).value == 0
        assert budget.held == 0


async def test_a_server_that_ends_is_seen_by_the_ring_at_once(tmp_path):
    async with door(tmp_path, hub_mb=0.01) as (service, ring):
        puts = [asyncio.create_task(ring.put(encode(group_of(drawn(-1), length=200)), key=str(n))) for n in range(5)]
        await until(lambda: service.hub.status().puts_waiting, "a group that waits for room")
        service.hub.stop()
        ended = await asyncio.wait_for(asyncio.gather(*puts, return_exceptions=True), 60)
        assert any(isinstance(one, ProcessDied) for one in ended)


async def test_a_second_server_in_one_directory_offers_no_ring_and_says_so(tmp_path, capsys):
    async with door(tmp_path):
        settings = ServeOptions(directory=tmp_path / "api", journal=False)
        other = Service.open(settings)
        async with same_host.listening(other, settings, Budget(1 << 30)):
            assert other.same_host is None
        await other.close()
    assert "another process listens" in capsys.readouterr().err


async def test_a_listener_that_fails_is_reported_and_no_longer_offered(tmp_path, capsys, monkeypatch):
    async with door(tmp_path) as (service, ring):
        assert (await ring.put(encode(group_of(drawn(-1))), key="a")).value >= 0
        offer = service.same_host
        loop = asyncio.get_running_loop()

        def full(*given: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as epoll says of one watch too many

        monkeypatch.setattr(loop, "add_reader", full)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another, short(Path(offer["path"])) as address:
            another.connect(address)
            async with asyncio.timeout(60):
                while service.same_host is not None:
                    await asyncio.sleep(0.01)
        monkeypatch.undo()
        assert "shared memory for producers on this machine has ended" in capsys.readouterr().err
