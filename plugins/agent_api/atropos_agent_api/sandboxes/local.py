"""The sandbox `local`, the default: bubblewrap if this machine permits it, else process, with a warning."""

from __future__ import annotations

from atropos_agent_api.sandboxes.bubblewrap import BubblewrapSandbox
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_core import console
from atropos_core.errors import FitError
from atropos_core.sandboxes import Inside, Network, Program, RunningProgram, Sandbox


class LocalSandbox(Sandbox):
    def __init__(self, visible: tuple[str, ...] = ()) -> None:
        self._chosen: Sandbox = BubblewrapSandbox(visible)

    async def open(self) -> None:
        try:
            await self._chosen.open()
        except FitError as error:
            await self._chosen.close()
            self._chosen = ProcessSandbox()
            await self._chosen.open()
            console.warn(
                f"{error.args[0]} Programs run in sandbox process: limits are enforced, but programs may read and write what you may, "
                f"and reach the network. {error.remedy or ''}"
            )
        self.networks = self._chosen.networks

    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return self._chosen.inside(name, api_url, network)

    async def start(self, program: Program) -> RunningProgram:
        return await self._chosen.start(program)

    async def close(self) -> None:
        await self._chosen.close()
