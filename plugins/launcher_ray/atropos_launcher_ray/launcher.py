"""The launcher `ray`: Ray places each process, and an actor there holds it. Data travels over the run's own connections."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atropos_core.errors import DeadlineExceeded, FitError, ProcessDied
from atropos_core.launchers import (
    Launcher,
    Machine,
    PlannedRun,
    RunWorkers,
    StartedProcess,
    refuse_idle_workers,
)
from atropos_core.processes.dialing import SECRET, Listener, connected
from atropos_core.processes.local import how_ended
from atropos_launcher_ray.config import RayOptions, RoleResources
from atropos_launcher_ray.holder import Holder
from atropos_launcher_ray.workers import SERVER, RayWorkers

JOIN_DEADLINE_S = 30.0
START_DEADLINE_S = 120.0  # for an actor, then for its process until it has dialled
CLOSE_DEADLINE_S = 10.0
INHERITED = ("ATROPOS_", "HF_", "TRANSFORMERS_")  # prefixes of variables that remote processes get from this one
NAMES = {"CPU": "CPU cores", "GPU": "GPUs", "memory": "bytes of memory"}


class RayProcess(StartedProcess):
    """A process in an actor. A local thread appends its output to its log, and notes how it ended."""

    def __init__(self, role: str, holder: Any, pid: int, host: str, log: Path) -> None:
        self.named = f"pid {pid} on {host}"
        self.connection: socket.socket
        self.holder = holder
        self.log = log
        self._how: str | None = None
        self.follower = threading.Thread(target=self._follow, name=f"log of {role}", daemon=True)
        self.follower.start()

    def ended(self) -> str | None:
        return self._how

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._how is None:
            self.holder.send.remote(int(number))

    def tell(self, message: bytes) -> None:
        """Send a message to a process that listens to more than calls. Another place notices if it has ended."""
        with suppress(OSError):
            self.connection.sendall(message)

    def _follow(self) -> None:
        try:
            with self.log.open("ab", buffering=0) as log:
                while chunk := ray.get(self.holder.output.remote()):
                    log.write(chunk)
            self._how = how_ended(ray.get(self.holder.code.remote()))
        except RayError as error:  # the actor, its machine or Ray is gone, and the process with the actor
            self._how = f"was lost: {_first_line(error)}"
        except OSError as error:
            self._how = f"was ended, because its log could not be written: {error}"
            self.holder.send.remote(int(signal.SIGKILL))


class Placement:
    """Resources that the cluster reserves for our processes: a placement group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    async def find(cls, wanted: Sequence[RoleResources], deadline_s: float) -> Placement | None:
        """Reserve room for all of them; None if there is none in time."""
        bundles = [one.bundle() or {"CPU": 0.001} for one in wanted]
        placement = cls(await asyncio.to_thread(placement_group, bundles, strategy="PACK"))
        found = False
        try:
            found = await asyncio.to_thread(placement._group.wait, deadline_s)
        finally:
            if not found:
                await placement.remove()
        return placement if found else None

    def strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        """The strategy of the actor that gets the resources at this index."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    async def remove(self) -> None:
        """May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)


