"""The sending ends of `benchmarks.skyrl_throughput`, in processes of their own that import no torch."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from atropos_adapter_skyrl.row_messages import packs
from atropos_adapter_skyrl.rows import rows_of
from atropos_adapter_skyrl.work_client import WorkClient
from atropos_core.errors import ProcessDied
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task

N, CONCURRENCY, KINDS = 16, 64, 32  # of a group; groups at once; different groups


def group_of(number: int, sizes: tuple[int, int]) -> ScoredGroup:
    prompt, reply = sizes
    chance = np.random.Generator(np.random.Philox(key=number))
    sampled = np.arange(prompt + reply) >= prompt

    def episode() -> Episode:
        ids = chance.integers(0, 150_000, prompt + reply).astype(np.int32)
        logprobs = np.where(sampled, -np.abs(chance.normal(size=len(ids))), 0).astype(np.float32)
        rollout = Rollout(ids, sampled, sampled, logprobs, np.where(sampled, 0, -1).astype(np.int32), 1.0)
        return Episode((rollout,), float(chance.random()))

    episodes = tuple(episode() for _ in range(N))
    rewards = np.array([one.score for one in episodes], np.float32)
    return ScoredGroup(Draw(number, "none", "train", number, 1), Task(f"{number}", ()), episodes, rewards)


def producing(folder: str, sizes: tuple[int, int], reported: Any) -> None:
    groups, sent, cpu = [group_of(number, sizes) for number in range(KINDS)], 0, time.process_time()
    try:
        client = WorkClient.connect(Path(folder), CONCURRENCY, slots=128)
        while not client.ended:
            for job in client.take(1.0):
                if not sent:
                    cpu = time.process_time()
                for data in packs(rows_of(groups[sent % KINDS], step_wise=False)):
                    client.send(job, [data])
                client.done(job)
                sent += 1
        client.close()
    except ProcessDied:
        pass
    reported.put((time.process_time() - cpu) / max(sent * N, 1))


def as_json(group: ScoredGroup) -> bytes:
    rows = [row for rows in rows_of(group, step_wise=False) for row in rows]
    return json.dumps(
        [
            {"prompt": row.prompt.tolist(), "response": row.response.tolist(), "mask": row.trained.astype(int).tolist(),
             "logprobs": row.logprobs.tolist() if row.logprobs is not None else None, "versions": row.versions.tolist(),
             "reward": row.reward, "finish": row.finish}
            for row in rows
        ]
    ).encode()  # fmt: skip


def posting(port: int, sizes: tuple[int, int], count: int, connections: int, reported: Any) -> None:
    groups, cpu = [group_of(number, sizes) for number in range(KINDS)], time.process_time()

    def one(first: int) -> None:
        connection = HTTPConnection("127.0.0.1", port)
        for number in range(first, count, connections):
            connection.request("POST", "/", as_json(groups[number % KINDS]), {"content-type": "application/json"})
            connection.getresponse().read()

    threads = [threading.Thread(target=one, args=(first,)) for first in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reported.put((time.process_time() - cpu) / (count * N))
