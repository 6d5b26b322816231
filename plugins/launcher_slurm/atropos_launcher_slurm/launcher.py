"""The launcher `slurm`, inside a job: each process is a step, started by srun on a node of the job. Data travels over the run's own
connections."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from atropos_core import console
from atropos_core.errors import DeadlineExceeded, FitError, RunDirectoryError
from atropos_core.launchers import Launcher, Machine, StartedProcess
from atropos_core.processes.dialing import SECRET, Listener, connected
from atropos_core.processes.local import how_ended
from atropos_launcher_slurm.batch import SCRIPT
from atropos_launcher_slurm.config import Resources, SlurmOptions, megabytes
from atropos_launcher_slurm.placing import ANY_MEMORY, Node, place

ASK_DEADLINE_S = 30.0  # of scontrol and squeue
DIAL_DEADLINE_S = 120.0  # of a process that srun has started
CLOSE_DEADLINE_S = 10.0
KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID")  # srun reads the job's other variables as its own options
DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
)  # of the whole job


class SlurmProcess(StartedProcess):
    """A step of the job. Its srun is a child of this process, appends the output to the log, and ends like the step."""

    def __init__(self, srun: subprocess.Popen[bytes], node: str) -> None:
        self.named = f"a step of job {os.environ['SLURM_JOB_ID']} on {node}"
        self.connection: socket.socket
        self.step = ""  # its number, as 4711.3
        self._srun = srun
        self._killed = False

    def know_step(self, step: str, node: str) -> None:
        self.step = step
        self.named = f"step {step} on {node}"

    def ended(self) -> str | None:
        code = self._srun.poll()
        if code is None:
            return None
        if code in (0, 137, 143) and self._killed:
            return how_ended(-signal.SIGKILL)
        return how_ended(128 - code if 128 < code < 128 + signal.NSIG else code)

    def terminate(self) -> None:
        """End it by scancel, because srun kills at SIGTERM."""
        if self.step and self.ended() is None:
            subprocess.Popen(
                ["scancel", "--signal=TERM", self.step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def kill(self) -> None:
        if self.ended() is None:
            self._killed = True
            self._srun.terminate()


class SlurmLauncher(Launcher):
    """Runs in an existing job; requests none, and ends none."""

    def __init__(self, options: SlurmOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._listener: Listener | None = None
        self._places: Mapping[str, str] = {}
        self._started = 0
        self._processes: list[SlurmProcess] = []

    async def open(self) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            script = self._directory / SCRIPT
            raise FitError(
                "launcher 'slurm' starts processes inside a job, but this process is not in one.",
                remedy=f"sbatch {console.quoted(script)}"
                if script.is_file()
                else "Use `atropos run` with it to write the files for sbatch, or type this inside salloc.",
            )
        for program in ("srun", "scontrol", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise FitError(f"launcher 'slurm' needs {program}, which is not in PATH on this node.")
        host = self._options.host or await self._own_address()
        try:
            self._listener = Listener(host)
        except OSError as error:
            raise FitError(
                f"launcher 'slurm' cannot listen at {host}: {error}.",
                remedy="Set launcher.host to an address of this node that the job's other nodes can reach.",
            ) from error

    async def _own_address(self) -> str:
        name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        found = re.search(r"NodeAddr=(\S+)", await _output_of("scontrol", "show", "node", "-o", name))
        try:
            return str(await asyncio.to_thread(socket.gethostbyname, found.group(1) if found else name))
        except OSError as error:
            raise FitError(
                f"the address of node {name} is not known: {error}.",
                remedy="Set launcher.host to an address of this node.",
            ) from error

    async def machines(self) -> Sequence[Machine]:
        nodes = await self._nodes()
        return [
            Machine(one.name, one.cpus, one.gpus, 0 if one.memory_gb == ANY_MEMORY else int(one.memory_gb * 1e9))
            for one in nodes
        ]

    async def _nodes(self) -> list[Node]:
        names = (await _output_of("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])).split()
        cpus = each(os.environ["SLURM_JOB_CPUS_PER_NODE"])
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))  # of this node; all nodes of a job have the same number
        memory = float(os.environ.get("SLURM_MEM_PER_NODE", 0)) / 1000 or ANY_MEMORY
        return [Node(name, count, gpus, memory) for name, count in zip(names, cpus, strict=True)]

    async def check(self, roles: Sequence[str]) -> None:
        nodes = await self._nodes()
        self._places = place(self._options, roles, nodes)
        await self._require_shared_directory(len(nodes))

    async def _require_shared_directory(self, nodes: int) -> None:
        """Raises RunDirectoryError if a node of the job does not have the run directory."""
        process = await asyncio.create_subprocess_exec(
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mem=0", "--gpus=0", "--input=none",
            "bash", "-c", '[ -d "$1" ] || { echo "$SLURMD_NODENAME"; }', "bash", str(self._directory),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._options.room_deadline_s + ASK_DEADLINE_S):
                out, error = await process.communicate()
        except TimeoutError:
            process.terminate()
            raise DeadlineExceeded("srun did not start one process on each node of the job in time.") from None
        if process.returncode:
            raise FitError(
                f"srun cannot start a process on each node of the job: {error.decode(errors='replace').strip()}"
            )
        if missing := sorted(out.decode().split()):
            raise RunDirectoryError(
                f"the run directory {self._directory} is not on {', '.join(missing)}, of this job.",
                remedy="Choose one on a file system that all nodes share: --dir.",
            )

    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> StartedProcess:
        assert self._listener is not None, "open() comes first"
        secret, dialled = self._listener.expect()
        self._started += 1
        name = f"{role}#{os.getpid()}.{self._started}"
        wanted = self._options.roles.get(role, Resources())
        node = self._places.get(role) or (await self._nodes())[0].name
        command = [
            "srun", "--nodes=1", "--ntasks=1", "--exact", f"--nodelist={node}", f"--cpus-per-task={wanted.cpus}", f"--gpus={wanted.gpus}",
            f"--mem={megabytes(wanted.memory_gb)}" if wanted.memory_gb else "--mem=0", f"--job-name={name}", "--unbuffered",
            f"--immediate={max(1, round(self._options.room_deadline_s))}", "--export=ALL", "--kill-on-bad-exit=1", "--input=none",
            sys.executable, "-m", program, self._listener.address, role,
        ]  # fmt: skip
        hidden = {} if wanted.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("ab") as output:
            srun = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a millisecond; asyncio's own would wait for its pipes
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**_environment(), **hidden, **environment, SECRET: secret},  # no command line has the secret
            )
        process = SlurmProcess(srun, node)
        self._processes.append(process)
        try:
            deadline_s = self._options.room_deadline_s + DIAL_DEADLINE_S
            process.connection = await connected(process, dialled, role, deadline_s, log)
        finally:
            dialled.cancel()
        process.know_step(await self._step(name), node)
        return process

    async def _step(self, name: str) -> str:
        for line in (
            await _output_of("squeue", "-h", "-s", "-j", os.environ["SLURM_JOB_ID"], "-o", "%i|%j")
        ).splitlines():
            step, _, called = line.partition("|")
            if called == name:
                return step
        return ""  # it has ended meanwhile

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        for one in processes:
            one.kill()
        until = time.monotonic() + CLOSE_DEADLINE_S
        while any(one.ended() is None for one in processes) and time.monotonic() < until:  # noqa: ASYNC110 - a process does not announce it
            await asyncio.sleep(0.05)
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _environment() -> dict[str, str]:
    """For srun."""
    return {key: value for key, value in os.environ.items() if key in KEPT or not key.startswith(("SLURM_", *DEVICES))}


def each(counts: str) -> list[int]:
    """Expand Slurm's short form: "4(x2),1" is 4, 4 and 1."""
    found = []
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found


async def _output_of(*command: str) -> str:
    """The output of a Slurm program. Raises FitError."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            out, error = await process.communicate()
    except TimeoutError:
        process.kill()
        raise FitError(f"`{' '.join(command)}` gave no answer within {ASK_DEADLINE_S:g} s.") from None
    if process.returncode:
        raise FitError(f"`{' '.join(command)}` failed: {error.decode(errors='replace').strip()}")
    return out.decode()
