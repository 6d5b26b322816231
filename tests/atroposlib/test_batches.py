"""Batches of mixed group sizes, beside those that atroposlib's own functions form of the same queues."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from typing import Any

from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Label, Limits
from tests.unit.hubs import Clock

QUEUES = 200
THEIRS = """
import json, sys
from atroposlib.api.utils import grab_batch_with_minimum_allocations, grab_exact_from_heterogeneous_queue
formed = []
for case in json.load(sys.stdin):
    queue = [{"tokens": [[0]] * size, "env_id": env, "at": at} for at, (size, env) in enumerate(case["groups"])]
    minima = any(env["min_batch_allocation"] is not None for env in case["envs"])
    batches = []
    while True:
        if minima:
            batch, queue = grab_batch_with_minimum_allocations(queue, case["batch"], case["envs"])
        else:
            batch, queue = grab_exact_from_heterogeneous_queue(queue, case["batch"])
        if batch is None:
            break
        batches.append([one["at"] for one in batch])
    formed.append(batches)
json.dump(formed, sys.stdout)
"""


def queues(seed: int, *, minima: bool) -> list[dict[str, Any]]:
    """Of two to four environments with group sizes of their own, powers of two as atroposlib wants them."""
    chance, made = random.Random(seed), []
    for _ in range(QUEUES):
        batch = chance.choice([16, 32, 64])
        common = [size for size in (1, 2, 4, 8, 16) if size <= batch // 4]
        sizes = [chance.choice(common) for _ in range(chance.randint(2, 4))]
        shares = [round(chance.choice([0.1, 0.2, 0.25, 0.4]), 2) if minima else None for _ in sizes]
        envs = [
            {"registered_id": at, "connected": True, "min_batch_allocation": share} for at, share in enumerate(shares)
        ]
        groups = []
        for _ in range(chance.randint(10, 80)):
            env = chance.randrange(len(sizes))
            groups.append((sizes[env] if chance.random() < 0.8 else chance.choice(common), env))
        made.append({"batch": batch, "envs": envs, "groups": groups})
    return made


def theirs(cases: list[dict[str, Any]]) -> list[list[list[int]]]:
    command = [os.environ["ATROPOSLIB_PYTHON"], "-c", THEIRS]
    ran = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found: list[list[list[int]]] = json.loads(ran.stdout)
    return found


async def ours(case: dict[str, Any]) -> list[list[int]]:
    """An environment that has sent nothing for half a minute loses its minimum."""
    clock = Clock()
    hub: Hub[bytes] = Hub(Limits(1 << 20), max_staleness=None, on_dropped=lambda record, cause: None, clock=clock)
    for env in case["envs"]:
        if (share := env["min_batch_allocation"]) is not None:
            hub.share(str(env["registered_id"]), minimum=share)
    for at, (size, env) in enumerate(case["groups"]):
        await hub.put(str(at).encode(), Label(str(env), size, 1))
    session, batches = hub.open("trainer"), []
    for clock.now in (0.0, 31.0):
        while batch := session.try_lease(BatchSize(sequences=case["batch"]), 0):
            batches.append([int(record.payload) for record in batch])
            session.commit([record.id for record in batch])
    return batches


def below_the_floor(case: dict[str, Any], batches: list[list[int]]) -> int:
    """Batches in which an environment has less than its minimum, though enough of it waited. Minima beyond a whole are scaled."""
    waiting: Counter[int] = Counter()
    for size, env in case["groups"]:
        waiting[env] += size
    minima = {env["registered_id"]: env["min_batch_allocation"] for env in case["envs"]}
    whole = max(1.0, sum(minima.values()))
    floors = {env: int(case["batch"] * share / whole + 1e-9) for env, share in minima.items()}
    found = 0
    for batch in batches:
        has: Counter[int] = Counter()
        for at in batch:
            size, env = case["groups"][at]
            has[env] += size
        found += any(has[env] < floor <= waiting[env] for env, floor in floors.items())
        waiting -= has
    return found


def sizes_of(case: dict[str, Any], batch: list[int]) -> int:
    return sum(case["groups"][at][0] for at in batch)


async def test_as_many_batches_of_mixed_sizes_and_no_group_twice() -> None:
    cases = queues(1, minima=False)
    for case, upstream in zip(cases, theirs(cases), strict=True):
        batches = await ours(case)
        served = [at for batch in batches for at in batch]
        assert len(set(served)) == len(served)
        assert {sizes_of(case, batch) for batch in batches} <= {case["batch"]}
        assert len(batches) >= len(upstream), case


async def test_minima_are_kept_at_least_as_often() -> None:
    cases = queues(4, minima=True)
    ours_below = theirs_below = count = their_count = 0
    for case, upstream in zip(cases, theirs(cases), strict=True):
        batches = await ours(case)
        served = [at for batch in batches for at in batch]
        assert len(set(served)) == len(served)
        assert max((sizes_of(case, batch) for batch in batches), default=0) <= case["batch"]
        assert len(batches) >= len(upstream), case
        ours_below, theirs_below = (
            ours_below + below_the_floor(case, batches),
            theirs_below + below_the_floor(case, upstream),
        )
        count, their_count = count + len(batches), their_count + len(upstream)
    print(f"below: {ours_below} of {count}, {theirs_below} of {their_count}")
    assert ours_below * their_count <= theirs_below * count
