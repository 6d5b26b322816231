"""Engine "remote" and the endpoint at its other end: the same samples as the engine itself gives, and weights only where
they are allowed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import AccessRefused, DataError, DeadlineExceeded, FitError, LeaseLost
from atropos_core.interfaces import Engine, Transport
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Completion, Floats, Sampling, Tokens
from atropos_trajectory_api.engine_http.routes import EngineRoutes, engine_app
from atropos_trajectory_client.remote_engine import RemoteEngine
from tests.waiting import until

PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = Sampling(max_tokens=6)


class Loads(ToyEngine):
    """The toy engine; remembers what it was given to load."""

    def __init__(self) -> None:
        super().__init__(ToyEngineOptions(), RunContext(Path("run"), TOY_MODEL))
        self.loaded: list[Any] = []

    async def load_weights(self, directory: Path) -> None:
        self.loaded.append({p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*.*")})

    async def load_adapter(self, directory: Path, version: int) -> None:
        self.loaded.append((version, sorted(p.name for p in directory.iterdir())))


class Mute(Loads):
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await Engine.logprobs(self, sequences, temperature)


@asynccontextmanager
async def reached(
    engine: Engine, *, takes: Transport | None = "checkpoint"
) -> AsyncIterator[tuple[RemoteEngine, EngineRoutes]]:
    door = engine_app(engine, takes)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(door, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        remote = RemoteEngine(f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            await remote.open()
            yield remote, door
        finally:
            await remote.close()
            server.should_exit = True
            await serving
            door.close()


def same(one: Completion, other: Completion) -> bool:
    columns = ("tokens", "logprobs", "policy_version")
    return one.finish == other.finish and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in columns
    )


async def test_samples_are_those_of_the_engine_itself():
    engine = Loads()
    async with reached(engine) as (remote, _):
        assert replace(await remote.open(), instance="") == await engine.open()
        here = await engine.sample(PROMPT, 3, SAMPLING, [5, 6, 7], 10.0)
        there = await remote.sample(PROMPT, 3, SAMPLING, [5, 6, 7], 10.0)
        assert len(there) == 3 and all(map(same, here, there))


async def test_a_paused_engine_goes_on_at_the_version_that_it_is_given():
    async with reached(Loads()) as (remote, _):
        async with remote.paused(9):
            sampling = asyncio.create_task(remote.sample(PROMPT, 1, SAMPLING, [1], 20.0))
            await asyncio.sleep(0.2)
            assert not sampling.done()
        [made] = await sampling
        assert set(made.policy_version.tolist()) == {9}


async def test_a_deadline_over_there_is_one_here():
    async with reached(Loads()) as (remote, _):
        await remote.pause()
        with pytest.raises(DeadlineExceeded):
            await remote.sample(PROMPT, 1, SAMPLING, [1], 0.3)


async def test_a_caller_that_hangs_up_frees_the_engine():
    class Counts(Loads):
        begun = cancelled = 0

        async def sample(self, *given: Any) -> list[Completion]:
            self.begun += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return []

    engine = Counts()
    async with reached(engine) as (remote, _):
        sampling = asyncio.create_task(remote.sample(PROMPT, 1, SAMPLING, [1], 60.0))
        await until(lambda: engine.begun, "the request at the engine")
        sampling.cancel()
        await until(lambda: engine.cancelled, "the end of its work")


async def test_weights_and_adapters_arrive_file_by_file_and_leave_nothing_behind(tmp_path: Path):
    model = tmp_path / "model"
    (model / "part").mkdir(parents=True)
    big = np.random.default_rng(0).bytes(3_000_000)
    (model / "config.json").write_text("{}")
    (model / "part" / "weights.safetensors").write_bytes(big)
    engine = Loads()
    async with reached(engine) as (remote, door):
        await remote.load_weights(model)
        await remote.load_adapter(model / "part", 4)
        assert engine.loaded == [
            {"config.json": b"{}", "part/weights.safetensors": big}, (4, ["weights.safetensors"]),
        ]  # fmt: skip
        assert door._uploads is not None and not list(door._uploads.iterdir())
        uploads = door._uploads
    assert not uploads.exists()


async def test_a_new_upload_removes_those_that_broke_off_and_not_the_one_that_is_being_loaded():
    loading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Loads):
        async def load_weights(self, directory: Path) -> None:
            loading.set()
            await go_on.wait()
            await super().load_weights(directory)

    async with reached(engine := Slow()) as (remote, door):

        async def put(name: str, *, breaks_off: bool) -> None:
            messages = [{"type": "http.request", "body": b"x" * 1000, "more_body": breaks_off}]
            messages += [{"type": "http.disconnect"}]

            async def receive() -> Any:
                return messages.pop(0)

            async def send(message: Any) -> None: ...

            where = f"/v1/engine/uploads/{name}/model.safetensors"
            await door({"type": "http", "method": "PUT", "path": where}, receive, send)

        await put(f"{remote._holder}.whole", breaks_off=False)
        load = asyncio.create_task(remote._change("load_weights", {"upload": f"{remote._holder}.whole"}, 20.0))
        await asyncio.wait_for(loading.wait(), 10)
        for number in range(3):
            await put(f"{remote._holder}.broken{number}", breaks_off=True)
        assert door._uploads is not None
        assert sorted(path.name for path in door._uploads.iterdir()) == [
            f"{remote._holder}.{name}" for name in ("broken2", "whole")
        ]
        go_on.set()
        await load
        assert engine.loaded == [{"model.safetensors": b"x" * 1000}]


async def test_a_newer_trainer_takes_the_engine_over_and_the_former_is_notified(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engine = Loads()
    async with reached(engine) as (former, _):
        newer = RemoteEngine(former._api.url)
        try:
            for trainer, version in ((former, 1), (newer, 7)):
                await trainer.pause()
                await trainer.load_weights(tmp_path)
                await trainer.resume(version)
            for late in (former.pause, lambda: former.resume(2), lambda: former.load_weights(tmp_path)):
                with pytest.raises(LeaseLost, match="another trainer has taken this engine over"):
                    await late()
            assert len(engine.loaded) == 2
            [made] = await newer.sample(PROMPT, 1, SAMPLING, [1], 5.0)
            assert set(made.policy_version.tolist()) == {7}
        finally:
            await newer.close()


@pytest.mark.parametrize("name", ["../../etc/x.txt", "a/../x.txt", "..", "only", "a//b/../../c"])
async def test_an_upload_stays_in_its_folder(name: str):
    async with reached(Loads()) as (_, door):
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await door({"type": "http", "method": "PUT", "path": f"/v1/engine/uploads/{name}"}, receive, send)
        assert sent[0]["status"] == 422


async def test_an_upload_that_stands_still_is_ended_with_its_cause():
    sent: list[Any] = []
    door = engine_app(Loads(), "checkpoint", silent_s=0.2)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    where = {"type": "http", "method": "PUT", "path": "/v1/engine/uploads/one.whole/model.safetensors"}
    try:
        await asyncio.wait_for(door(where, receive, send), 10)
    finally:
        door.close()
    assert sent[0]["status"] == 503
    assert b"the client of an upload gave no answer within 0.2 s" in sent[1]["body"]


async def test_an_endpoint_for_workers_samples_and_changes_nothing(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    engine = Loads()
    async with reached(engine, takes=None) as (remote, _):
        assert len(await remote.sample(PROMPT, 1, SAMPLING, [1], 10.0)) == 1
        for forbidden in (
            remote.pause(),
            remote.resume(1),
            remote.load_weights(tmp_path),
            remote.load_adapter(tmp_path, 1),
        ):
            with pytest.raises(AccessRefused, match="for sampling"):
                await forbidden
        assert engine.loaded == []


@pytest.mark.parametrize(
    ("takes", "fits", "error"),
    [("checkpoint", "checkpoint", FitError), ("adapter", "adapter", FitError), (None, None, AccessRefused)],
)
async def test_a_run_is_refused_at_its_start_where_its_weights_would_be(
    takes: Transport | None, fits: Transport | None, error: type[Exception]
):
    kinds: tuple[Transport, ...] = ("checkpoint", "adapter")
    async with reached(Loads(), takes=takes) as (samples, _):
        for sends in kinds:
            run = RemoteEngine(samples._api.url, transport=sends)
            try:
                if sends == fits:
                    assert await run.open() == await samples.open()
                else:
                    with pytest.raises(error):
                        await run.open()
            finally:
                await run.close()


async def test_scores_are_the_engines_own_and_their_absence_is_an_answer():
    async with reached(engine := Loads()) as (remote, _):
        [scored], [own] = await remote.logprobs([PROMPT], 0.5), await engine.logprobs([PROMPT], 0.5)
        assert scored.tolist() == own.tolist() and scored.dtype == np.float32
    async with reached(Mute()) as (remote, _):
        with pytest.raises(NotImplementedError, match="cannot score"):
            await remote.logprobs([PROMPT])


async def test_what_is_no_prompt_is_refused():
    async with reached(Loads()) as (remote, _):
        for prompt in (PROMPT.astype(np.int64), PROMPT[:0], -PROMPT):
            with pytest.raises(DataError):
                await remote.sample(prompt, 1, SAMPLING, [1], 5.0)
        with pytest.raises(DataError, match="seeds"):
            await remote.sample(PROMPT, 2, SAMPLING, [1], 5.0)
