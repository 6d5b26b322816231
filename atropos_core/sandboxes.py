"""What a sandbox must do: start programs that are not trusted, hold them to limits, and end all that they started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# that a program in a sandbox has: none, the agent API alone, all of the machine's
Network = Literal["none", "api", "host"]
Limit = Literal["wall_time", "output", "processes", "memory", "disk"]


@dataclass(frozen=True)
class Limits:
    """Of one program with everything that it starts. Whatever reaches one is ended, and its Exit names it."""

    wall_time_s: float = 600.0
    output_bytes: int = 16 << 20  # of both standard streams together
    processes: int = 256  # at once
    memory_bytes: int = 4 << 30  # resident, of all its processes
    disk_bytes: int = 2 << 30  # of its work directory, HOME and temporary files


@dataclass(frozen=True)
class Program:
    """What a sandbox starts."""

    name: str  # unique among those that are there at once: letters, digits, "-", "_"
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
    api_url: str = ""  # with network "api": where this machine reaches the API, http://HOST:PORT/...
    limits: Limits = Limits()


@dataclass(frozen=True)
class Inside:
    """Where things are for a program in a sandbox."""

    work: str  # absolute paths; the program starts in `work`
    home: str
    api_url: str
    inputs: str = ""  # of the copy of Program.inputs: neither in `work` nor in `home`, nor above them


@dataclass(frozen=True)
class Exit:
    """How a program ended. None of its processes is left then."""

    code: int | None  # None: a signal ended it
    signal: int | None
    limit: Limit | None  # that it reached, and was ended for
    stopped: bool  # by `stop`
    left_running: int | None  # processes that it left behind, ended as well; None: nobody counted
    seconds: float


class RunningProgram(ABC):
    """A program in a sandbox, until `close`."""

    @abstractmethod
    async def wait(self) -> Exit:
        """Returns when it has ended, with everything that it started; may be awaited again. Raises SandboxError where the
        sandbox itself was lost: nothing that the program did can be relied on."""

    @abstractmethod
    async def stop(self) -> None:
        """End it at once, with everything that it started, and return then. Does nothing once it has ended."""

    @abstractmethod
    async def work(self) -> Path:
        """After `wait`: the work directory as it was left, on this machine, until `close`. Fetched where it was elsewhere.
        Whatever is in it, links too, the program made: read it with care, and execute none of it here."""

    @abstractmethod
    async def close(self) -> None:
        """End it where it has not ended, and remove everything but the two files; may be called twice."""


class Sandbox(ABC):
    """Starts programs that are not trusted. What it starts ends with this process, however that ends."""

    networks: frozenset[Network]  # that it can hold a program to, known after `open`; "host" holds it to nothing

    async def open(self) -> None:
        """Called once before the first program. Raises FitError where it cannot work on this machine; says aloud what it
        does not hold here that its user might expect."""

    @abstractmethod
    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        """What a program of that name will see, so that its files and arguments can say it."""

    @abstractmethod
    async def start(self, program: Program) -> RunningProgram:
        """Start it. Raises ConfigError for a network that this sandbox cannot hold it to, SandboxError where it cannot be
        started: no such program inside, say."""

    async def close(self) -> None:
        """Close what is still there; may be called twice."""
