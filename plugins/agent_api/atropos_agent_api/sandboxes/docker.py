"""The sandbox `docker`: each program in its own container, run with the docker command and a daemon on this machine.

Our process 1 (`inside.py`) also runs in the container, so the image needs Python. It opens the listener of the API there, reports
how the program ended, and ends with everything that the program left. The daemon enforces memory and the number of processes; the
monitor enforces the rest, and removes the container at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace

from atropos_agent_api.sandboxes.bubblewrap import (
    HOME,
    INPUTS,
    INSIDE,
    SHARED_MEMORY_BYTES,
    WORK,
    places_inside,
    port_inside,
)
from atropos_agent_api.sandboxes.monitor import most_tasks
from atropos_agent_api.sandboxes.monitored import ROLE, MonitoredSandbox, address, basic_environment, check_program
from atropos_core import console
from atropos_core.errors import FitError, SandboxError
from atropos_core.sandboxes import Inside, Network, Program, RunningProgram
from atropos_core.storage.tempdirs import was_left

LABEL = "atropos.sandbox"  # of each container: the folder of its sandbox, which names its process
COMMAND_S = 30.0
OPEN = "The program is started by a daemon: `docker version` must show a server."
PASSED_ON = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")


class DockerSandbox(MonitoredSandbox):
    """`image` must exist on this machine: nothing is pulled. `python`: its Python command."""

    networks: frozenset[Network] = frozenset({"none", "api", "host"})

    def __init__(self, image: str, python: str = "python3") -> None:
        super().__init__()
        self._image = image
        self._python = python
        self._docker = "docker"

    async def open(self) -> None:
        """Start a container once, to check that its image works."""
        found = shutil.which("docker")
        if found is None:
            raise FitError(
                "the command docker is not on PATH.", remedy="Install it, or use sandbox bubblewrap or process."
            )
        self._docker = found
        code, said = await self._said("version", "--format", "{{.Server.Version}}")
        if code:
            raise FitError(f"no docker daemon answers: {said or 'it gave no answer'}", remedy=OPEN)
        code, said = await self._said("image", "inspect", "--format", "{{.Id}}", self._image)
        if code:
            raise FitError(
                f"image {self._image!r} is not on this machine: {said}",
                remedy=f"Pull or build it: docker pull {console.quoted(self._image)}",
            )
        await self._remove_left()
        await self._probe()

    async def _probe(self) -> None:
        folder = self.folder()
        probe = Program(
            "probe", [self._python, "-c", ""], folder / "probe.stdout", folder / "probe.stderr", network="none"
        )
        try:
            running = await self.start(replace(probe, limits=replace(probe.limits, wall_time_s=COMMAND_S)))
            ended = await running.wait()
            await running.close()
        except SandboxError as error:
            raise FitError(
                f"image {self._image!r} cannot start a program: {error}",
                remedy=f"It needs Python 3.9 or later as {self._python!r} (option sandbox.python), and the daemon must run on this "
                "machine, because its folders are mounted.",
            ) from error
        finally:
            for path in (probe.stdout, probe.stderr):
                path.unlink(missing_ok=True)
        if ended.code != 0:
            raise FitError(f"{self._python} of image {self._image!r} should do nothing, but ended with {ended}.")

    async def _remove_left(self) -> None:
        """Remove containers whose monitor and supervisor were killed."""
        code, said = await self._said(
            "ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
        )
        for line in said.splitlines() if not code else ():
            container, _, folder = line.partition(" ")
            if was_left(folder, ROLE):
                await self._said("rm", "--force", "--volumes", container)

    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return places_inside(api_url, network)

    async def start(self, program: Program) -> RunningProgram:
        check_program(program, self.networks)
        container = self.container(program.name)
        inner = basic_environment(program, HOME, "/tmp")
        if "PATH" not in program.environment:
            del inner["PATH"]  # keep the image's own
        return await self.start_monitored(
            program,
            [self._docker, "start", "--attach", "--interactive", container],
            {name: os.environ[name] for name in PASSED_ON if name in os.environ},
            cwd="/",
            kind="container",
            inner_environment=inner,
            before=[self.command(program)],
            after=[
                [self._docker, "inspect", "--format", "memory {{.State.OOMKilled}}", container],
                [self._docker, "rm", "--force", "--volumes", container],
            ],
            memory_killed="memory true",
        )

    def container(self, name: str) -> str:
        return f"{self.folder().name}-{name}"

    def command(self, program: Program) -> list[str]:
        """The command that makes the container."""
        directory, memory = self.directory(program.name), str(program.limits.memory_bytes)
        mounts = [("work", WORK), ("home", HOME), ("tmp", "/tmp"), ("control", "/agent/control")]
        mounts += [] if program.inputs is None else [("inputs", INPUTS)]
        told = {
            "port": port_inside(address(program.api_url)[1]) if program.network == "api" else None,
            "processes": None,
            "most": program.limits.processes,
            "argv": list(program.argv),
        }
        return [
            self._docker, "create", "--name", self.container(program.name), "--label", f"{LABEL}={self.folder().name}",
            "--interactive", "--pull", "never", "--log-driver", "none", "--workdir", WORK, "--hostname", "sandbox",
            "--network", "host" if program.network == "host" else "none",
            "--user", f"{os.getuid()}:{os.getgid()}", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only",
            "--memory", memory, "--memory-swap", memory, "--pids-limit", str(most_tasks(program.limits.processes)),
            "--shm-size", str(min(SHARED_MEMORY_BYTES, program.limits.memory_bytes)),
            *(word for name, at in mounts for word in ("--mount", f"type=bind,src={directory / name},dst={at}")),
            "--entrypoint", self._python, self._image,
            "-I", "-S", "-c", INSIDE.read_text(), "/agent/control/socket", json.dumps(told),
        ]  # fmt: skip

    async def _said(self, *arguments: str) -> tuple[int, str]:
        """The exit code of the docker command, and its output or the last line of its errors."""
        process = await asyncio.create_subprocess_exec(
            self._docker, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )  # fmt: skip
        try:
            async with asyncio.timeout(COMMAND_S):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return 1, f"`docker {arguments[0]}` gave no answer within {COMMAND_S:.0f} s"
        if process.returncode:
            return process.returncode, (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        return 0, output.decode(errors="replace").strip()
