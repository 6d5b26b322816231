"""The sandbox `process`: a separate session, limits and separate directories, with the user's rights.

It contains a careless program: what it starts ends with it, and its use of resources is limited. It does not contain a hostile one:
such a program may read and write what its user may, reach the network, and signal the user's other processes.
"""

from __future__ import annotations

import sys

from atropos_agent_api.sandboxes.monitored import MonitoredSandbox, basic_environment, check_program
from atropos_core import console
from atropos_core.sandboxes import Inside, Network, Program, RunningProgram


class ProcessSandbox(MonitoredSandbox):
    networks: frozenset[Network] = frozenset({"host"})

    async def open(self) -> None:
        if sys.platform != "linux":
            console.warn(
                "sandbox process: on this system, a program that leaves its process group and its parent is not found, and outlives "
                "its episode. On Linux it is found."
            )

    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return self.inside_directory(name, api_url)

    async def start(self, program: Program) -> RunningProgram:
        check_program(program, self.networks)
        directory = self.directory(program.name)
        environment = basic_environment(program, str(directory / "home"), str(directory / "tmp"))
        return await self.start_monitored(program, program.argv, environment, cwd=str(directory / "work"))
