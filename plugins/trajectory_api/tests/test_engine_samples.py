"""Samples that are requested together travel together, and each is on its own: its answer, its error, its deadline."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import ApiError, ConfigError, DataError, DeadlineExceeded, ProcessDied, RemoteError, TooLarge
from atropos_core.guards.patience import Patience
from atropos_core.interfaces import Engine
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Completion, Sampling, Tokens
from atropos_http_server.server import START_S
from atropos_trajectory_api.engine_http import samples as engine_samples
from atropos_trajectory_api.engine_http import server as doors
from atropos_trajectory_api.engine_http.server import RunningEngineServer, open_engine_server
from atropos_trajectory_api.roles import named_engines
from atropos_trajectory_api.roles.named_engines import NamedEngines
from atropos_trajectory_client.remote_engine import RemoteEngine

PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = Sampling(max_tokens=6)
CHILD = """
import asyncio
from pathlib import Path
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.plugins.provider import RunContext
from atropos_trajectory_api.engine_http.server import open_engine_server

async def main():
    engine = ToyEngine(ToyEngineOptions(latency_s=60), RunContext(Path("run"), TOY_MODEL))
    endpoint = await open_engine_server(engine, "127.0.0.1:0", None, await engine.open())
    print(endpoint.url, flush=True)
    await asyncio.sleep(120)

