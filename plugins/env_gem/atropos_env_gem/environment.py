"""The environment `gem`: its episodes are stepped in a separate process."""

from __future__ import annotations

from atropos_env_gem.config import GemOptions
from atropos_env_kit.step_process import StepProcess
from atropos_env_kit.stepping import Stepped, SteppedEnvironment


class Gem(SteppedEnvironment):
    """An episode's score is the sum of its steps' rewards."""

    def __init__(self, options: GemOptions) -> None:
        super().__init__(options.id, options)
        self._process = StepProcess("atropos_env_gem.episodes:call", options.id, options.parameters, options)

    async def open(self) -> None:
        await self._process.open("gem", "[environment.NAME.parameters]")

    def stepped(self) -> Stepped:
        return self._process.stepped()

    async def close(self) -> None:
        await super().close()
        await self._process.close()
