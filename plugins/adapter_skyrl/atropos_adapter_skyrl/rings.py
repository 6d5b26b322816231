"""Trajectories from workers on this machine through shared memory, without a server and without an engine in SkyRL's process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.engine import refuse_more, sampling_of
from atropos_adapter_skyrl.row_messages import Pack, packs, unpacked
from atropos_adapter_skyrl.rows import TrainingRow, rows_of
from atropos_adapter_skyrl.source import GroupRequest, GroupResult, GroupSource, all_or_none, failed
from atropos_adapter_skyrl.work_client import Job, WorkClient
from atropos_adapter_skyrl.work_queue import WorkFailed, WorkQueue
from atropos_core import console
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, ProcessDied
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.seeds import derive
from atropos_core.types import Draw, Sampling


class RingGroups(GroupSource):
    """Each group is requested from one worker. Its rows arrive mixed with those of others and are matched by id."""

    def __init__(self, options: SkyRLOptions, patience: Patience = DEFAULT_PATIENCE, *, vocabulary: int = 0) -> None:
        """`vocabulary` 0: not known."""
        assert options.rings is not None, "the options' validator wants it"
        self._options = options
        self._read = partial(unpacked, vocabulary=vocabulary)
        self._newest = 0  # newest version that engines can have sampled from
        self.exchange = WorkQueue(options.rings, stash_bytes=int(options.stash_mb * 1e6), patience=patience)

    async def open(self) -> None:
        await self.exchange.open()
        console.say(f"takes workers at {self._options.rings}: atropos skyrl-env ... --rings {self._options.rings}")

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        self._newest = max(self._newest, version)

    async def announce(self, version: int) -> None:
        self._newest = max(self._newest, version)

    async def fetch(
        self, requests: Sequence[GroupRequest], params: Mapping[str, Any], *, step_wise: bool
    ) -> list[GroupResult]:
        refuse_more(params)
        sampling = sampling_of(params)
        return await all_or_none([self._one(one, sampling, step_wise) for one in requests])

    async def _one(self, request: GroupRequest, sampling: Sampling, step_wise: bool) -> GroupResult:
        began, cause, draw = time.monotonic(), "", request.draw
        for attempt in range(self._options.attempts):
            seed = derive(draw.seed, attempt) if attempt else draw.seed
            wanted = {"draw": [draw.id, draw.environment, draw.split, draw.index, seed], "n": request.n}
            payload = json.dumps(wanted | {"sampling": sampling.of_run(), "step_wise": step_wise}).encode()
            try:
                found = await self.exchange.submit(payload, deadline_s=self._options.deadline_s, read=self._read)
                trajectories = in_order(found, request.n, step_wise=step_wise)
                self._refuse_versions(found)
            except DataError as error:
                cause = Exception.__str__(error)
                console.warn(
                    f"a worker's group of task {draw.index} of environment {draw.environment!r} is refused: {cause}"
                )
                continue
            except (WorkFailed, DeadlineExceeded) as error:
                cause = Exception.__str__(error)
                continue
            return GroupResult(trajectories, time.monotonic() - began, attempt)
        raise failed(request, cause, self._options.attempts)

    def _refuse_versions(self, found: Sequence[Pack]) -> None:
        """Raises DataError for tokens of versions that never existed, or that are too old."""
        stale, newest = min(pack.oldest for pack in found), max(pack.newest for pack in found)
        if newest > self._newest:
            raise DataError(
                f"its tokens claim to be sampled from version {newest}, but the newest possible is {self._newest}"
            )
        if stale < (oldest := self.version - self._options.max_staleness):
            raise DataError(
                f"its tokens were sampled from version {stale}, but {oldest} is the oldest that may be trained"
            )

    async def close(self) -> None:
        await self.exchange.close()


def in_order(found: Sequence[Pack], n: int, *, step_wise: bool) -> list[list[TrainingRow]]:
    """Sort rows by member and step. Raises DataError if one is missing or there twice."""
    positions = list(chain.from_iterable(pack.positions for pack in found))
    rows = list(chain.from_iterable(pack.rows for pack in found))
    if positions == [(member, 0) for member in range(n)] and all(row.last for row in rows):  # the usual case
        return [[row] for row in rows]
    trajectories: list[list[TrainingRow]] = [[] for _ in range(n)]
    for (member, step), row in sorted(zip(positions, rows, strict=True), key=itemgetter(0)):
        if member >= n or step != len(trajectories[member]):
            raise DataError(f"a group of {n} came with row {step} of member {member} out of place")
        if trajectories[member] and (trajectories[member][-1].last or not step_wise):
            raise DataError(f"member {member} of a group of {n} came with more rows than one trajectory has")
        trajectories[member].append(row)
    if not all(one and one[-1].last for one in trajectories):
        raise DataError(f"a group of {n} came incomplete")
    return trajectories


async def work(client: WorkClient, rollout_runner: RolloutRunner, *, attempts: int = 3) -> int:
    """Run requests until SkyRL ends. Returns the number of groups sent. Raises the error of an engine or a reward."""
    running: set[asyncio.Task[bool]] = set()
    broken: list[BaseException] = []
    sent = 0

    def ended(task: asyncio.Task[bool]) -> None:
        nonlocal sent
        running.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            sent += task.result()
        else:
            broken.append(error)
            client.close()  # unfinished groups go to another worker

    try:
        async for job in client.jobs():
            running.add(task := asyncio.create_task(_run_job(client, rollout_runner, job, attempts)))
            task.add_done_callback(ended)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        client.close()
    if broken:
        raise broken[0]
    return sent


async def _run_job(client: WorkClient, rollout_runner: RolloutRunner, job: Job, attempts: int) -> bool:
    """Return True if the group was sent. Raises errors that end the worker."""
    trajectories: list[list[TrainingRow]] = []
    cause = None
    try:
        trajectories = await _trajectories(rollout_runner, job, attempts)
    except (ConfigError, DataError) as error:
        cause = Exception.__str__(error)
    try:
        if cause is not None:
            await client.give_up(job, cause)
            return False
        for data in packs(trajectories):
            await client.put(job, [data])
        await client.finish(job)
    except ProcessDied:  # the requester has ended, or this worker has hung up: `work` ends, and says why
        return False
    return True


async def _trajectories(rollout_runner: RolloutRunner, job: Job, attempts: int) -> list[list[TrainingRow]]:
    request = json.loads(job.payload)
    draw, n, sampling = Draw(*request["draw"]), request["n"], Sampling.from_run(request["sampling"])
    if draw.environment not in rollout_runner.environments:
        raise DataError(f"this worker does not run {draw.environment!r}, but {', '.join(rollout_runner.environments)}")
    group = await rollout_runner.run(draw, rollout_runner.schedule_keys(draw, n), n, sampling, attempts=attempts)
    if len(group.episodes) < n:
        raise DataError(f"{group.failed[-1].where}: {group.failed[-1].cause}")
    return rows_of(group, step_wise=request["step_wise"])
