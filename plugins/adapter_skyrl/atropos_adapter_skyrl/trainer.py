"""SkyRL's trainer with an Atropos source: opens and closes it, and notifies it of every version and checkpoint."""

from __future__ import annotations

from typing import Any

from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback

from atropos_adapter_skyrl.source import GroupSource, opened
from atropos_adapter_skyrl.weights import Dispatch, Publisher


class AroundSource:
    """Mixin for both of SkyRL's trainers. With a `publisher`, it sends the weights, and SkyRL needs no inference client."""

    cfg: Any
    generator: Any

    def __init__(self, *args: Any, publisher: Publisher | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._publisher = publisher
        self.source: GroupSource = self.generator.source

    def init_weight_sync_state(self) -> None:
        if self._publisher is None:
            super().init_weight_sync_state()  # type: ignore[misc] # SkyRL's
        self.dispatch: Any = Dispatch(self.dispatch, self, self.source, self._publisher)

    async def train(self) -> None:
        try:
            async with opened(self.source):
                await self.train_while_open()
        finally:
            if self._publisher is not None:
                await self._publisher.close()

    async def train_while_open(self) -> None:
        """Train. When it returns or raises, no more groups are requested from the source."""
        await super().train()  # type: ignore[misc] # SkyRL's

    async def after_publish(self) -> None:
        """Called when the engines sample from the weights of the present step."""


class AtroposTrainer(AroundSource, RayPPOTrainer):  # type: ignore[misc] # SkyRL has no types
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(Steps(self.source, self.cfg.trainer.ckpt_interval > 0))


class Steps(TrainingCallback):  # type: ignore[misc]
    """Tell the source which steps were trained and which are in a checkpoint. If SkyRL saves none, each step counts as saved."""

    def __init__(self, source: GroupSource, saves: bool) -> None:
        self._source = source
        self._saves = saves

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        if self._source.step_ended(saved=not self._saves):
            control.should_save = True

    def on_save(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self._source.step_ended(saved=True)
