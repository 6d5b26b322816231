"""An environment worker: it takes draws from the server, runs them with the trainer's engines, and sends scored groups back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.errors import AccessRefused, ApiError, AtroposError, DataError, DeadlineExceeded, HubFull
from atropos_core.group_schema import MOST_CHARACTERS
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.guards.deadlines import within
from atropos_core.guards.exits import own_process
from atropos_core.launch.builder import build_for_evaluation
from atropos_core.launch.plan import Plan
from atropos_core.launch.signals import requests_to_end
from atropos_core.rollouts.runner import RolloutRunner, check_named_tasks, failed_by, task_count
from atropos_core.rollouts.task_digests import digest_of
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.tempdirs import owned_prefix, sweep
from atropos_core.training.parts import EvaluationParts
from atropos_core.types import Draw, ScoredGroup, Task
from atropos_trajectory_api.roles.named_engines import NamedEngines
from atropos_trajectory_client.client import Api, Assignment, Worker, WorkerSpec
from atropos_trajectory_client.http import LONG_POLL_S
from atropos_trajectory_client.remote_engine import RemoteEngine
from atropos_trajectory_client.worker import AWAY_S

ROOM_S = 600.0  # report when a group has waited this long for room in the hub
POLICY_LOOK_S = 1.0
BUSY_POLL_S = 0.2  # wait for draws while others are running; longer if none of them will end soon


@dataclass(frozen=True)
class WorkerOptions:
    """How one worker runs."""

    environment: str  # its name on the server
    concurrency: int  # draws at once
    weight: float = 1.0
    minimum: float = 0.0  # share of each batch
    drain_s: float = 60.0  # at the end, to finish what is running


async def await_policy(api: Api, wait_s: float, stop: asyncio.Event) -> Mapping[str, Any] | None:
    """The `model` that is trained, and the `date` for its chat template, as the trainer gave them to the server. None if `stop`
    came first. Raises DeadlineExceeded."""
    until, said = time.monotonic() + wait_s, False
    while not stop.is_set():
        policy = (await api.about())["policy"]
        if policy and policy["model"]:
            return dict(policy)
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"no trainer came to {api.url} within {wait_s:g} s.",
                remedy=f"Start one: atropos train --api {api.url}; or name the model: --model NAME",
            )
        if not said:
            said = True
            console.say(
                f"waiting for a trainer at {api.url}, which says which model to sample from ({wait_s:g} s at most)"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), POLICY_LOOK_S)
    return None


async def work(plan: Plan, api: Api, token: str | None, options: WorkerOptions, stop: asyncio.Event) -> int:
    """Run until `stop`. What is running then is finished if possible; the rest goes to other workers. Returns the number of groups
    that were sent."""
    sweep("env")
    with blocked_loop_alarm(), own_process(), tempfile.TemporaryDirectory(prefix=owned_prefix("env")) as directory:
        (Path(directory) / "logs").mkdir()
        worker: Worker | None = None

        async def ask() -> None:
            if worker is not None:
                await worker.give_back(())  # returns nothing, but the answer names the engines

        engine = NamedEngines(
            lambda: worker.engines if worker is not None else (),
            ask,
            lambda url: RemoteEngine(url, token, patience=api.patience),
        )
        parts = await build_for_evaluation(plan, Path(directory), engine)
        try:
            tokenizer = plan.tokenizer()
            [environment] = parts.environments.values()
            tasks = task_count(options.environment, environment, "train")
            check_named_tasks(options.environment, environment, "train")
            worker = await Worker.register(
                api,
                WorkerSpec(
                    name=f"{options.environment}@{socket.gethostname()}-{os.getpid()}",
                    environment=options.environment,
                    tasks=tasks,
                    weight=options.weight,
                    minimum=options.minimum,
                    tokenizer=tokenizer.fingerprint,
                    vocabulary=tokenizer.vocabulary,
                    digest=await digest_of(environment.tasks("train")),
                ),
            )
            console.facts(
                [
                    ("rollouts", f"{options.environment}: {tasks:,} training tasks, {options.concurrency} at once"),
                    ("for", f"{api.url} ({plan.model.summary})"),
                    (
                        "to end",
                        f"Ctrl-C or SIGTERM: what is running is finished first ({options.drain_s:g} s at most)",
                    ),
                ]
            )
            runner = partial(_runner, plan, parts, tokenizer, options)
            return await Shift(worker, runner, options, stop).run()
        finally:
            if worker is not None:
                await worker.close()
            await parts.close()


def _runner(
    plan: Plan, parts: EvaluationParts, tokenizer: ChatTokenizer, options: WorkerOptions, deadline_s: float | None
) -> RolloutRunner:
    """`deadline_s` is the trainer's, if it gave one."""
    [environment] = parts.environments.values()
    named = {options.environment: environment}
    deadline_s = plan.config.training.rollout_deadline_s if deadline_s is None else deadline_s
    return RolloutRunner(named, parts.rewards, parts.engine, tokenizer, deadline_s=deadline_s, deterministic=False)


