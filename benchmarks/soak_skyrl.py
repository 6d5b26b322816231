"""Trajectories into SkyRL's adapter: a million through shared memory while producers are killed; rate and latency beside
HTTP/JSON; what the lists that SkyRL wants cost; what a trainer saves that holds no engine.

    python -m benchmarks.soak_skyrl [--only kills|speed|memory] [--trajectories 1000000] [--kills 10]

Speed: one producer process, this one receives. `shared memory` is what SkyRL's generator does: groups of 16 are requested through
an exchange, each comes in one message, is checked, and its rows are numpy views in this process (from episodes to what SkyRL has
validated: benchmarks.skyrl_throughput); `HTTP/JSON` posts the same trajectories, one a request over one
kept connection, to a server in this process that makes the same rows of them, unchecked. Rows are packed, or written as JSON, beforehand:
the rate is that of the way, not of the numpy that made them. Ways alternate; the median counts. Latency is one way, from the
moment that a group (HTTP/JSON: a trajectory) is due until its rows are there,
at half of 37,848 a second in runs of a second, of whose p50 and p99
the medians count (HTTP/JSON: at half of its own rate). `alone`: requests for one trajectory each, through the same exchange, at
their own rate and at half of that.
Lists: rows to what generate() returns. Memory: this process's resident set with a model of Qwen2.5-0.5B's shape (random
weights, bfloat16, transformers) that has sampled, less that with the adapter alone. Needs .venv-skyrl for that last part.
Writes benchmarks/results/soak_skyrl.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.rings import RingGroups
from atropos_adapter_skyrl.row_messages import REWARD_AT, RowPosition, packed, unpacked
from atropos_adapter_skyrl.rows import TrainingRow, output_of
from atropos_adapter_skyrl.source import GroupRequest
from atropos_adapter_skyrl.work_client import WorkClient
from atropos_core import console
from atropos_core.errors import ProcessDied
from atropos_core.types import Draw
from benchmarks.machine import RESULTS, described
from tests.ring_rows import CONCURRENCY, PARAMS, run

GOAL = 37_848
LATENCY_MS = 0.2  # of a group of 16 of 256 tokens, in one message; 0.1 was the goal for a trajectory
TOKENS = {"256 tokens": (64, 192), "1,000 tokens": (200, 800)}  # of prompt and reply
N, AT_ONCE, KINDS = 16, 256, 64
SPAWN = multiprocessing.get_context("spawn")


def row_with(sizes: tuple[int, int], number: int) -> TrainingRow:
    prompt, size = sizes
    chance = np.random.Generator(np.random.Philox(key=number))
    ids = chance.integers(0, 150_000, prompt + size).astype(np.int32)
    return TrainingRow(
        ids[:prompt], ids[prompt:], np.ones(size, np.bool_), -np.abs(chance.normal(size=size)).astype(np.float32),
        np.full(size, 3, np.int32), 0.0, "stop",
    )  # fmt: skip


def shared(folder: str, sizes: tuple[int, int], rate: float, n: int) -> None:
    """Answer requests as fast as they come, each group of `n` in one message; or, with a rate, send each group when it is due, with that
    moment as its first reward."""
    rows = [row_with(sizes, number) for number in range(KINDS)]
    made = [packed([(row, RowPosition(member, 0)) for member in range(n)]) for row in rows]
    start, sent = 0.0, 0
    try:
        client = WorkClient.connect(Path(folder), CONCURRENCY, slots=128)
        while not client.ended:
            for job in client.take(1.0):
                parts = [data := made[sent % KINDS]]
                if rate:
                    start = start or time.perf_counter()
                    due = _wait_until(start + sent * n / rate)
                    parts = [data[:REWARD_AT], np.float64(due).tobytes(), memoryview(data)[REWARD_AT + 8 :]]
                client.send(job, parts)
                client.done(job)
                sent += 1
        client.close()
    except ProcessDied:
        pass


def _wait_until(due: float) -> float:
    while (left := due - time.perf_counter()) > 0:
        if left > 0.0005:
            time.sleep(left / 2)
    return due


async def through_memory(
    folder: Path, sizes: tuple[int, int], groups: int, rate: float, n: int = N
) -> tuple[float, list[float]]:
    """Trajectories a second, and the milliseconds of each group."""
    source, late = RingGroups(SkyRLOptions(source="rings", rings=folder, deadline_s=120.0)), []

    def read(data: bytes) -> Any:
        found = unpacked(data)
        late.append(1000 * (time.perf_counter() - found.rows[0].reward))
        return found

    await source.open()
    await source.set_version(3)  # rows are of that one
    process = SPAWN.Process(target=shared, args=(str(folder), sizes, rate, n), daemon=True)
    process.start()
    while not source.exchange.workers:  # noqa: ASYNC110 - once, before anything is measured
        await asyncio.sleep(0.01)
    requests = [GroupRequest(Draw(number, "none", "train", 0, number), n, True) for number in range(groups)]
    began = time.perf_counter()
    if rate:
        waiting = iter(requests)

        async def ask_on() -> None:
            for _one in waiting:
                await source.exchange.submit(b"{}", deadline_s=120.0, read=read)

        await asyncio.gather(*(ask_on() for _ in range(4 * CONCURRENCY)))
    else:
        for begin in range(0, groups, AT_ONCE):  # as generate() asks
            await source.fetch(requests[begin : begin + AT_ONCE], PARAMS, step_wise=False)
    seconds = time.perf_counter() - began
    await source.close()
    process.join(20)
    return groups * n / seconds, late


def posting(port: int, sizes: tuple[int, int], count: int, rate: float) -> None:
    rows = [row_with(sizes, number) for number in range(KINDS)]
    made = [
        json.dumps({"prompt": row.prompt.tolist(), "response": row.response.tolist(), "mask": row.trained.astype(int).tolist(),
                    "logprobs": row.logprobs.tolist() if row.logprobs is not None else None,
                    "versions": row.versions.tolist(), "finish": row.finish})[:-1]
        for row in rows
    ]  # fmt: skip
    connection = HTTPConnection("127.0.0.1", port)
    start = time.perf_counter()
    for number in range(count):
        due = _wait_until(start + number / rate) if rate else 0.0
        connection.request(
            "POST", "/", f'{made[number % KINDS]}, "reward": {due!r}}}', {"content-type": "application/json"}
        )
        connection.getresponse().read()


async def through_http(sizes: tuple[int, int], count: int, rate: float) -> tuple[float, list[float]]:
    import uvicorn

    late: list[float] = []
    ended, seen, began = asyncio.Event(), 0, 0.0

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        nonlocal seen, began
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        sent = json.loads(body)
        row = TrainingRow(
            np.array(sent["prompt"], np.int32), np.array(sent["response"], np.int32), np.array(sent["mask"], np.bool_),
            np.array(sent["logprobs"], np.float32), np.array(sent["versions"], np.int32), sent["reward"], sent["finish"],
        )  # fmt: skip
        late.append(1000 * (time.perf_counter() - row.reward))
        began, seen = began or time.perf_counter(), seen + 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        if seen == count:
            ended.set()

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    process = SPAWN.Process(target=posting, args=(port, sizes, count, rate), daemon=True)
    process.start()
    await ended.wait()
    seconds = time.perf_counter() - began
    server.should_exit = True
    await serving
    process.join(20)
    return count / seconds, late


def quantiles(ms: list[float]) -> list[float]:
    """p50 and p99."""
    ordered = sorted(ms)
    return [ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]]


def speed(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"missed": []}
    for name, sizes in TOKENS.items():
        ours, alone, theirs = [], [], []
        for repeat in range(wanted.repeat):
            ours.append(asyncio.run(through_memory(folder / f"{name}-{repeat}", sizes, 4000, 0.0))[0])
            alone.append(asyncio.run(through_memory(folder / f"{name}-alone-{repeat}", sizes, 4000, 0.0, 1))[0])
            theirs.append(asyncio.run(through_http(sizes, 2000, 0.0))[0])
        half = [
            quantiles(asyncio.run(through_memory(folder / f"{name}-half-{repeat}", sizes, 1000, GOAL / 2))[1])
            for repeat in range(2 * wanted.repeat)
        ]
        half_ms = [statistics.median(one) for one in zip(*half, strict=True)]
        slow = statistics.median(alone) / 2
        alone_ms = quantiles(asyncio.run(through_memory(folder / f"{name}-slow", sizes, 4000, slow, 1))[1])
        http_ms = quantiles(asyncio.run(through_http(sizes, 2000, statistics.median(theirs) / 2))[1])
        rows = [row_with(sizes, number) for number in range(512)]
        began = time.perf_counter()
        output_of([[row] for row in rows], list(range(512)), [0.0] * 512, step_wise=False, own_advantages=False)
        lists_s = time.perf_counter() - began
        found[name] = {
            "shared memory, a second": statistics.median(ours),
            "best": max(ours),
            "p50 and p99 at half of the goal, ms": half_ms,
            "the best of them, ms": [min(one) for one in zip(*half, strict=True)],
            "one trajectory alone, a second": statistics.median(alone),
            "its p50 and p99 at half of that, ms": alone_ms,
            "HTTP/JSON, a second": statistics.median(theirs),
            "its p50 and p99 at half of its own rate, ms": http_ms,
            "512 rows to lists, ms": 1000 * lists_s,
        }
        if statistics.median(ours) < GOAL:
            found["missed"].append(f"{name}: {statistics.median(ours):,.0f} a second, wanted {GOAL:,}")
        if name == "256 tokens" and half_ms[0] > LATENCY_MS:
            found["missed"].append(f"{name}: p50 {half_ms[0]:.3f} ms, wanted {LATENCY_MS}")
    return found


def kills(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    seen = asyncio.run(run(folder / "rings", wanted.trajectories, wanted.kills, seed=wanted.seed))
    missed = []
    if (seen.trajectories, seen.wrong, seen.kills) != (wanted.trajectories, 0, wanted.kills):
        missed.append(f"{seen.trajectories} came, {seen.wrong} groups were not what was sent, {seen.kills} kills")
    return {
        "missed": missed, "trajectories": seen.trajectories, "groups that differ in any bit": seen.wrong,
        "kills": seen.kills, "groups played again": seen.requeued, "seconds, checking each": seen.seconds,
        "a death is noticed after, median and most, ms":
            [1000 * statistics.median(seen.noticed_s), 1000 * max(seen.noticed_s)] if seen.noticed_s else None,
    }  # fmt: skip


_RESIDENT = """
import sys, psutil
import numpy, torch, transformers
from atropos_adapter_skyrl import rings
if sys.argv[1] == "engine":
    shape = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768)
    torch.set_default_dtype(torch.bfloat16)
    with torch.no_grad():
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).eval()
        for parameter in model.parameters():
            parameter.fill_(0.01)
        prompts = torch.zeros(16, 240, dtype=torch.long)
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=True, pad_token_id=0)
print(psutil.Process().memory_info().rss)
"""


def memory(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    def resident(what: str) -> int:
        ended = subprocess.run([sys.executable, "-c", _RESIDENT, what], capture_output=True, text=True, check=True)
        return int(ended.stdout.split()[-1])

    without, with_it = resident("none"), resident("engine")
    return {
        "missed": [], "the adapter alone, MB": without / 1e6, "with an engine of 0.5 B parameters in bfloat16, MB": with_it / 1e6,
        "saved, MB": (with_it - without) / 1e6,
    }  # fmt: skip


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "kills": kills,
    "speed": speed,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5, help="of the rates")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="of the moments of the kills")
    wanted = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "soak_skyrl.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    rows, holds_up = [], True
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        for name, part in PARTS.items():
            if wanted.only not in (None, name):
                continue
            machine = described()
            found = part(Path(scratch), wanted)
            results[name] = {"machine": machine, "seed": wanted.seed, **found}
            file.write_text(json.dumps(results, indent=1) + "\n")
            rows += [(name, key, str(value)) for key, value in found.items()]
            holds_up &= not found["missed"]
    console.table(("part", "", ""), rows)
    raise SystemExit(0 if holds_up else 1)


if __name__ == "__main__":
    main()
