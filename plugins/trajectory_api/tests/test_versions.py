"""No group gets in whose tokens claim a policy version that no engine can have had, by whatever way it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from atropos_core.errors import NoSuchVersion
from atropos_core.types import UNKNOWN_VERSION, Draw
from atropos_trajectory_client.client import Api, TrainerSession, Worker, WorkerSpec
from plugins.trajectory_api.tests.sent_groups import Server, group_of, serving
from plugins.trajectory_api.tests.test_client import SPEC

NEVER = [2**31 - 1, 7, -2, -(2**31)]


def undrawn(tag: int) -> Draw:
    return Draw(-1, "words", "train", -1, tag)


@asynccontextmanager
async def parties(server: Server) -> AsyncIterator[tuple[TrainerSession, Worker]]:
    api = Api(server.url)
    session = await TrainerSession.open(api, SPEC, deadline_s=10)
    worker = await Worker.register(api, WorkerSpec("one", "words", 9))
    try:
        yield session, worker
    finally:
        await worker.close()
        await session.close()
        await api.close()


@pytest.mark.parametrize("same_host", [False, True], ids=["over HTTP", "through shared memory"])
async def test_a_version_that_no_engine_can_have_had_is_refused_by_name(tmp_path: Path, same_host: bool):
    with serving(tmp_path, same_host=same_host) as server:
        async with parties(server) as (session, worker):
            await session.set_version(5)
            for tag, version in enumerate([UNKNOWN_VERSION, 0, 5]):
                assert await worker.put(group_of(undrawn(tag), version=version), deadline_s=10) is not None
            await session.lease(
                3, 5, 0.0
            )  # what it leases now trains version 6, which engines have before it is reported
            assert await worker.put(group_of(undrawn(3), version=6), deadline_s=10) is not None
            for version in NEVER:
                with pytest.raises(NoSuchVersion, match=f"claim to be sampled from policy version {version}, and"):
                    await worker.put(group_of(undrawn(9), version=version), deadline_s=10)
            await session.announce(40)  # before weights that are not the next ones are published
            assert await worker.put(group_of(undrawn(4), version=40), deadline_s=10) is not None


async def test_what_is_masked_claims_nothing(tmp_path: Path):
    with serving(tmp_path) as server:
        async with parties(server) as (_, worker):
            group = group_of(undrawn(0))
            for episode in group.episodes:
                [rollout] = episode.rollouts
                rollout.policy_version[~rollout.sampled] = np.int32(1 << 30)
            assert await worker.put(group, deadline_s=10) is not None


async def test_a_version_that_was_lost_did_exist_and_a_killed_server_knows_it(tmp_path: Path):
    """A run that resumes from a checkpoint begins below what workers still send."""
    with serving(tmp_path) as server:
        async with parties(server) as (session, _):
            await session.lease(1, 10, 0.0)
        server.kill()
        server.start()
        async with parties(server) as (session, worker):
            assert session.newest_before == 11
            await session.set_version(3)
            assert await worker.put(group_of(undrawn(0), version=11), deadline_s=10) is not None
            with pytest.raises(NoSuchVersion, match="the newest that there can be is 11"):
                await worker.put(group_of(undrawn(1), version=12), deadline_s=10)


async def test_a_server_without_a_journal_is_informed_again_before_it_refuses_anything(tmp_path: Path):
    with serving(tmp_path, "--no-journal") as server:
        async with parties(server) as (session, worker):
            await session.lease(1, 10, 0.0)
            server.kill()
            server.start()
            assert await worker.put(group_of(undrawn(0), version=11), deadline_s=20) is not None, (
                "it has not been reported yet"
            )
            with pytest.raises(NoSuchVersion, match="no version is below 0"):
                await worker.put(group_of(undrawn(1), version=-2), deadline_s=20)
