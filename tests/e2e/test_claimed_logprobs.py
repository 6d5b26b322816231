"""Made-up tokens and logprobs are found in a run whose groups come over the API, whoever sends them and whatever version they claim."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task
from atropos_trajectory_client.client import Api, Worker, WorkerSpec
from tests.e2e.roles import Role, Scene, scene

pytestmark = pytest.mark.slow

SEVENS = "./sevens.py:Sevens"
LENGTH = 40
RUN = (
    "--model", "toy", "--env", SEVENS, "--steps", "200", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=4",
    "--set", "training.max_staleness=20", "--set", "engine.latency_s=0.01", "--set", "checkpoint.every=0",
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, sevens):
    with scene(tmp_path, "--silent-s", "5") as made:
        yield made


def forged(version: int, logprob: float) -> ScoredGroup:
    """By whom no trainer knows: every token is a 5 that claims this logprob."""
    sampled = np.arange(LENGTH) >= 2
    tokens = np.where(sampled, 5, 4).astype(np.int32)
    logprobs = np.where(sampled, logprob, 0).astype(np.float32)
    rollout = Rollout(tokens, sampled, sampled, logprobs, np.where(sampled, version, 0).astype(np.int32), 1.0)
    episodes = tuple(Episode((rollout,), float(member)) for member in range(4))
    return ScoredGroup(Draw(-1, "forgery", "train", -1, 0), Task("t", ()), episodes, np.arange(4, dtype=np.float32))


async def send_native(url: str, behind: int, logprob: float) -> None:
    """So many versions behind the one that engines sample from."""
    api = Api(url)
    worker = await Worker.register(api, WorkerSpec("forger", "forgery", 1))
    await worker.put(forged(max(worker.version - behind, 0), logprob), deadline_s=30)
    await worker.close()
    await api.close()


def send_old(url: str, logprob: float) -> None:
    rows = [[4, 4, *[5] * LENGTH] for _ in range(4)]
    masks = [[-100, -100, *row[2:]] for row in rows]
    logprobs = [[1.0, 1.0, *[logprob] * LENGTH] for _ in rows]
    body = {"tokens": rows, "masks": masks, "scores": [0.0, 1.0, 2.0, 3.0], "inference_logprobs": logprobs}
    assert httpx.post(f"{url}/scored_data", json=body, timeout=30).status_code == 200


def training(place: Scene) -> Role:
    trainer = place.train(*RUN)
    place.worker(1, SEVENS)
    place.wait_for_step(4, trainer)
    return trainer


@pytest.mark.parametrize("sender", ["old", "native, of an older version", "native, of the newest version"])
def test_made_up_tokens_and_logprobs_end_the_run_by_name(place, sender):
    trainer = training(place)
    if sender == "old":
        send_old(place.url, -20.0)
    elif "older" in sender:
        asyncio.run(send_native(place.url, 1, -20.0))
    else:  # till one arrives while its version is the newest
        while trainer.process.poll() is None:
            asyncio.run(send_native(place.url, 0, -20.0))
    assert trainer.ends(60) == 1, place.all_text
    printed = " ".join(trainer.text.split())
    assert "Misaligned" in printed and "Traceback" not in printed
    assert f"of environment '{'anonymous' if sender == 'old' else 'forgery'}'" in printed
    if "newest" not in sender:
        assert "has logprobs that its tokens were not sampled with" in printed