class RayLauncher(Launcher):
    """Connects to a running cluster; starts none, and ends none."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._connected = False  # True if this launcher connected
        self._listener: Listener | None = None
        self._placement: Placement | None = None
        self._roles: list[str] = []  # in the order of its resources
        self._worker_placements: dict[str, list[Placement]] = {}  # of the first workers, by environment
        self._workers: RayWorkers | None = None
        self._holders: list[Any] = []
        self._processes: list[RayProcess] = []

    async def open(self) -> None:
        await self._join()
        try:
            self._listener = Listener(self._options.host or get_node_ip_address())
        except OSError as error:
            raise FitError(
                f"launcher 'ray' cannot listen at {self._options.host or get_node_ip_address()}: {error}.",
                remedy="Set launcher.host to an address of this machine that the cluster's machines can reach.",
            ) from error

    async def _join(self) -> None:
        """Raises FitError if no cluster answers. It runs in a thread that nothing waits for: with a silent address Ray tries for minutes,
        and off the main thread it does not take over SIGTERM."""
        joined: Future[None] = Future()

        def join() -> None:
            try:
                if host := self._options.address.rpartition(":")[0]:
                    port = int(self._options.address.rpartition(":")[2])
                    socket.create_connection(
                        (host, port), JOIN_DEADLINE_S / 2
                    ).close()  # Ray itself would try for minutes
                if not ray.is_initialized():  # a Python caller may have done so
                    ray.init(self._options.address, log_to_driver=False, configure_logging=False)
                    self._connected = True
                    logging.getLogger("ray").setLevel(
                        logging.CRITICAL
                    )  # the run reports what is lost; Ray would add pages to it
                joined.set_result(None)
            except Exception as error:  # noqa: BLE001 - a thread's end: the waiter gets it
                joined.set_exception(error)

        threading.Thread(target=join, name="ray.init", daemon=True).start()
        try:
            async with asyncio.timeout(JOIN_DEADLINE_S):
                await asyncio.wrap_future(joined)
        except (ConnectionError, RayError, OSError, ValueError, RuntimeError) as error:
            said = f"no answer within {JOIN_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else _first_line(error)
            raise FitError(
                f"launcher 'ray' finds no cluster at {self._options.address!r}: {said}",
                remedy="Start one with `ray start --head` (other machines: `ray start --address=HEAD:6379`), or set launcher.address.",
            ) from error

    async def machines(self) -> Sequence[Machine]:
        return [
            Machine(
                node["NodeManagerAddress"],
                total.get("CPU", 0.0),
                total.get("GPU", 0.0),
                int(total.get("memory", 0)),
                {name: amount for name, amount in total.items() if name not in NAMES and _is_custom_resource(name)},
            )
            for node in await asyncio.to_thread(ray.nodes)
            if node["Alive"]
            for total in [node["Resources"]]
        ]

    async def check(self, roles: Sequence[str]) -> None:
        roles, workers = [*roles, *([SERVER] if self._options.workers else ())], self._options.workers
        if unknown := sorted(set(self._options.roles) - set(roles)):
            raise FitError(
                f"launcher.roles.{unknown[0]} has no effect: there is no such role.",
                remedy=f"Choose one of: {', '.join(roles)}.",
            )
        for role in roles:
            await self._require_machine(role, self._resources(role), f"launcher.roles.{role}")
        for name, one in workers.items():
            await self._require_machine(f"a worker of {name}", one, f"launcher.workers.{name}")
        self._roles = list(roles)
        self._placement = await self.find_placement([self._resources(role) for role in roles])
        if self._placement is None:
            raise await self._no_room(f"{' and '.join(_says(role, self._resources(role)) for role in roles)} at once")
        for name, one in workers.items():
            placements = self._worker_placements[name] = []
            while len(placements) < one.first:
                if (placement := await self.find_placement([one])) is None:
                    count = f"{len(placements)} of {one.first}: " if placements else ""
                    raise await self._no_room(f"{count}{_says(f'a worker of {name}', one)} beside the others")
                placements.append(placement)

    async def find_placement(self, wanted: Sequence[RoleResources]) -> Placement | None:
        """None if there is no room for all of them in time. Raises ProcessDied if Ray does not answer."""
        try:
            return await Placement.find(wanted, self._options.room_deadline_s)
        except RayError as error:
            raise ProcessDied(f"Ray does not look for room: {_first_line(error)}") from error

    async def _no_room(self, what: str) -> FitError:
        free = await asyncio.to_thread(ray.available_resources)
        return FitError(
            f"the cluster has no room for {what} within {self._options.room_deadline_s:g} s. Free are {_list(free) or 'none'}.",
            remedy="Lower what roles and workers take, wait for others to end, or raise launcher.room_deadline_s.",
        )

    async def _require_machine(self, role: str, resources: RoleResources, option: str) -> None:
        """Raises FitError if no machine could take it even when empty."""
        wanted, machines = resources.bundle(), await self.machines()
        for machine in machines:
            total = {"CPU": machine.cpus, "GPU": machine.gpus, "memory": machine.memory_bytes, **machine.other}
            if all(total.get(name, 0) >= amount for name, amount in wanted.items()):
                return
        there = "; ".join(
            f"{one.name} has {_list({'CPU': one.cpus, 'GPU': one.gpus, **one.other})}" for one in machines
        )
        raise FitError(
            f"no machine of the cluster has room for {_says(role, resources)}: {there or 'there is none'}.",
            remedy=f"Lower {option}, or add such a machine to the cluster.",
        )

    async def start_workers(self, run: PlannedRun) -> RunWorkers | None:
        api = '"http://127.0.0.1:0": the launcher sets the address of its server.'
        refuse_idle_workers(run, self._options.workers, api)
        if self._options.workers:
            self._workers = RayWorkers(self, run, self._options.workers, self._options.look_s)
            await self._workers.open(self._worker_placements)
        return self._workers

    @property
    def host(self) -> str:
        """The address of this machine for the others."""
        assert self._listener is not None, "open() comes first"
        return self._listener.address.rpartition(":")[0]

    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> RayProcess:
        placement, index = (self._placement, self._roles.index(role)) if role in self._roles else (None, 0)
        return await self.start_in(placement, index, self._resources(role), role, program, environment, log)

    async def start_in(
        self,
        placement: Placement | None,
        index: int,
        resources: RoleResources,
        role: str,
        program: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> RayProcess:
        """Like `start`, with the resources at this index of a placement, or on any machine with such resources."""
        assert self._listener is not None, "open() comes first"
        secret, dialled = self._listener.expect()
        bundle = resources.bundle()
        holder = ray.remote(Holder).options(
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=bundle.pop("memory", None),
            resources=bundle,
            scheduling_strategy=placement.strategy(index) if placement is not None else "DEFAULT",
            max_restarts=0,
        ).remote()  # fmt: skip
        self._holders.append(holder)
        inherited = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        is_connected = False
        try:
            starting = holder.start.remote(
                program, role, self._listener.address, {**inherited, **environment, SECRET: secret}
            )
            async with asyncio.timeout(START_DEADLINE_S):
                pid, host = await asyncio.wrap_future(starting.future())
            process = RayProcess(role, holder, pid, host, log)
            self._processes.append(process)
            process.connection = await connected(process, dialled, role, START_DEADLINE_S, log)
            is_connected = True
        except TimeoutError:
            raise DeadlineExceeded(f"Ray did not start {role} within {START_DEADLINE_S:g} s.") from None
        except RayError as error:
            raise ProcessDied(f"Ray could not start {role}: {_first_line(error)}") from error
        finally:
            dialled.cancel()
            if not is_connected:
                self._end(holder)
        return process

    def release(self, process: RayProcess) -> None:
        """Free the resources of a process that has ended."""
        process.connection.close()
        self._processes.remove(process)
        self._end(process.holder)

    def _end(self, holder: Any) -> None:
        if holder in self._holders:
            self._holders.remove(holder)
            ray.kill(holder)

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        holders, self._holders = self._holders, []
        processes, self._processes = self._processes, []
        for holder in holders:
            ray.kill(holder)
        for process in processes:
            await asyncio.to_thread(process.follower.join, CLOSE_DEADLINE_S)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for placement in (
            self._placement,
            *(one for placements in self._worker_placements.values() for one in placements),
        ):
            if placement is not None:
                await placement.remove()
        self._placement, self._roles, self._worker_placements = None, [], {}
        if self._connected:
            self._connected = False
            await asyncio.to_thread(ray.shutdown)

    def _resources(self, role: str) -> RoleResources:
        return self._options.roles.get(role, RoleResources())


def _says(role: str, resources: RoleResources) -> str:
    return f"{role} ({_list(resources.bundle()) or 'nothing'})"


def _is_custom_resource(resource: str) -> bool:
    return not resource.startswith(("node:", "object_store_memory", "bundle_")) and "_group_" not in resource


def _list(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount for name, amount in resources.items() if amount and (name in NAMES or _is_custom_resource(name))
    }
    return ", ".join(f"{amount:g} {NAMES.get(name, name)}" for name, amount in shown.items())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
