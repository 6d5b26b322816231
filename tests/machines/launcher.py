"""A launcher for machines that run an agent: `--launcher tests/machines/launcher.py:AgentLauncher`. Its environment says where each role is
(ATROPOS_TEST_ROLES, as {"trainer": "/path/to/socket"}), and by which address the others reach the run (ATROPOS_TEST_HOST)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from atropos_core.launchers import Launcher, Machine, StartedProcess
from atropos_core.processes.dialing import SECRET, Listener
from atropos_core.processes.local import how_ended

DIAL_DEADLINE_S = 120.0


class AgentsProcess(StartedProcess):
    """What the agent at the other end of a Unix socket has started."""

    def __init__(self, agent: socket.socket, role: str, wanted: Mapping[str, object], log: Path) -> None:
        self._agent = agent
        with log.open("ab") as output:
            text = json.dumps(wanted).encode() + b"\n"
            agent.sendall(text[socket.send_fds(agent, [text], [output.fileno()]) :])
        self._answers = agent.makefile("rb")
        self.named = f"pid {int(self._answers.readline())} where {role} belongs"
        agent.setblocking(False)
        self._how: str | None = None

    def ended(self) -> str | None:
        if self._how is None and (line := self._answers.readline()):
            self._how = how_ended(json.loads(line)["code"])
        return self._how

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.ended() is None:
            self._agent.sendall(f"{int(number)}\n".encode())


class AgentLauncher(Launcher):
    """Where agents are."""

    several_machines = True

    async def open(self) -> None:
        self._agents = json.loads(os.environ["ATROPOS_TEST_ROLES"])
        self._listener = Listener(os.environ["ATROPOS_TEST_HOST"])
        self._started: list[AgentsProcess] = []

    async def machines(self) -> Sequence[Machine]:
        return [Machine(agent, 1) for agent in dict.fromkeys(self._agents.values())]

    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> StartedProcess:
        secret, dialled = self._listener.expect()
        agent = socket.socket(socket.AF_UNIX)
        agent.connect(self._agents[role])
        process = AgentsProcess(
            agent,
            role,
            {
                "command": [sys.executable, "-m", program, self._listener.address, role],
                "environment": {**os.environ, **environment, SECRET: secret},
            },
            log,
        )
        self._started.append(process)
        process.connection = await asyncio.wait_for(dialled, DIAL_DEADLINE_S)
        return process

    async def close(self) -> None:
        for process in self._started:
            process.kill()
        self._listener.close()
