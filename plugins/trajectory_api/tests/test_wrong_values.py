"""Values that no group may hold: the same verdict at every way into a server, and out of a journal that has them already."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from atropos_core.codec import encode_bytes
from atropos_core.errors import AtroposError, DataError
from atropos_core.hub.records import Label
from atropos_core.types import ScoredGroup
from atropos_trajectory_api.journal.store import JournalStore
from atropos_trajectory_api.legacy_groups.outgoing_groups import plain
from atropos_trajectory_api.legacy_groups.stored_group import OldGroup
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.app import App
from atropos_trajectory_api.server.serving import bind
from atropos_trajectory_api.service.service import Service
from atropos_trajectory_client.client import Api, TrainerSession, Worker, WorkerSpec
from plugins.trajectory_api.tests.running import REGISTER
from plugins.trajectory_api.tests.sent_groups import Server, serving
from plugins.trajectory_api.tests.test_api_source import run
from plugins.trajectory_api.tests.test_client import SPEC
from tests.wrong_groups import NATIVE, RIGHT, VALUES, VOCABULARY, group, rollout

COERCED = {"a score that is text", "a temperature that is a flag"}  # by the old protocol, as by atroposlib's server
TRAINER = replace(SPEC, vocabulary=VOCABULARY)


def as_old(made: ScoredGroup) -> dict[str, Any]:
    """As an old client would send the same values."""
    rollouts = [episode.rollouts[0] for episode in made.episodes]
    body: dict[str, Any] = {
        "tokens": [one.tokens for one in rollouts],
        "masks": [np.where(one.trained, one.tokens, -100) for one in rollouts],
        "scores": [episode.score for episode in made.episodes],
        "overrides": [{"temperature": one.temperature, "sft": one.sft} for one in rollouts],
    }
    for name, column in (("inference_logprobs", "logprobs"), ("advantages",) * 2, ("ref_logprobs",) * 2):
        if getattr(rollouts[0], column) is not None:
            spare = np.zeros(len(rollouts[1].tokens))
            body[name] = [getattr(rollouts[0], column), spare if (own := getattr(rollouts[1], column)) is None else own]
    if (teacher := rollouts[0].teacher) is not None:
        empty: list[Any] = [[]] * len(rollouts[1].tokens)
        body["distill_token_ids"] = [[[token] for token in teacher.token_ids.tolist()], empty]
        body["distill_logprobs"] = [[[logprob] for logprob in teacher.logprobs.tolist()], empty]
    sent: dict[str, Any] = plain(body)
    return sent


@asynccontextmanager
async def parties(server: Server, *, same_host: bool) -> AsyncIterator[Worker]:
    """A trainer that says its vocabulary, and a worker."""
    api = Api(server.url)
    session = await TrainerSession.open(api, TRAINER, deadline_s=10)
    worker = await Worker.register(api, WorkerSpec("one", "words", 9))
    assert (worker._ring is not None) == same_host
    try:
        yield worker
    finally:
        await worker.close()
        await session.close()
        await api.close()


async def natively(worker: Worker, made: ScoredGroup) -> str:
    """The server's reason for refusing it."""
    try:
        assert await worker.put(made, deadline_s=10) is not None
    except AtroposError as error:
        assert isinstance(error, DataError), error
        return str(error)
    return ""


async def test_every_way_into_a_server_gives_the_same_verdict_of_the_same_value(tmp_path: Path) -> None:
    wrong = {name: (change(group()), named) for name, (change, named) in (VALUES | NATIVE).items()}
    right = {name: (change(group()), "") for name, change in RIGHT.items()}
    said: dict[str, dict[str, str]] = {}
    with serving(tmp_path, same_host=True) as server:
        async with parties(server, same_host=True) as worker, httpx.AsyncClient(base_url=server.url) as old:
            for name, (made, _) in (wrong | right).items():
                verdicts = said[name] = {"shared memory": await natively(worker, made)}
                ring, worker._ring = worker._ring, None
                verdicts["/v1"] = await natively(worker, made)
                worker._ring = ring
                if name not in NATIVE and name not in COERCED:
                    answer = await old.post("/scored_data", content=json.dumps(as_old(made)).encode())
                    assert answer.status_code in (200, 422), (name, answer.text)
                    verdicts["/scored_data"] = answer.text if answer.status_code == 422 else ""
    for name, (_, named) in (wrong | right).items():
        for way, verdict in said[name].items():
            assert bool(verdict) == bool(named), (name, way, verdict)
            assert re.search(named, verdict), (name, way, verdict)
        assert said[name]["/v1"] == said[name]["shared memory"]


# -- what is in a journal already


