"""The workers of a run, each in an actor, and the trajectory API between them and the run, in another actor."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_core import console
from atropos_core.console.waits import waiting
from atropos_core.errors import AtroposError, ProcessDied
from atropos_core.launchers import PlannedRun, RunWorkers
from atropos_core.processes.child import tail_of_log
from atropos_core.storage.atomic import write_whole
from atropos_core.storage.file_permissions import make_private
from atropos_core.types import Metrics
from atropos_launcher_ray.command import END_S, FINISH, HOST, TWICE_S, variables
from atropos_launcher_ray.config import Workers
from atropos_launcher_ray.scaling import Scale

if TYPE_CHECKING:
    from atropos_launcher_ray.launcher import Placement, RayLauncher, RayProcess

SERVER = "server"  # its role
PROGRAM = "atropos_launcher_ray.command"
TOKEN = "api/token"  # in the run directory, next to the server's journal
LISTEN_DEADLINE_S = 60.0
SILENT_S = 20.0  # until the draws of a worker on a lost machine go to others; a third of `atropos serve`'s default
SETTLED_S = 10.0  # after its start, when a worker has opened its environment and registered
FINISH_S = 90.0  # for a worker to finish its work, of which it takes up to 60
SHORT_S, SHORT_ENDS = 30.0, 3  # after this many such short lives in a row, the worker cannot run
AGAIN_S = 5.0  # after a short life: Ray takes some seconds to notice a lost machine
LOOK_S = 0.2


def command(environment: str, workers: Workers, url: str, directory: Path) -> list[str]:
    """The command of a worker, the same under every launcher."""
    return [
        "env", "--api", url, "--token-file", str(directory / TOKEN), "--file", str(directory / "config.toml"),
        "--concurrency", str(workers.concurrency), "--", environment,
    ]  # fmt: skip


class Worker:
    """A worker that is kept running, with its process if it has one."""

    def __init__(self, environment: str, number: int, placement: Placement | None) -> None:
        self.environment = environment
        self.number = number
        self.role = f"worker-{environment}-{number}"
        self.placement = placement
        self.process: RayProcess | None = None
        self.since = 0.0  # of its process
        self.leaving_since: float | None = None
        self.task: asyncio.Task[None]

    def runs(self) -> bool:
        return self.process is not None and self.leaving_since is None and self.process.ended() is None

    def leave(self) -> None:
        """End once it has finished its work; at once if it has not begun."""
        self.leaving_since = time.monotonic()
        if self.process is None:
            self.task.cancel()
        else:
            self.process.tell(FINISH)


class RayWorkers(RunWorkers):
    """Started by `open`, ended by `close`."""

    def __init__(self, launcher: RayLauncher, run: PlannedRun, workers: dict[str, Workers], look_s: float) -> None:
        self.url = ""
        self.token_file = run.directory / TOKEN
        self.host = launcher.host
        self.broken = asyncio.get_running_loop().create_future()
        self.broken.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._launcher = launcher
        self._directory = run.directory
        self._options = workers
        self._scales = {n: Scale(one.first, one.count, look_s) for n, one in workers.items() if one.least is not None}
        self._workers: set[Worker] = set()
        self._server: RayProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._step_ended_at = time.monotonic()

    async def open(self, placements: dict[str, list[Placement]]) -> None:
        """Start the server, then as many workers as there are `placements`. Raises ProcessDied, and errors of starting."""
        make_private(self.token_file.parent)
        write_whole(self.token_file, secrets.token_urlsafe(32) + "\n", mode=0o600)
        log, api = self._log(SERVER), self.token_file.parent
        before = log.stat().st_size if log.exists() else 0
        arguments = ["serve", "--host", HOST, "--port", "0", "--dir", str(api), "--token-file", str(self.token_file)]
        arguments += ["--silent-s", f"{SILENT_S:g}"]
        with waiting("the server of the run's workers to start"):
            self._server = await self._launcher.start(SERVER, PROGRAM, variables(arguments), log)
            until = time.monotonic() + LISTEN_DEADLINE_S
            while not (found := re.search(rb"^listening on (\S+) ", log.read_bytes()[before:], re.MULTILINE)):
                if self._server.ended() is not None or time.monotonic() > until:
                    raise self._server_died()
                await asyncio.sleep(LOOK_S)
        self.url = found[1].decode()
        self._watch = asyncio.create_task(self._watch_server())
        for name, several in placements.items():
            while several:
                self._add(name, several.pop())

    def step_ended(self, metrics: Metrics) -> Metrics:
        before, self._step_ended_at = self._step_ended_at, time.monotonic()
        lasted_s, waited_s = self._step_ended_at - before, metrics.get("time/waiting_s", 0.0)
        counted: Metrics = {}
        for name in self._options:
            running = [one for one in self._workers if one.environment == name and one.runs()]
            counted[f"launcher/workers/{name}"] = float(len(running))
            if (scale := self._scales.get(name)) is not None:
                was, settled = scale.wanted, sum(self._step_ended_at - one.since > SETTLED_S for one in running)
                share = scale.step_ended(waited_s, lasted_s, all_run=settled == scale.wanted)
                if share is not None:
                    console.say(
                        f"workers of {name}: {was} -> {scale.wanted}; the loop waited for groups {share:.0%} of its time"
                    )
                    self._adjust(name, scale.wanted)
        return counted

    async def close(self) -> None:
        """End workers, then server, at once. May be called twice."""
        for one in list(self._workers):
            one.leaving_since = time.monotonic()
            if one.process is None:
                one.task.cancel()
            else:
                one.process.connection.close()
        tasks = [one.task for one in self._workers]
        if tasks:
            await asyncio.wait(tasks, timeout=TWICE_S + END_S + 1.0)
        server, self._server = self._server, None
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            server.connection.close()
            until = time.monotonic() + TWICE_S + END_S + 1.0
            while server.ended() is None and time.monotonic() < until:  # noqa: ASYNC110 - a process does not announce it
                await asyncio.sleep(LOOK_S)
        self.token_file.unlink(missing_ok=True)

    def _adjust(self, name: str, wanted: int) -> None:
        there = sorted(
            (one for one in self._workers if one.environment == name and one.leaving_since is None), key=_number
        )
        for one in there[wanted:]:
            one.leave()
        for _ in range(wanted - len(there)):
            self._add(name, None)

    def _add(self, name: str, placement: Placement | None) -> None:
        taken = {one.number for one in self._workers if one.environment == name}
        worker = Worker(name, next(n for n in range(1, len(taken) + 2) if n not in taken), placement)
        self._workers.add(worker)
        worker.task = asyncio.create_task(self._keep(worker))
        worker.task.add_done_callback(lambda task: self._ended(worker, task))

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    async def _keep(self, worker: Worker) -> None:
        """Keep it running until it is to leave. Raises ProcessDied if it cannot run."""
        short = 0
        try:
            while worker.leaving_since is None:
                worker.placement = worker.placement or await self._find_placement(worker)
                began = time.monotonic()
                how = await self._run(worker, worker.placement)
                placement, worker.placement = worker.placement, None
                await placement.remove()
                if worker.leaving_since is not None:
                    return
                short = short + 1 if time.monotonic() - began < SHORT_S else 0
                if short == SHORT_ENDS:
                    raise self._died(f"{how}, for the third time in a row", worker.role)
                console.warn(f"{how}: another is started")
                if short:
                    await asyncio.sleep(AGAIN_S)
        finally:
            if worker.placement is not None:
                await worker.placement.remove()

    async def _run(self, worker: Worker, placement: Placement) -> str:
        """Run it, and return how it ended."""
        options, log = self._options[worker.environment], self._log(worker.role)
        arguments = command(worker.environment, options, self.url, self._directory)
        try:
            process = await self._launcher.start_in(
                placement, 0, options, worker.role, PROGRAM, variables(arguments), log
            )
        except AtroposError as error:  # its machine was lost meanwhile, or it cannot start there
            return Exception.__str__(error).rstrip(".")
        worker.process, worker.since = process, time.monotonic()
        try:
            while (how := process.ended()) is None:
                if worker.leaving_since is not None and time.monotonic() - worker.leaving_since > FINISH_S:
                    process.kill()
                await asyncio.sleep(LOOK_S)
            return f"{worker.role} ({process.named}) {how}"
        finally:
            worker.process = None
            self._launcher.release(process)

    async def _find_placement(self, worker: Worker) -> Placement:
        said = False
        while (placement := await self._launcher.find_placement([self._options[worker.environment]])) is None:
            if not said:
                said = True
                console.warn(f"the cluster has no room for {worker.role} at present: it starts once there is")
        return placement

    async def _watch_server(self) -> None:
        assert self._server is not None, "it was started before"
        while self._server.ended() is None:  # noqa: ASYNC110 - a process does not announce it
            await asyncio.sleep(LOOK_S)
        self._break(self._server_died())

    def _server_died(self) -> ProcessDied:
        assert self._server is not None, "it was started before"
        how = self._server.ended() or f"did not listen within {LISTEN_DEADLINE_S:g} s"
        return self._died(f"{SERVER} ({self._server.named}) {how}", SERVER)

    def _died(self, how: str, role: str) -> ProcessDied:
        log = self._log(role)
        return ProcessDied(f"{how}.\n{tail_of_log(log)}".rstrip(), remedy=f"Its log is {log}")

    def _break(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)

    def _log(self, role: str) -> Path:
        return self._directory / "logs" / f"{role}.log"


def _number(worker: Worker) -> int:
    return worker.number
