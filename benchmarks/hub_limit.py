"""How many groups one `atropos serve` takes: python -m benchmarks.hub_limit [--workers 10000] [--draws 1000000]

Synthetic workers, registered one by one, take draws one at a time and put a group for each, over a bounded number of kept-alive
connections (a server sees calls, not idle workers); a trainer offers draws, leases, reports as trained and commits. Each is one process
beside the server's, and all share this machine's cores: what holds elsewhere is the server's own processor time for a group, from its
draw to its commit, whose inverse is the limit of one server. Wall time and latencies are of this machine as it was. For short groups
(8 rollouts of 64 tokens) and long ones (1,024). Draws are neither lost nor doubled, or it ends with 1. Writes
benchmarks/results/hub_limit.json, or hub_limit_long.json with a million draws or more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.codec import decode, encode_bytes
from atropos_core.types import Draw
from benchmarks.machine import RESULTS, described
from tests.native_payloads import native_call, native_group, native_request, open_session, put_request
from tests.old_payloads import old_group
from tests.raw_http import Connection
from tests.served import atropos_serve, serving

GROUP = 8
BATCH = 128  # groups that the trainer leases at once
AHEAD = 8 * BATCH  # draws that are offered and not leased yet
COMMITS = 8  # batches from one commit to the next
LENGTHS = (64, 1024)
ENGINES, ENGINE_TOKENS_S = 512, 5000.0
QUANTILES = (0.5, 0.95, 0.99)
DEADLINE_S = 7200.0


def registered(port: int, workers: int) -> list[str]:
    end = Connection(port)
    try:
        bodies = ({"name": f"worker {number}", "environment": "limit", "tasks": 1000} for number in range(workers))
        return [str(native_call(end, "/v1/workers", body)["worker"]) for body in bodies]
    finally:
        end.close()


def train(port: int, draws: int, ready: Any, results: Any) -> None:
    """The trainer's calls until `draws` groups are committed. Gives the seconds, and the ids of the draws that came."""
    end = Connection(port)
    path = f"/v1/sessions/{open_session(end, BATCH, GROUP)}"
    ready.set()
    offered, came = 0, []
    ids: list[int] = []
    uncommitted: list[int] = []
    began = time.perf_counter()
    while len(came) < draws and time.perf_counter() - began < DEADLINE_S:
        if (missing := min(draws, len(came) + AHEAD) - offered) > 0:
            new = [
                Draw(number, "limit", "train", number % 1000, number) for number in range(offered, offered + missing)
            ]
            native_call(end, f"{path}/draws", {"draws": new})
            offered += missing
        lease = {"groups": min(BATCH, draws - len(came)), "version": 0, "wait_s": 20.0, "trained": ids}
        answer = native_call(end, f"{path}/lease", lease)
        ids = [entry["id"] for entry in answer["entries"]]
        came += [decode(entry["frame"]).draw.id for entry in answer["entries"]]
        uncommitted += ids
        if len(uncommitted) >= COMMITS * BATCH or len(came) >= draws:
            native_call(end, f"{path}/commit", {"ids": uncommitted})
            uncommitted = []
    results.put((time.perf_counter() - began, came))
    end.close()


def work(port: int, workers: Sequence[str], draws: int, length: int, connections: int, results: Any) -> None:
    """The workers' calls, one in flight on each connection: a draw for the next worker that is free, then its group. Gives the
    latencies of both kinds of call, in seconds."""
    group = native_group(old_group(GROUP, length, 0), "limit")
    ends = [Connection(port) for _ in range(connections)]
    free = deque(workers)
    state: list[tuple[str, str, float]] = []  # by connection: the call, the worker, when it was sent
    seconds: dict[str, list[float]] = {"draws": [], "put": []}

    def send(at: int, what: str, worker: str, data: bytes) -> None:
        state[at] = (what, worker, time.perf_counter())
        ends[at].send(data)

    def take(at: int) -> None:
        worker = free.popleft()
        send(at, "draws", worker, native_request(f"/v1/workers/{worker}/draws", {"n": 1, "wait_s": 2.0, "playing": ()}))

    for at in range(connections):
        state.append(("", "", 0.0))
        take(at)
    put, until = 0, time.perf_counter() + DEADLINE_S
    while put < draws and time.perf_counter() < until:
        for at, end in enumerate(ends):
            answer = end.receive()
            what, worker, since = state[at]
            assert answer.status == 200, answer.body
            found = decode(answer.body)
            if what == "put":
                put += 1
                assert None not in found["ids"], "a group was not wanted"
            elif found["draws"]:
                seconds["draws"].append(time.perf_counter() - since)
                draw = found["draws"][0]
                send(at, "put", worker, put_request(f"draw {draw.id}", worker, encode_bytes(replace(group, draw=draw))))
                continue
            if what == "put":
                seconds["put"].append(time.perf_counter() - since)
            free.append(worker)
            take(at)
    results.put(seconds)
    for end in ends:
        end.close()


