"""The interface of sandboxes: start untrusted programs, enforce limits, and end everything that they started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# network of a program in a sandbox: none, only the agent API, or all of the machine's
Network = Literal["none", "api", "host"]
Limit = Literal["wall_time", "output", "processes", "memory", "disk"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program together with everything that it starts. A program that reaches one is ended; its Exit names it."""

    wall_time_s: float = 600.0
    output_bytes: int = 16 << 20  # of both standard streams together
    processes: int = 256  # at once
    memory_bytes: int = 4 << 30  # resident, of all its processes
    disk_bytes: int = 2 << 30  # of its work directory, HOME and temporary files


@dataclass(frozen=True)
class Program:
    """A program for a sandbox to start."""

    name: str  # unique among the programs that run at the same time: letters, digits, "-", "_"
    argv: Sequence[str]
    stdout: Path  # files of this machine, made anew
    stderr: Path
    environment: Mapping[str, str] = field(
        default_factory=dict
    )  # besides HOME, TMPDIR and PATH, which the sandbox sets
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)  # in its work directory, by relative path
    home_files: Mapping[str, bytes] = field(default_factory=dict)  # in its HOME
    inputs: Path | None = None  # a directory of this machine; the program finds a copy at Inside.inputs
    shown: Sequence[
        Path
    ] = ()  # of this machine, for it to read: what a sandbox that hides the disk shows besides the system
    network: Network = "none"
    api_url: str = ""  # with network "api": the API's address on this machine, http://HOST:PORT/...
    limits: Limits = Limits()


@dataclass(frozen=True)
class Inside:
    """Paths and addresses as a program in a sandbox sees them."""

    work: str  # absolute paths; the program starts in `work`
    home: str
    api_url: str
    inputs: str = ""  # of the copy of Program.inputs: neither in `work` nor in `home`, nor above them


@dataclass(frozen=True)
class Exit:
    """How a program ended. None of its processes still runs."""

    code: int | None  # None: a signal ended it
    signal: int | None
    limit: Limit | None  # the limit for which it was ended
    stopped: bool  # by `stop`
    left_running: int | None  # processes that it left running, and that were then ended; None: not counted
    seconds: float


class RunningProgram(ABC):
    """A program in a sandbox, until `close`."""

    @abstractmethod
    async def wait(self) -> Exit:
        """Return when it has ended, with everything that it started; may be awaited again. Raises SandboxError if the sandbox
        itself was lost: then the program's results cannot be trusted."""

    @abstractmethod
    async def stop(self) -> None:
        """End it at once, with everything that it started, and return then. Does nothing if it has ended."""

    @abstractmethod
    async def work(self) -> Path:
        """Return the work directory after `wait`, as the program left it, on this machine, until `close`. It is fetched if it is
        elsewhere. The program made everything in it, also links: read it with care, and run nothing from it here."""

    @abstractmethod
    async def close(self) -> None:
        """End it if it still runs, and remove everything but the two files; may be called twice."""


class Sandbox(ABC):
    """Starts untrusted programs. They end when this process does, however it ends."""

    networks: frozenset[Network]  # that it can hold a program to, known after `open`; "host" holds it to nothing

    async def open(self) -> None:
        """Called once before the first program. Raises FitError if it cannot work on this machine. Prints which limits that a
        user might expect it cannot enforce here."""

    @abstractmethod
    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        """Return the paths that a program of that name will see, for use in its files and arguments."""

    @abstractmethod
    async def start(self, program: Program) -> RunningProgram:
        """Start it. Raises ConfigError for a network that this sandbox cannot restrict it to, and SandboxError if it cannot be
        started, for example because the program does not exist inside."""

    async def close(self) -> None:
        """Close what still runs; may be called twice."""