class Shift:
    """A worker's work from the first draw to the last."""

    def __init__(
        self,
        worker: Worker,
        runner: Callable[[float | None], RolloutRunner],
        options: WorkerOptions,
        stop: asyncio.Event,
    ) -> None:
        self._worker = worker
        self._runner = runner  # by the deadline of its rollouts
        self._options = options
        self._stop = stop
        self._running: dict[asyncio.Task[None], Draw] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises the error that ended it
        self._sent = 0
        self._away_since: float | None = None
        self._led = True  # True while there is a trainer, as far as is known

    async def run(self) -> int:
        taking = asyncio.ensure_future(self._take_on())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            ends: set[asyncio.Future[Any]] = {taking, stopping, self._ended, self._worker.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (taking, self._ended, self._worker.broken):
                if end.done():
                    end.result()
            await self._drain(taking)
            if self._ended.done():  # because of an error while the rest was finished
                self._ended.result()
            return self._sent
        finally:
            for task in (taking, stopping, *self._running):
                task.cancel()
            await asyncio.gather(taking, *self._running, return_exceptions=True)

    async def _take_on(self) -> None:
        wanted, wait_s = 0, 0.0
        while True:
            free = self._options.concurrency - len(self._running)
            if free <= 0:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            # If some end soon, the next call requests draws for all of them at once. So draws of a step, which come
            # together, are run together.
            busy_s = BUSY_POLL_S if free != wanted else min(2 * wait_s, LONG_POLL_S)
            wanted, wait_s = free, busy_s if self._running else LONG_POLL_S
            try:
                assignment = await self._worker.draws(free, wait_s)
                self._away_since = None
            except AccessRefused:
                raise
            except ApiError as error:
                self._note_away(error)
                continue
            if self._led != (assignment.group_size > 0):
                self._led = not self._led
                console.say("a trainer is there: continuing" if self._led else "no trainer is there: waiting for one")
            for draw in assignment.draws:
                task = asyncio.create_task(self._run_draw(draw, assignment))
                self._running[task] = draw
                task.add_done_callback(self._done)

    async def _run_draw(self, draw: Draw, how: Assignment) -> None:
        runner = self._runner(how.deadline_s)
        places = runner.schedule_keys(draw, how.group_size)
        group = await runner.run(draw, places, how.group_size, how.sampling)
        try:
            if len(group.episodes) >= max(how.min_group, 1):
                await self._put(group)
            else:
                await self._worker.failed(group)
        except (DataError, DeadlineExceeded) as error:  # refused; another worker's group of this draw would be, too
            console.warn(
                f"the group of task {group.task.id!a:.100} is refused, and its draw is reported as failed: "
                f"{Exception.__str__(error)}"
            )
            await self._worker.failed(_refused(group, error))

    async def _put(self, group: ScoredGroup) -> None:
        key = self._worker.new_key()
        while True:
            try:
                number = await self._worker.put(group, deadline_s=ROOM_S, key=key)
                break
            except HubFull as error:
                console.warn(f"{Exception.__str__(error)} Waiting on.")
        self._sent += number is not None

    async def _drain(self, taking: asyncio.Future[None]) -> None:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        with contextlib.suppress(ApiError):  # a server that is away will notice without being told
            await within(self._worker.drain(), 5.0, "the server")
        if self._running:
            console.say(
                f"finishing {len(self._running)} groups ({self._options.drain_s:g} s at most; a second signal ends it at once)"
            )
            await asyncio.wait(self._running, timeout=self._options.drain_s)
        if self._running:
            console.say(f"{len(self._running)} draws are left to other workers")

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) and not self._ended.done():
            self._ended.set_exception(error)

    def _note_away(self, error: ApiError) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            console.warn(f"{Exception.__str__(error)} Trying on.")
        elif now - self._away_since > AWAY_S:
            raise error


def _refused(group: ScoredGroup, error: AtroposError) -> ScoredGroup:
    """The group for the report, without the parts that cannot be sent."""
    task = group.task.id.encode(errors="replace").decode()[:MOST_CHARACTERS]
    return ScoredGroup(group.draw, Task(task, ()), (), np.zeros(0, np.float32), failed=(failed_by(error, "put"),))


@contextlib.contextmanager
def draining_signals(stop: asyncio.Event) -> Iterator[None]:
    """Drain on the first SIGTERM, SIGHUP or Ctrl-C; end at once on the second."""
    current = asyncio.current_task()
    assert current is not None, "called from a coroutine"

    def wanted() -> None:
        if stop.is_set():
            current.cancel()
        stop.set()

    with requests_to_end(wanted, cancels_at=2):
        yield
