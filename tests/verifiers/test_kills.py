"""The process of an environment of verifiers is killed at random while a run samples from it."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from atropos_core.errors import RemoteError
from atropos_core.types import Episode
from tests.e2e.environment_kills import killed_at_random
from tests.verifiers.conftest import contract
from tests.verifiers.scenes import HERE, child_of, opened, scripted
from tests.waiting import has_ended, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # each start imports verifiers


def test_killed_four_times_at_random_rollouts_fail_by_name_and_no_draw_is_lost(tmp_path):
    table = {"use": "verifiers", "id": "example/guessing", "folder": str(HERE / contract())}
    failed = killed_at_random(
        tmp_path, {"guess": table}, {"guess": "environment-guess"}, kills=4, seed=3, model="tiny-tools"
    )
    assert failed["guess"], "a kill met a group in progress"
    assert all("environment-guess" in one and "SIGKILL" in one for one in failed["guess"]), failed


async def test_kill_9_as_it_is_started_again_fails_that_group_alone(tmp_path):
    options = {"id": "example/guessing", "folder": str(HERE / contract())}
    async with opened(tmp_path, **options) as environment:
        _, policy = scripted(lambda prompt, seed: "1")
        task = environment.tasks("train")[0]
        first = child_of().pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: has_ended(first), "the end of the first")
        await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
        going = asyncio.ensure_future(environment.rollout_group(task, policy, 2, seeds=[1, 2]))
        while not (
            found := [
                one for one in psutil.Process().children() if one.pid != first and "host" in " ".join(one.cmdline())
            ]
        ):
            await asyncio.sleep(0.01)
        found[0].send_signal(signal.SIGSTOP)  # it is starting, however quick the machine is
        await asyncio.sleep(0.5)
        found[0].send_signal(signal.SIGKILL)
        with pytest.raises(RemoteError, match="SIGKILL"):
            await going
        again = await environment.rollout_group(task, policy, 2, seeds=[1, 2])
    assert all(isinstance(one, Episode) for one in again), again
