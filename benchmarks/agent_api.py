"""What the API for agents adds to a call, beside the same calls in process, and what episodes leave in memory.

    python -m benchmarks.agent_api

64 agents at once make 20 calls each, one after another: in process, where an agent is a coroutine that calls its session, and
over HTTP, where they are in a process of their own on the same machine. Conversations, sessions and the engine are the same: it
takes half a second for a sample, give or take 150 ms by the call's seed, and computes nothing. Each way runs several times in
turn. Then 200 episodes of 20 turns at once over HTTP, wave after wave: resident memory of the server after each. Writes
benchmarks/results/agent_api.json.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_agent_api.calls import Call
from atropos_agent_api.dialects.chat import Chat
from atropos_agent_api.server.running import open_agent_server
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Sampling, Tokens
from atropos_http_server.body_limits import resident_bytes
from benchmarks.machine import RESULTS, described
from plugins.agent_api.tests.models import qwen_like

AGENTS, TURNS, ROUNDS = 64, 20, 5
EPISODES, WAVES = 200, 6
SAMPLE_S, JITTER_S = 0.500, 0.150
ADDED_MS = {"p50": 3.0, "p95": 10.0}  # that the API may add
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the notes.",
        "parameters": {"type": "object", "properties": {}},
    },
}
RESULT = "a line of what a tool printed, as tools do\n" * 4
SAID = "I look at what there is and then I decide."


class WaitingEngine(Engine):
    """Takes as long as an engine does, at no cost to this process."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.endpoint = LocalEndpoint(self)
        self._said = np.concatenate([tokenizer.encode(SAID), tokenizer.encode(tokenizer.eos)])

    async def open(self) -> ModelInfo:
        raise NotImplementedError

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        await asyncio.sleep(SAMPLE_S + JITTER_S * (seeds[0] % 2001 / 1000 - 1))
        size = len(self._said)
        zeros = np.zeros(size, np.int32)
        return [Completion(self._said, np.full(size, -1.0, np.float32), zeros, "stop", 1.0)]

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...


Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]


async def one_agent(at: int, ask: Ask) -> list[float]:
    """The seconds of each of its calls."""
    await asyncio.sleep(SAMPLE_S * at / AGENTS)  # nobody starts 64 agents in one instant
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent. " * 20},
        {"role": "user", "content": f"Task {at}: find out."},
    ]
    took = []
    for turn in range(TURNS):
        since = time.perf_counter()
        said = await ask(messages)
        took.append(time.perf_counter() - since)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{turn}: {RESULT}"}]
    return took


class HttpAgent:
    """The least that speaks HTTP: its own cost stands in what is measured."""

    def __init__(self, port: int, session: str, key: str) -> None:
        self._port, self._head = (
            port,
            f"POST /s/{session}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n",
        )
        self._reader: asyncio.StreamReader | None = None

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
        self._writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return str(json.loads(await self._reader.readexactly(size))["choices"][0]["message"]["content"])

    def close(self) -> None:
        if self._reader is not None:
            self._writer.close()


def in_process(session: Session) -> Ask:
    async def ask(messages: list[dict[str, Any]]) -> str:
        call = Call("chat", "m", tuple(messages), tools=(TOOL,))
        return str((await session.answer(call)).choices[0].message["content"])

    return ask


async def agents_elsewhere() -> None:
    """What the other process does: agents as told on standard input, their seconds on standard output."""
    told = json.load(sys.stdin)
    agents = [HttpAgent(told["port"], session, key) for session, key in told["sessions"]]
    took = await asyncio.gather(*(one_agent(at, agent.ask) for at, agent in enumerate(agents)))
    for agent in agents:
        agent.close()
    json.dump(took, sys.stdout)


