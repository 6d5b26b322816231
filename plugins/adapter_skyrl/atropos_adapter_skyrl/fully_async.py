"""SkyRL's fully asynchronous trainer with an Atropos source: generation continues while a step is trained.

The trainer has no callbacks, so this module notifies the source of each step, with the ids of the groups that SkyRL took out
of its buffer, and of each checkpoint. Other generated groups are not in a checkpoint and are not committed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

from atropos_adapter_skyrl.trainer import AroundSource


class Raising:
    """A generator whose error ends the training and is reported as the cause.

    Otherwise SkyRL's generation workers call `os._exit` on an exception: nothing is closed, and the user sees no cause."""

    def __init__(self, generator: Any, failed: asyncio.Future[None]) -> None:
        self._generator = generator
        self._failed = failed

    async def generate(self, input_batch: Any) -> Any:
        try:
            return await self._generator.generate(input_batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised by train()
            if not self._failed.done():
                self._failed.set_exception(error)
            await asyncio.Event().wait()  # until the training has ended


class FullyAsyncAtroposTrainer(AroundSource, FullyAsyncRayPPOTrainer):  # type: ignore[misc] # SkyRL has no types
    """With a `publisher`, weights go out through it, and SkyRL needs no inference client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken: set[int] = (
            set()
        )  # draws whose groups SkyRL took out of its buffer, and the source was not notified of
        self._wants_checkpoint = False
        self._workers: set[asyncio.Task[None]] = set()

    async def train_while_open(self) -> None:
        """Train. The first error of a generate() call is raised at once."""
        inner = self.generator
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.generator = Raising(inner, failed)
        training = asyncio.create_task(super().train_while_open())
        try:
            await asyncio.wait({training, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                failed.result()
            await training
        finally:
            failed.cancel()
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
            self.generator = inner

    async def _run_generate_for_a_group_loop(self, *args: Any, **kwargs: Any) -> None:
        """Run one of SkyRL's generation workers. SkyRL leaves them running when train() raises or is cancelled."""
        worker = asyncio.current_task()
        assert worker is not None
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        await super()._run_generate_for_a_group_loop(*args, **kwargs)

    async def _collect_generation_mini_batch(self, *args: Any, **kwargs: Any) -> Any:
        kept, dropped, exhausted = await super()._collect_generation_mini_batch(*args, **kwargs)
        for group in (*kept, *dropped):
            self._taken.update(group.generator_output["draw_ids"])
        return kept, dropped, exhausted

    async def _run_training(self, training_input: Any) -> Any:
        status = await super()._run_training(training_input)
        taken, self._taken = self._taken, set()
        self._wants_checkpoint = self.source.step_ended(self.cfg.trainer.ckpt_interval <= 0, taken)
        return status

    async def after_publish(self) -> None:
        """Save a checkpoint now if the source cannot wait for the interval: by now SkyRL has marked these groups as trained."""
        if self._wants_checkpoint:
            self._wants_checkpoint = False
            await asyncio.to_thread(self.save_checkpoints)

    def save_checkpoints(self) -> Any:
        self._save_consumed()
        saved = super().save_checkpoints()
        taken, self._taken = self._taken, set()
        self.source.step_ended(True, taken)
        return saved

    def _save_consumed(self) -> None:
        """Write the consumed uids before SkyRL saves the checkpoint.

        SkyRL writes them last, after it has named this checkpoint as the latest and removed old ones. If it were killed in
        between, no checkpoint to resume from would be left."""
        folder = os.path.join(self.cfg.trainer.ckpt_path, f"global_step_{self.global_step}")  # may be a bucket's
        data = self.async_train_dataloader
        state = {
            "consumed_uids": data.get_consumed_uids_list(),
            "filtered_uids": data.get_filtered_uids_list(),
            "epoch": self.epoch,
        }
        io.makedirs(folder, exist_ok=True)
        with io.open_file(os.path.join(folder, "fully_async_state.pt"), "wb") as file:
            torch.save(state, file)


def refused(cfg: Any, max_staleness: int | None) -> Iterator[str]:
    """Yield a line for each setting that SkyRL's fully asynchronous trainer does not support.

    SkyRL itself reports them only after engines have started. `max_staleness` is atropos.max_staleness if an Atropos source enforces it."""
    trainer, config = cfg.trainer, cfg.trainer.fully_async
    mini, workers, steps = (
        trainer.policy_mini_batch_size,
        config.num_parallel_generation_workers,
        config.max_staleness_steps,
    )
    if trainer.placement.colocate_all:
        yield "training and generation run at the same time, on separate GPUs: set trainer.placement.colocate_all=false"
    if trainer.train_batch_size != mini:
        yield f"a step is one mini batch: trainer.train_batch_size={mini}, as trainer.policy_mini_batch_size"
    if not mini <= workers <= mini * (steps + 1):
        yield (
            f"trainer.fully_async.num_parallel_generation_workers={workers} is not from {mini} "
            f"(trainer.policy_mini_batch_size) to {mini * (steps + 1)} (that times max_staleness_steps + 1)"
        )
    if trainer.algorithm.dynamic_sampling.type is not None:
        yield "dynamic sampling is sample_full_batch there: trainer.algorithm.dynamic_sampling.type=null"
    if config.sample_full_batch and not trainer.algorithm.zero_variance_filter:
        yield "trainer.fully_async.sample_full_batch=true needs trainer.algorithm.zero_variance_filter=true"
    loss = trainer.algorithm.policy_loss_type
    anchored = loss == "cispo" and getattr(trainer.algorithm.cispo, "cispo_anchor", "old") == "rollout"
    if loss in ppo_utils.LOSSES_WITH_OLD_LOGPROBS and not anchored:
        yield (
            f"trainer.algorithm.policy_loss_type={loss} compares with weights that are gone by then: "
            "trainer.algorithm.policy_loss_type=rollout_is"
        )
    if max_staleness is not None and max_staleness < steps:
        yield (
            f"atropos.max_staleness={max_staleness} would refuse what trainer.fully_async.max_staleness_steps={steps} "
            f"allows: atropos.max_staleness={steps}"
        )
