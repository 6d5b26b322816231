"""The interface of launchers: start the processes of a run, here or on other machines, watch them and end them.

A run asks for a role ("engine", "trainer", "engine-NAME"), with the module to run and its environment variables. The launcher
decides on which machine, by its own options. It has no part in the computation: the process answers calls on one connection
(`atropos_core.processes`), and data goes through hub and bridges, never through the launcher.
"""

from __future__ import annotations

import asyncio
import socket
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atropos_core.errors import FitError
from atropos_core.types import Metrics


@dataclass(frozen=True)
class Machine:
    """A machine on which a launcher can start processes."""

    name: str  # an address or a host name
    cpus: float
    gpus: float = 0.0
    memory_bytes: int = 0  # 0: not known
    other: Mapping[str, float] = field(default_factory=dict)  # further resources, by the launcher's own names


@dataclass(frozen=True)
class PlannedRun:
    """A run that a scheduler will start, for writing its files."""

    directory: Path  # its run directory, absolute and new
    run_file: str  # TOML: every value of it; as config.toml of a run directory, `atropos resume` begins with it
    roles: Mapping[str, Sequence[str]]  # the devices of each process that a launcher will start
    environments: Sequence[str] = ()
    has_api: bool = False  # workers elsewhere run its environments


def refuse_unprintable(values: Mapping[str, str]) -> None:
    """Raises FitError for a value that cannot be part of a script or manifest: one with a line break, another control character, or
    bytes that are not UTF-8. Keys name the values in the message."""
    for name, value in values.items():
        if any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in value):
            raise FitError(
                f"{name} is {value!a}: a scheduler's file cannot hold a line break, another control character or bytes that are not UTF-8.",
                remedy="Choose a name without them.",
            )


def refuse_other_gpus(run: PlannedRun, gpus: Mapping[str, int]) -> None:
    """Raises FitError for a role that uses another number of GPUs than the launcher requests for it. `gpus`: by role; 0 if missing."""
    for role, devices in run.roles.items():
        requested, used = gpus.get(role, 0), sum(device.startswith("cuda") for device in devices)
        if requested != used:
            section = section_of(role)
            names = ", ".join(f'"cuda:{n}"' for n in range(requested)) or '"cpu"'
            raise FitError(
                f"{role} asks for {requested} GPUs (launcher.roles.{role}.gpus) but uses {', '.join(devices)} ({section}.devices).",
                remedy=f"Set {section}.devices = [{names}], or launcher.roles.{role}.gpus = {used}.",
            )


def refuse_idle_workers(run: PlannedRun, workers: Iterable[str], api: str) -> None:
    """Raises FitError for workers that would have nothing to do. `workers`: their environments. `api`: what to add to a run file
    without [api]."""
    for name in sorted(workers):
        if not run.has_api:
            raise FitError(
                "launcher.workers has no effect: the run file has no [api], so the run itself runs its environments.",
                remedy=f"Add [api] with url = {api}",
            )
        if name not in run.environments:
            raise FitError(
                f"launcher.workers.{name} has no effect: the run has no such environment.",
                remedy=f"Choose one of: {', '.join(run.environments) or 'none'}.",
            )


def refuse_missing_workers(run: PlannedRun, workers: Iterable[str]) -> None:
    """Raises FitError for a run with an [api] for which the launcher starts no workers."""
    if run.has_api and not [*workers]:
        raise FitError(
            "the run file has an [api], but no workers would run its environments.",
            remedy="Add workers, [launcher.workers.NAME], or leave [api] out.",
        )


def section_of(role: str) -> str:
    """Return the section of a run file that has the devices of a role."""
    kind, dash, name = role.partition("-")
    return {"engine-": f"engine.replica.{name}", "teacher-": f"teacher.{name}.engine"}.get(kind + dash, role)


@dataclass(frozen=True)
class SchedulerFiles:
    """The files and the command that give a run to a scheduler."""

    files: Mapping[str, str]  # text, by path in the run directory
    submit: Sequence[str]  # the command that submits them
    submits: bool = False  # True: submit now. False: the user submits them


class StartedProcess(ABC):
    """One process that a launcher has started, with everything that it starts."""

    named: str  # for messages: "pid 4711", "pid 4711 on 10.0.0.7"
    pid: int | None = None  # on this machine; None on another one
    connection: socket.socket  # on which it answers

    @abstractmethod
    def ended(self) -> str | None:
        """Return how it ended, as "was killed by SIGKILL" or "ended with exit code 3"; None while it runs. Never waits."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to it and everything that it started. Returns at once; does nothing if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Do the same with SIGKILL."""


class RunWorkers(ABC):
    """Workers that a launcher keeps running for a run's environments, with the trajectory API between them and the run."""

    url: str  # of the server
    token_file: Path  # its token, which the run's engines want as well
    host: str  # an address of this machine that the workers reach
    broken: asyncio.Future[None]  # raises ProcessDied: the server has ended, or workers end as soon as they start

    @abstractmethod
    def step_ended(self, metrics: Metrics) -> Metrics:
        """Called with the metrics of each step, to adapt the number of workers. Returns further metrics. Never waits."""


class Launcher(ABC):
    """Starts processes. They end with it, and with the run's own process, however that ends."""

    several_machines = False  # what it starts may be on another machine: no memory and no descriptor is shared with it

    async def open(self) -> None:
        """Called once, before anything is started. Raises FitError if there is nothing to start processes on."""

    @abstractmethod
    async def machines(self) -> Sequence[Machine]:
        """Return the machines that it has while it is open."""

    async def check(self, roles: Sequence[str]) -> None:
        """Raises FitError, within seconds, if these roles cannot all run at once. The message says what there is and what is
        missing."""

    @abstractmethod
    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> StartedProcess:
        """Start `python -m program CONNECTION role` with these variables added to the machine's own. Both of its output streams are
        appended to `log`, a file of this machine, as they arrive. Raises FitError if no machine can take the role."""

    async def start_workers(self, run: PlannedRun) -> RunWorkers | None:
        """Called once per run, after `check` and before any `start`. Return None if this launcher starts no workers for it. Raises
        FitError if its options contradict the run, AtroposError if the server does not start."""
        return None

    async def close(self) -> None:
        """End everything that still runs; may be called twice."""