class Bench:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.policy = EnginePolicy(WaitingEngine(tokenizer), tokenizer, Sampling(max_tokens=100), deadline_s=60)
        self.format = TemplateFormat(self.policy, tokenizer)
        self.sessions = Sessions()

    def open(self, number: int) -> list[Session]:
        return [
            self.sessions.open(self.policy, self.format, SessionOptions(), seed=at, name=f"agent {at}")
            for at in range(number)
        ]

    def end(self, opened: Sequence[Session]) -> None:
        for session in opened:
            record = session.record()
            assert len(record.rollouts) == 1 and record.metrics["agent/delivered_share"] == 1.0
            self.sessions.end(session, "done")

    async def within(self) -> list[float]:
        opened = self.open(AGENTS)
        took = await asyncio.gather(*(one_agent(at, in_process(session)) for at, session in enumerate(opened)))
        self.end(opened)
        return [seconds for of in took for seconds in of]

    async def over_http(self, port: int, number: int) -> list[float]:
        opened = self.open(number)
        told = {"port": port, "sessions": [(session.id, session.key) for session in opened]}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.agent_api", "--agents",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(child.communicate(json.dumps(told).encode()), 600)
        assert child.returncode == 0
        self.end(opened)
        return [seconds for of in json.loads(out) for seconds in of]


async def timed(running: Awaitable[list[float]]) -> tuple[list[float], float]:
    """What it gives, and the seconds of this process's CPU that it took."""
    since = time.process_time()
    took = await running
    return took, time.process_time() - since


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)) * 1e3, 2) for q in (50, 95, 99)}


def cost_of_a_call() -> dict[str, float]:
    """Milliseconds of the dialect alone: JSON of a conversation of 20 turns to a call."""
    import orjson

    turns: list[dict[str, Any]] = []
    for turn in range(TURNS):
        turns += [{"role": "user", "content": f"{turn}: {RESULT}"}, {"role": "assistant", "content": SAID}]
    body = orjson.dumps({"model": "m", "messages": [*turns, {"role": "user", "content": "and?"}], "tools": [TOOL]})
    times = []
    for _ in range(300):
        since = time.perf_counter()
        Chat().read(orjson.loads(body), {})
        times.append(time.perf_counter() - since)
    return {"body_bytes": len(body), "read_ms": round(sorted(times)[150] * 1e3, 3)}


async def measure(tokenizer: ChatTokenizer) -> dict[str, Any]:
    bench = Bench(tokenizer)
    server = await open_agent_server(bench.sessions, "policy")
    port = int(server.url.rpartition(":")[2])
    rounds = []
    for number in range(ROUNDS):
        (within, own_s), (over, served_s) = await timed(bench.within()), await timed(bench.over_http(port, AGENTS))
        one: dict[str, dict[str, float]] = {"in_process_ms": quantiles(within), "http_ms": quantiles(over)}
        one["added_ms"] = {q: round(one["http_ms"][q] - one["in_process_ms"][q], 2) for q in one["http_ms"]}
        rounds.append(one)
        one["cpu_ms_of_a_call"] = {
            "in_process": round(own_s / len(within) * 1e3, 3), "server": round(served_s / len(over) * 1e3, 3)
        }  # fmt: skip
        print(f"round {number}: {one}", flush=True)
    resident = []
    for wave in range(WAVES):
        await bench.over_http(port, EPISODES)
        gc.collect()
        resident.append(round(resident_bytes() / 1e6, 1))
        print(f"wave {wave}: {resident[-1]} MB resident", flush=True)
    await server.close()
    added = {q: sorted(one["added_ms"][q] for one in rounds)[len(rounds) // 2] for q in ADDED_MS}
    return {
        "agents": AGENTS, "turns": TURNS, "sample_ms": SAMPLE_S * 1e3, "jitter_ms": JITTER_S * 1e3,
        "rounds": rounds, "added_ms": added, "bound_ms": ADDED_MS,
        "dialect": cost_of_a_call(),
        "episodes_at_once": EPISODES, "resident_mb_after_each_wave": resident,
        "grown_mb_after_the_second": round(resident[-1] - resident[1], 1),
    }  # fmt: skip


def main() -> None:
    if "--agents" in sys.argv:
        asyncio.run(agents_elsewhere())
        return
    machine = described()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(qwen_like(Path(folder))))
    (RESULTS / "agent_api.json").write_text(
        json.dumps({"machine": {**machine, "niceness": os.nice(0)}, **measured}, indent=1) + "\n"
    )
    print(json.dumps({name: measured[name] for name in ("added_ms", "bound_ms", "dialect")}))


if __name__ == "__main__":
    main()
