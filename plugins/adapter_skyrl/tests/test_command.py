"""`atropos skyrl-env` as a real process that is told to end."""

from __future__ import annotations

import asyncio
import signal

import pytest

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.rings import RingGroups
from atropos_adapter_skyrl.source import GroupRequest
from atropos_adapter_skyrl.work_queue import NONCE, SOCKET
from atropos_core.types import Draw
from atropos_trajectory_client.shm.listener import RingListener
from tests.e2e.roles import Role

LASTS = """
import asyncio
from pathlib import Path

from atropos_core import Environment, Task


class Lasts(Environment):
    def tasks(self, split):
        return [Task(split, ({"role": "user", "content": "Say something."},))]

    async def rollout(self, task, policy, *, seed):
        Path("begun").touch()
        await asyncio.sleep(3600)
"""
ENDS_S = 20.0  # a working process starts and ends faster; anything that it could wait for takes at least 60 s


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "lasts.py").write_text(LASTS)
    words = ("skyrl-env", "./lasts.py", "--rings", "rings", "--engine-url", "http://127.0.0.1:9", "--model", "toy")
    roles = []

    def start():
        roles.append(Role(tmp_path, "worker", words))
        return roles[-1]

    yield start
    for role in roles:
        role.kill()


def ended_by(number, worker):
    worker.process.send_signal(number)
    assert worker.ends(ENDS_S) == 130
    assert "stopped: its groups go to another worker" in worker.text and "Traceback" not in worker.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_that_skyrl_has_given_no_work_yet_ends_at_once(worker, tmp_path, number):
    """SkyRL's event loop is blocked during a training step: it accepted the worker and has not served it since."""
    asking = RingListener(tmp_path / "rings" / SOCKET, "nonce")
    (tmp_path / "rings" / NONCE).write_text("nonce")
    waiting = worker()
    up = asking.accept(60)
    ended_by(number, waiting)
    up.take(10)
    assert up.ended
    assert not list((tmp_path / "rings").glob("worker-*")), "what it had there is gone as well"
    up.close()
    asking.close()


async def test_a_worker_in_the_middle_of_a_rollout_gives_its_request_back_and_ends_at_once(worker, tmp_path):
    source = RingGroups(SkyRLOptions.model_validate({"source": "rings", "rings": tmp_path / "rings"}))
    await source.open()
    asked = GroupRequest(Draw(1, "lasts", "train", 0, 1), 2, True)
    fetching = asyncio.create_task(source.fetch([asked], {"max_tokens": 2, "temperature": 1.0}, step_wise=False))
    playing = worker()
    while not (tmp_path / "begun").exists():
        assert playing.process.poll() is None, playing.text
        await asyncio.sleep(0.02)
    await asyncio.to_thread(ended_by, signal.SIGINT, playing)
    while source.exchange.workers:
        await asyncio.sleep(0.02)
    assert source.exchange.requeued == 1 and not fetching.done(), "another worker gets it"
    fetching.cancel()
    await source.close()