def measured(length: int, workers: int, draws: int, connections: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="atropos-hub-limit-") as folder:
        command = atropos_serve("--dir", str(Path(folder) / "server"), "--silent-s", "3600", "--hub-mb", "2000")
        with serving(command, Path(folder) / "server.log") as server:
            empty = server.rss()
            began = time.perf_counter()
            names = registered(server.port, workers)
            registering, with_workers = time.perf_counter() - began, server.rss()
            ready, trained, worked = spawn.Event(), spawn.Queue(), spawn.Queue()
            trainer = spawn.Process(target=train, args=(server.port, draws, ready, trained))
            worker = spawn.Process(target=work, args=(server.port, names, draws, length, connections, worked))
            trainer.start()
            assert ready.wait(120), "the trainer's session was not opened"
            cpu = server.cpu_s()
            worker.start()
            try:
                wall, came = trained.get(timeout=DEADLINE_S)
                cpu = server.cpu_s() - cpu
                most = server.rss()
                seconds = worked.get(timeout=120)
            finally:
                for process in (trainer, worker):
                    process.join(20)
                    if process.is_alive():
                        process.kill()
    tokens = GROUP * length
    group_s = cpu / draws
    return {
        "rollouts": GROUP, "tokens_of_a_rollout": length, "workers": workers, "draws": draws, "connections": connections,
        "hub_group_s": group_s, "groups_per_s_of_one_server": 1 / group_s, "groups_per_s_here": draws / wall,
        "server_share_of_a_core": cpu / wall,
        "latency_ms": {
            call: {f"p{quantile:.0%}".rstrip("%"): 1e3 * float(np.quantile(all_of, quantile)) for quantile in QUANTILES}
            for call, all_of in seconds.items()
        },
        "registrations_per_s": workers / registering, "bytes_a_worker": (with_workers - empty) / workers,
        "memory_mb": {"empty": empty / 1e6, "with_workers": with_workers / 1e6, "at_the_end": most / 1e6},
        "lost_or_doubled": draws - len(came) + len(came) - len(set(came)),
        "engines_of_5000_tokens_per_s": tokens / group_s / ENGINE_TOKENS_S,
        "servers_for_512_engines": ENGINES * ENGINE_TOKENS_S / tokens * group_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=20_000, help="of short groups; a tenth as many of long ones")
    parser.add_argument("--connections", type=int, default=64)
    wanted = parser.parse_args()
    machine = described()
    found = [
        measured(length, wanted.workers, draws, wanted.connections)
        for length, draws in zip(LENGTHS, (wanted.draws, max(wanted.draws // 10, BATCH)), strict=True)
    ]
    console.table(
        ("group", "draws", "server ms a group", "groups/s of one", "here", "put p50/p99 ms", "MB at the end", "engines of 5,000 tokens/s"),
        [
            (
                f"{one['rollouts']} x {one['tokens_of_a_rollout']}", f"{one['draws']:,}", f"{1e3 * one['hub_group_s']:.3f}",
                f"{one['groups_per_s_of_one_server']:,.0f}", f"{one['groups_per_s_here']:,.0f}",
                f"{one['latency_ms']['put']['p50']:.1f} / {one['latency_ms']['put']['p99']:.1f}", f"{one['memory_mb']['at_the_end']:.0f}",
                f"{one['engines_of_5000_tokens_per_s']:,.0f}",
            )
            for one in found
        ],
    )  # fmt: skip
    holds = not any(one["lost_or_doubled"] for one in found)
    RESULTS.mkdir(exist_ok=True)
    name = "hub_limit_long.json" if wanted.draws >= 1_000_000 else "hub_limit.json"
    (RESULTS / name).write_text(json.dumps({"machine": machine, "holds": holds, "limits": found}, indent=1) + "\n")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
