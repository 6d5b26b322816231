"""The trainer `grpo` on one device, with adapters of clients next to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_core.errors import ConfigError
from atropos_core.stepwise import AdamSettings, AdapterSettings, StepwiseOutput, TargetSequence
from atropos_core.types import Metrics
from atropos_trainer_grpo.trainer import GrpoTrainer

if TYPE_CHECKING:
    from atropos_trainer_grpo.stepwise.adapters import Adapters


class StepwiseGrpoTrainer(GrpoTrainer):
    """A StepwiseTrainer if the base model is frozen: with `[trainer.lora]`, or a transport of adapters."""

    _adapters: Adapters | None = None

    async def create_adapter(self, name: str, settings: AdapterSettings) -> None:
        await self._run(lambda: self._clients().create(name, settings))

    async def drop_adapter(self, name: str) -> None:
        await self._run(lambda: self._clients().drop(name))

    async def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        made = await self._run(lambda: self._clients().forward_backward(name, sequences, loss, settings, backward))
        if self._router_load is not None:  # it counts what `step` routes
            self._router_load.clear()
        await self._give_back()
        return made

    async def optimizer_step(self, name: str, adam: AdamSettings) -> Metrics:
        return await self._run(lambda: self._clients().step(name, adam))

    async def clear_gradient(self, name: str) -> None:
        await self._run(lambda: self._clients().clear_gradient(name))

    async def save_adapter(self, directory: Path, name: str, moments: bool) -> None:
        await self._run(lambda: self._clients().save(directory, name, moments=moments))

    async def restore_adapter(self, directory: Path, name: str, moments: bool) -> None:
        await self._run(lambda: self._clients().restore(directory, name, moments=moments))

    def _clients(self) -> Adapters:
        self._ready()
        if self._options.lora is None:
            raise ConfigError(
                "the trainer trains a whole model, and adapters of clients need a base model that stays as it is.",
                remedy="Set [trainer.lora], or a bridge that moves adapters.",
            )
        if self._options.compile_layers:
            raise ConfigError(
                "trainer.compile_layers = true is not possible with adapters of clients: each would compile the layers again.",
                remedy="Set trainer.compile_layers = false.",
            )
        if self._adapters is None:
            from peft import PeftModel

            from atropos_trainer_grpo.stepwise.adapters import Adapters

            assert isinstance(self.model, PeftModel), "an adapter is trained, on one device"
            self._adapters = Adapters(self.model, self._options, self._device)
        return self._adapters