def damaged_payloads() -> list[bytes]:
    """As servers let in that did not look: of workers, and of old environments."""
    native = [encode_bytes(change(group())) for change, _ in (VALUES | NATIVE).values()]
    native.append(encode_bytes(group(truncated=True)))  # which does not say what was kept
    one = rollout()
    tokens, sampled = np.concatenate([one.tokens] * 2), np.concatenate([one.sampled] * 2)
    columns = {"inference_logprobs": np.full(len(tokens), -1, np.float32)}
    fine = OldGroup("words", [8, 8], tokens, sampled, [1.0, 0.0], columns, None, {"env_id": 0})
    old = [
        replace(fine, scores=[1e30, 0.0]),
        replace(fine, columns={"advantages": np.full(len(tokens), 3e38, np.float32)}),
        replace(fine, columns={"inference_logprobs": np.full(len(tokens), 1, np.float32)}),
        replace(fine, rest={"env_id": 0, "generation_params": {"temperature": 0}}),
        replace(fine, tokens=np.full(len(tokens), VOCABULARY, np.int32)),
    ]
    return [*native, *(one.frame() for one in old), b"no frame at all", encode_bytes({"not": "a group"})]


def journal(directory: Path) -> int:
    """Of damaged groups with a right one before and after them; how many are damaged."""
    damaged = damaged_payloads()
    store = JournalStore(directory / "api" / "journal")
    for number, payload in enumerate([encode_bytes(group()), *damaged, encode_bytes(group())]):
        store.put(number, payload, Label("words", 2, len(payload), 0, -1, "t"), None)
    store.close()
    return len(damaged)


@pytest.fixture
def with_damage(tmp_path: Path) -> Iterator[tuple[Server, int]]:
    damaged = journal(tmp_path)
    with serving(tmp_path) as server:
        yield server, damaged


async def test_damaged_groups_of_a_journal_are_dropped_by_name_and_a_run_trains_on(
    with_damage: tuple[Server, int], tmp_path: Path
) -> None:
    server, damaged = with_damage
    api = Api(server.url)
    worker = await Worker.register(api, WorkerSpec("one", "words", 9))
    async with run(server, tmp_path) as here:
        assert len(await here.lease(2)) == 2
        await here.train()
        await here.source.commit()
        with pytest.raises(AtroposError):
            await here.lease(1, deadline_s=0.5)
        assert here.source.take_lost().dropped == {"damaged": damaged}
        async with httpx.AsyncClient() as client:
            told = (await client.get(f"{server.url}/metrics")).text
    assert f'atropos_dropped_groups_total{{cause="damaged"}} {damaged}\n' in told
    await worker.close()
    await api.close()
    said = (tmp_path / "serve.log").read_text()
    assert "cannot be trained: episodes[0].rollouts[0].logprobs[7] is 0.25: a logprob is at most 0" in " ".join(
        said.split()
    )
    assert "was sampled with top_p, top_k or min_p, and does not say which tokens these kept" in " ".join(said.split())
    assert "Traceback" not in said


def test_damaged_groups_of_a_journal_are_dropped_for_an_old_trainer_too(with_damage: tuple[Server, int]) -> None:
    """Whose vocabulary nobody says: three of them are then like any other."""
    server, damaged = with_damage
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/register", json={**REGISTER, "batch_size": 2}).status_code == 200
        found = []
        while batch := client.get("/batch").json()["batch"]:
            found += batch
        assert len(found) == 2 + 3
        assert all(one["scores"] == [1.0, 0.0] for one in found)
        assert f'cause="damaged"}} {damaged - 3}\n' in client.get("/metrics").text


async def test_a_trainer_drops_by_name_what_a_server_hands_out_that_does_not_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of an earlier version: its journal is read as it is."""
    damaged = journal(tmp_path)
    options = ServeOptions(directory=tmp_path / "api", same_host=False)
    service = Service(options, JournalStore(tmp_path / "api" / "journal"))
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(App(service, options), log_level="error", lifespan="on"))
    serving = asyncio.create_task(server.serve([listening]))
    api = Api(f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        session = await TrainerSession.open(api, TRAINER, deadline_s=10)
        got, dropped = [], []
        async with asyncio.timeout(20):
            while len(got) < 2:
                leased = await session.lease(1, 0, 1.0)
                got += leased.entries
                dropped += leased.dropped
        await session.commit([number for number, _ in got])
        dropped += (await session.lease(1, 0, 0.2)).dropped
        assert [number for number, _ in got] == [0, damaged + 1]
        assert [cause for _, cause in dropped] == ["damaged"] * damaged
        assert service.hub.status().dropped.get("damaged", 0) == damaged
        await session.close()
    finally:
        await api.close()
        server.should_exit = True
        await serving
        await service.close()
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be trained and is dropped: episodes[0].score is a whole number of 1329 bits" in said
    assert (
        "is dropped: episodes[0].rollouts[0] was sampled with top_p, top_k or min_p, and does not say which tokens"
        in said
    )