asyncio.run(main())
"""


class Watched(ToyEngine):
    """The toy engine. Remembers in which turn of the loop each call came; answers a seed once it is let go."""

    def __init__(self) -> None:
        super().__init__(ToyEngineOptions(), RunContext(Path("run"), TOY_MODEL))
        self.turns: list[list[int]] = []  # seeds, by turn
        self.cancelled: set[int] = set()
        self.held: dict[int, asyncio.Future[None]] = {}
        self.failing: dict[int, Exception] = {}

    def hold(self, *seeds: int) -> None:
        self.held |= {seed: asyncio.get_running_loop().create_future() for seed in seeds}

    def let_go(self, seed: int) -> None:
        self.held[seed].set_result(None)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        if not self.turns or self.turns[-1] is not getattr(self, "_turn", None):
            self._turn: list[int] | None = []
            self.turns.append(self._turn)
            asyncio.get_running_loop().call_soon(self._end_turn)
        assert self._turn is not None
        self._turn.append(seeds[0])
        try:
            if seeds[0] in self.failing:
                raise self.failing[seeds[0]]
            if seeds[0] in self.held:
                await self.held[seeds[0]]
        except asyncio.CancelledError:
            self.cancelled.add(seeds[0])
            raise
        return await super().sample(prompt, n, sampling, seeds, deadline_s)

    def _end_turn(self) -> None:
        self._turn = None


@asynccontextmanager
async def reached(engine: Engine) -> AsyncIterator[RemoteEngine]:
    door = await open_engine_server(engine, "127.0.0.1:0", None, await engine.open())
    remote = RemoteEngine(door.url)
    try:
        yield remote
    finally:
        await remote.close()
        await door.close()


def ask(engine: Engine, seeds: Sequence[int], deadline_s: float = 20.0) -> list[asyncio.Task[list[Completion]]]:
    return [asyncio.create_task(engine.sample(PROMPT, 1, SAMPLING, [seed], deadline_s)) for seed in seeds]


async def until(claim: object, deadline_s: float = 60.0) -> None:
    assert callable(claim)
    async with asyncio.timeout(deadline_s):
        while not claim():
            await asyncio.sleep(0.01)


async def test_requests_of_one_turn_reach_the_engine_in_one_turn_and_in_order():
    async with reached(engine := Watched()) as remote:
        await asyncio.gather(*ask(remote, range(100)))
        assert engine.turns == [list(range(100))]
        await asyncio.gather(*ask(remote, range(3)))
        assert len(engine.turns) == 2


async def test_answers_are_those_of_the_engine_itself_whatever_the_order_in_which_they_come():
    async with reached(engine := Watched()) as remote:
        engine.hold(*range(20))
        asked = ask(remote, range(20))
        await until(lambda: engine.turns)
        for seed in reversed(range(20)):
            engine.let_go(seed)
            if seed % 3 == 0:
                await asyncio.wait_for(asyncio.shield(asked[seed]), 60)
        for seed, [made] in enumerate(await asyncio.gather(*asked)):
            [own] = await ToyEngine.sample(engine, PROMPT, 1, SAMPLING, [seed], 5.0)
            assert made.tokens.tolist() == own.tokens.tolist()
            assert made.logprobs.tolist() == own.logprobs.tolist()


async def test_a_short_reply_does_not_wait_for_the_longest():
    async with reached(engine := Watched()) as remote:
        engine.hold(2)
        first, last = ask(remote, [1, 2])
        await asyncio.wait_for(first, 60)
        assert not last.done()
        engine.let_go(2)
        await last


async def test_a_cancelled_call_leaves_the_others_be_and_when_all_are_gone_so_is_their_work():
    async with reached(engine := Watched()) as remote:
        engine.hold(1, 2, 3)
        first, second, third = ask(remote, [1, 2, 3])
        await until(lambda: engine.turns)
        first.cancel()
        engine.let_go(2)
        await second
        assert not third.done()
        assert not engine.cancelled
        third.cancel()
        await until(lambda: engine.cancelled == {1, 3})
        assert len(await ask(remote, [4])[0]) == 1


async def test_an_error_is_of_one_call_alone_and_keeps_its_class():
    async with reached(engine := Watched()) as remote:
        engine.failing = {
            1: ProcessDied("the engine has ended", remedy="start it"), 2: DataError("no such token"),
            3: NotImplementedError("not here"), 4: ZeroDivisionError("oh"),
        }  # fmt: skip
        asked = ask(remote, range(6))
        refused = [
            remote.sample(prompt, 1, SAMPLING, [9], 5.0) for prompt in (-PROMPT, PROMPT.astype(object), PROMPT * 1.0)
        ]
        given = await asyncio.gather(*asked, *refused, return_exceptions=True)
        assert [type(one) for one in given] == [
            list, ProcessDied, DataError, NotImplementedError, RemoteError, list, DataError, DataError, DataError,
        ]  # fmt: skip
        assert isinstance(given[1], ProcessDied)
        assert (given[1].args, given[1].remedy) == (("the engine has ended",), "start it")
        assert "ZeroDivisionError: oh" in str(given[4])


async def test_each_call_has_its_own_deadline():
    async with reached(engine := Watched()) as remote:
        engine.hold(1, 2)
        late, patient = [*ask(remote, [1], 0.3), *ask(remote, [2], 20.0)]
        with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
            await late
        assert len(engine.turns) == 1
        assert not patient.done()
        engine.let_go(2)
        await patient


async def test_more_than_a_request_may_hold_travels_in_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "BODY_BYTES", 5_000_000)
    prompts = [np.full(400_000, 1 + seed, np.int32) + np.arange(400_000, dtype=np.int32) % 2 for seed in range(6)]
    async with reached(engine := Watched()) as remote:
        asked = [remote.sample(prompt, 1, SAMPLING, [seed], 30.0) for seed, prompt in enumerate(prompts)]
        assert len(await asyncio.gather(*asked)) == 6
        assert sorted(seed for turn in engine.turns for seed in turn) == list(range(6))
        alike = [remote.sample(prompts[0].copy(), 1, SAMPLING, [seed], 30.0) for seed in range(40)]
        await asyncio.gather(*alike)
        assert engine.turns[-1] == list(range(40))  # one prompt, sent once
        with pytest.raises(TooLarge, match="the limit is 5 MB"):
            await remote.sample(np.arange(1_500_000, dtype=np.int32), 1, SAMPLING, [1], 30.0)


async def test_a_long_wait_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_samples, "BEAT_S", 0.1)
    monkeypatch.setattr("atropos_trajectory_client.http.BEAT_S", 0.1)
    async with reached(engine := Watched()) as remote:
        remote._api.patience = Patience(say_s=0.3, least_s=1.5)
        engine.hold(1)
        [asked] = ask(remote, [1])
        await asyncio.sleep(3.5)
        engine.let_go(1)
        await asked
        monkeypatch.setattr(engine_samples, "BEAT_S", 30.0)
        engine.hold(2)
        with pytest.raises(ApiError, match="went away"):
            await ask(remote, [2])[0]


async def test_an_endpoint_that_is_killed_ends_all_calls_at_once():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            remote = RemoteEngine((await asyncio.to_thread(child.stdout.readline)).strip())
            asked = [*ask(remote, range(5), 60.0)]
            await asyncio.sleep(0.5)
            asked += ask(remote, range(5, 8), 60.0)
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in asked)
            since = time.monotonic()
            child.kill()
            given = await asyncio.gather(*asked, return_exceptions=True)
            assert time.monotonic() - since < 30
            assert {type(one) for one in given} == {ApiError}
            with pytest.raises(ApiError, match="went away"):
                await ask(remote, [9])[0]
            await remote.close()
        finally:
            child.kill()


async def test_however_many_samples_wait_one_question_at_a_time_asks_for_engines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(named_engines, "LOOK_S", 0.2)
    engine = Watched()
    door = await open_engine_server(engine, "127.0.0.1:0", None, await engine.open())
    named: list[str] = []
    asked_anew = 0

    async def look() -> None:
        nonlocal asked_anew
        asked_anew += 1
        if asked_anew == 5:
            named[:] = [door.url]

    engines = NamedEngines(lambda: named, look, RemoteEngine)
    try:
        assert len(await asyncio.wait_for(asyncio.gather(*ask(engines, range(100))), 60)) == 100
        assert asked_anew == 5
        named.clear()
        with pytest.raises(DeadlineExceeded, match="the server names none"):
            await engines.sample(PROMPT, 1, SAMPLING, [1], 0.3)
    finally:
        await engines.close()
        await door.close()


async def test_of_two_servers_that_open_at_one_address_together_the_second_says_at_once_why_it_cannot():
    engine = Watched()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    info, since = await engine.open(), time.monotonic()
    opening = (open_engine_server(engine, where, None, info) for _ in range(2))
    first, second = await asyncio.gather(*opening, return_exceptions=True)
    assert isinstance(second, ConfigError), second
    assert f"nothing can listen at {where}: another process has that port" in str(second)
    assert "give another port with api.engine_address" in str(second)
    assert time.monotonic() - since < START_S / 2
    assert isinstance(first, RunningEngineServer)
    await first.close()


async def test_samples_follow_the_engine_to_another_address():
    old, new = Watched(), Watched()
    named: list[str] = []
    asked_anew = 0

    async def look() -> None:
        nonlocal asked_anew
        asked_anew += 1
        named[:] = [second.url]

    first = await open_engine_server(old, "127.0.0.1:0", None, await old.open())
    second = await open_engine_server(new, "127.0.0.1:0", None, await new.open())
    named.append(first.url)
    engines = NamedEngines(lambda: named, look, RemoteEngine)
    try:
        old.hold(*range(4))
        asked = ask(engines, range(4))
        await until(lambda: old.turns)
        await first.close()
        made = await asyncio.wait_for(asyncio.gather(*asked), 20)
        assert len(made) == 4
        assert asked_anew > 0
        assert sorted(seed for turn in new.turns for seed in turn) == list(range(4))
    finally:
        await engines.close()
        await first.close()
        await second.close()


async def test_an_engine_that_takes_weights_bounds_its_calls_and_not_what_is_uploaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "TRAINER_BODY_BYTES", 1000)
    engine = Watched()
    door = await open_engine_server(engine, "127.0.0.1:0", None, await engine.open(), takes="checkpoint")
    try:
        async with httpx.AsyncClient(base_url=door.url) as client:
            for method, path, status in (
                ("POST", "/v1/engine/open", 413),
                ("POST", "/v1/engine/samples", 413),
                ("PUT", "/v1/engine/elsewhere/a.b/c", 413),
                ("PUT", "/v1/engine/uploads/a.b/c", 200),
            ):
                assert (await client.request(method, path, content=b"x" * 2000)).status_code == status, path
    finally:
        await door.close()
