"""The trainer `grpo`: holds model and optimiser, and runs all work on one thread.

The thread leaves the process's event loop free to answer while a step computes. It is the only one, because every further thread would
bring another OpenMP pool.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from atropos_core.errors import ConfigError, WeightsMismatch
from atropos_core.health.alignment import ROUNDING_NATS, largest_rounding
from atropos_core.interfaces import ModelInfo, Trainer, Writing
from atropos_core.types import EXPERTS, Batch, Floats, Metrics, Tokens
from atropos_torch_models.allocation import ACTIVATION_BYTES, LARGE, keep_blocks, return_blocks
from atropos_torch_models.cpu_warmup import warm_up
from atropos_torch_models.devices import refuse_missing
from atropos_torch_models.rounding import measured_rounding
from atropos_trainer_grpo import activation_checkpointing, saving, sharded_state
from atropos_trainer_grpo.forward_passes import distinct_rows
from atropos_trainer_grpo.layout_probe import layout_in_process
from atropos_trainer_grpo.learning_rates import parameter_groups, updates_in_all
from atropos_trainer_grpo.losses import LOSSES, Loss
from atropos_trainer_grpo.losses.supervised import SUPERVISED
from atropos_trainer_grpo.model import (
    complete,
    language_model,
    lay_out_tokens,
    layout_of_model,
    only_used_rows,
    open_model,
    score,
    score_empty,
    vocabulary_of,
)
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.packed_rows import microbatches
from atropos_trainer_grpo.padded_rows import row_microbatches
from atropos_trainer_grpo.process_group import ALONE, ProcessGroup
from atropos_trainer_grpo.router_load import RouterLoad, router_load
from atropos_trainer_grpo.router_replay import RouterReplay, attach_replay
from atropos_trainer_grpo.update import Update

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from atropos_core.plugins.provider import RunContext
    from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
    from atropos_trainer_grpo.sharding import Sharded

Made = TypeVar("Made")

SHARED = frozenset({"posix_shm", "cuda_ipc"})  # the engine owns the weights; ours come from the bridge


def engine_differs(context: RunContext, dtype: str) -> bool:
    """True if tokens are sampled from another policy than these weights: an older version, or one in other or fewer bits."""
    engines = {key.removeprefix("engine/") for key in context.announced if key.startswith("engine/")}
    return (
        context.max_staleness > 0
        or largest_rounding(dtype) > ROUNDING_NATS["float32"]
        or bool(engines - {"auto", dtype})
    )


class GrpoTrainer(Trainer):
    """Policy gradients on one device, or as one rank of several (`ranks` puts them behind one interface). Bridges use `model`, a
    transformers model or, with an adapter, peft's, and `weights_moved`."""

    model: nn.Module  # of transformers; with LoRA peft's wrapper around it

    def __init__(self, options: GrpoOptions, context: RunContext, group: ProcessGroup = ALONE) -> None:
        self._options = options.with_lora() if options.adapts([context.transport]) else options
        self._context = context
        self._device = context.devices[group.rank % len(context.devices)]
        self._group = group
        self._mesh: DeviceMesh | None = None
        self._sharded: Sharded | None = None
        self._loss: Loss | None = None
        self._optimizer: Optimizer | None = None
        self._frozen: nn.Module | None = None  # the reference of a KL term, if no adapter is trained
        self._token_values: Mapping[str, Floats] = {}
        self._router_load: RouterLoad | None = None  # of a mixture of experts
        self._replay: RouterReplay | None = None
        self._dropouts: list[nn.Module] = []  # of an adapter; off except in a training forward pass
        self._keeps_blocks = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def join(self, host: str, port: int, listening: socket.socket | None = None) -> None:
        """Become a rank; before `open`. Returns once all have joined."""
        from atropos_trainer_grpo import sharding

        self._mesh = await self._run(lambda: sharding.join(self._group, host, port, self._device, listening))

    async def open(self) -> ModelInfo:
        return await self._run(self._open)

    def weights_moved(self) -> None:
        """Take over the parameters as they are now, and keep the optimiser's state."""
        if self._sharded is None:
            complete(self.model)
        before = self._optimizer
        holder = self._sharded.model if self._sharded is not None else self.model
        self._optimizer = Optimizer(holder.named_parameters(), self._options, self._updates)
        if before is not None:
            before.close()
            self._optimizer.take_over(before)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        assert self._loss is not None, "open() comes before any step"
        self._ready().end_supervised()
        update = self._update(batch, self._options, self._loss)
        metrics = await self._train(update, batch, writing)
        self._token_values = update.token_values()
        return metrics

    async def supervised_step(self, batch: Batch, learning_rate: float) -> Metrics:
        self._ready().supervised_rate = learning_rate
        made = await self._train(self._update(batch, self._options.supervised(), SUPERVISED), batch, nullcontext)
        kept = {name: made[name] for name in ("grad_norm", "learning_rate", "entropy", "tokens")}
        times = {name: value for name, value in made.items() if name.startswith("time/")}
        return {"warmup/loss": made["loss"], **kept, **times}

    def _update(self, batch: Batch, options: GrpoOptions, loss: Loss) -> Update:
        return Update(
            self._policy, self._ready(), options, loss, batch, self._device, self._context.seed, self._dropouts,
            self._reference, self._group,
        )  # fmt: skip

    async def _train(self, update: Update, batch: Batch, writing: Writing) -> Metrics:
        if self._group.size > 1:  # each rank draws its own dropout, so that a checkpoint need not hold it
            seeds = np.random.SeedSequence([self._context.seed, batch.version, self._group.rank])
            torch.manual_seed(int(seeds.generate_state(1)[0]))
        for routers in (self._router_load, self._replay):
            if routers is not None:
                routers.clear()
        async with AsyncExitStack() as stack:
            for number, minibatch in enumerate(update.minibatches()):
                await self._run(partial(update.backward, minibatch))
                if number == 0:
                    await stack.enter_async_context(writing())
                await self._run(update.write)
            if self._sharded is not None:
                await self._run(self._sharded.gather)
        metrics = await self._run(update.metrics)
        if self._router_load is not None:
            metrics = {**metrics, **await self._run(partial(self._router_load.metrics, self._group))}
        if self._replay is not None and EXPERTS in batch.columns:
            metrics = {**metrics, **await self._run(partial(self._replay.metrics, batch, self._group))}
        await self._give_back()
        return metrics

    async def _give_back(self) -> None:
        """Free cached memory: the engine samples next, perhaps in the same memory."""
        if self._keeps_blocks:
            await self._run(return_blocks)
        if self._device.startswith("cuda") and self._context.max_staleness == 0:
            await self._run(torch.cuda.empty_cache)

    async def token_values(self) -> Mapping[str, Floats]:
        return self._token_values

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        self._ready()
        made = await self._run(lambda: self._logprobs(sequences, temperature or 1.0))
        await self._give_back()
        return made

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        return await measured_rounding(self._policy, lambda: self.logprobs(sequences, temperature))

    async def save(self, directory: Path) -> None:
        optimizer = self._ready()
        await self._run(lambda: self._save(optimizer, directory))

    async def restore(self, directory: Path) -> None:
        optimizer = self._ready()
        await self._run(lambda: self._restore(optimizer, directory))

    async def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._mesh is not None:
            from atropos_trainer_grpo import sharding

            self._mesh = None
            sharding.leave()

    def _open(self) -> ModelInfo:
        from atropos_core.rollouts.tokenizer import fingerprint

        self._loss = self._chosen_loss()
        self._updates = updates_in_all(self._options, self._context.steps)
        if self._context.threads:
            torch.set_num_threads(self._context.threads)
        refuse_missing(self._device, "trainer 'grpo'")
        warm_up()
        if self._context.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(self._context.seed)
        shared = self._context.transport in SHARED
        lora = self._options.lora
        quantized = lora is not None and lora.quantization is not None
        at = "cpu" if self._mesh is not None or quantized else None  # until it is sharded or packed
        dtype, device = self._options.dtype, self._device
        attention = self._options.attention
        layout = layout_in_process(self._context.model, self._options)
        model = open_model(
            self._context.model,
            dtype=dtype,
            device=device,
            with_weights=not shared,
            at=at,
            attention=attention,
            layout=layout,
        )
        if self._options.kernels == "liger":
            from atropos_trainer_grpo.kernels import use_liger

            use_liger(model)
        parameters = list(model.parameters())
        info = ModelInfo(
            architecture=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in parameters),
            vocabulary=vocabulary_of(model),
            dtype=str(parameters[0].dtype).removeprefix("torch."),
            device=self._device,
            tokenizer=fingerprint(self._context.model),
            threads=torch.get_num_threads(),
        )
        self._keeps_blocks = self._device == "cpu" and info.parameters is not None and info.parameters >= LARGE
        if self._keeps_blocks:
            keep_blocks(ACTIVATION_BYTES)
        if self._options.old_logprobs == "auto" and engine_differs(self._context, info.dtype):
            self._options = self._options.corrected()
        self.model = model
        if self._options.lora is None and self._mesh is None and self._device == "cpu":
            only_used_rows(model)
        if lora is not None:
            self._adapt(model, lora)
        trained = {name: parameter.ndim for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        parameter_groups(trained, self._options)  # refuses a pattern that means nothing here, before any weights arrive
        if self._options.gradient_checkpointing:
            activation_checkpointing.enable(model, self._options)
            self.model.train()  # transformers checkpoints only then; its own dropout was set to zero
            for layer in self._dropouts:
                layer.eval()
        if self._options.kl is not None and self._options.lora is None:
            frozen = open_model(
                self._context.model,
                dtype=dtype,
                device=device,
                with_weights=True,
                at=at,
                attention=attention,
                layout=layout,
            )
            self._frozen = frozen.requires_grad_(False)
        if self._options.compile_layers:
            from atropos_trainer_grpo.compiled_layers import compile_layers

            for opened in filter(None, (model, self._frozen)):
                compile_layers(opened)
        if self._mesh is not None:
            self._divide(self._mesh)
        policy = language_model(self._policy)
        if self._options.router_replay:
            self._replay = attach_replay(policy)
            if self._frozen is not None:  # a reference that routed otherwise would be another policy at once
                attach_replay(language_model(self._frozen))
        self._router_load = router_load(policy)
        if not shared:
            self.weights_moved()
        return info

    def _divide(self, mesh: DeviceMesh) -> None:
        from atropos_trainer_grpo.sharding import Sharded

        self._sharded = Sharded(self.model, self._group, mesh)
        if self._dropouts:
            from atropos_trainer_grpo import lora

            self._dropouts = lora.dropouts(self._sharded.model)
        if self._frozen is not None:
            self._frozen = Sharded(self._frozen, self._group, mesh, trained=False).scorer

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        """Yield the model that the run began with."""
        if self._frozen is not None:
            yield self._frozen
            return
        model: Any = self.model if self._sharded is None else self._sharded.model  # peft's, around the base
        with model.disable_adapter():
            yield self._policy

    @property
    def _policy(self) -> nn.Module:
        """The module that `score` takes."""
        return self.model if self._sharded is None else self._sharded.scorer

    def _save(self, optimizer: Optimizer, directory: Path) -> None:
        state = optimizer.state()
        if self._sharded is not None:
            state = sharded_state.write(state, list(self._sharded.trained), self._sharded.masters(), directory)
        if self._group.rank == 0:
            saving.save(self.model, state, self._context.model, directory)

    def _restore(self, optimizer: Optimizer, directory: Path) -> None:
        if self._sharded is None:
            saving.restore(self.model, optimizer, directory)
        else:
            saving.restore(self._sharded.model, optimizer, directory, self._sharded)
            self._sharded.gather()

    def _chosen_loss(self) -> Loss:
        """Find the loss. Raises if its name is unknown or its provider is broken."""
        name = self._options.loss
        made = LOSSES.get(name)
        if made is None:
            from atropos_core.plugins.manager import load_plugins

            offered: Any = load_plugins().registry.find("loss", name).provider
            made = offered.build(offered.options(), self._context)
        if not isinstance(made, Loss):
            raise ConfigError(f"trainer.loss = {name!r} is for another trainer: {made!r}.")
        if (self._options.average or made.average) == "constant" and self._options.loss_length is None:
            raise ConfigError(f"trainer.loss = {name!r} averages over a constant length: set trainer.loss_length.")
        if name not in LOSSES:
            self._refuse_idle(made)
        return made.having(**self._options.loss_values)

    def _refuse_idle(self, loss: Loss) -> None:
        """Refuse idle options for a custom loss; config.py does so for the built-in ones."""
        from atropos_trainer_grpo.loss_cases import uses_bound

        options = self._options
        idle = [
            f"clip_{bound}" if bound != "dual" else "dual_clip"
            for bound, given in (("low", options.clip_low), ("high", options.clip_high), ("dual", options.dual_clip))
            if given is not None and not uses_bound(loss, bound)
        ]
        if options.loss_length is not None and (options.average or loss.average) != "constant":
            idle.append("loss_length")
        if idle:
            raise ConfigError(
                f"trainer.{idle[0]} has no effect with trainer.loss = {options.loss!r}, which does not use it: remove it."
            )

    def _adapt(self, model: PreTrainedModel, options: LoraOptions) -> None:
        from atropos_trainer_grpo import lora  # peft, which only LoRA needs

        self.model = lora.attach(model, options, self._context.model)
        self._dropouts = lora.dropouts(self.model)
        if options.quantization is not None:
            from atropos_trainer_grpo.quantization import quantize

            quantize(self.model, model.get_output_embeddings(), self._device, options.quantization)
            self.model.to(self._device)

    @torch.no_grad()
    def _logprobs(self, sequences: Sequence[Tokens], temperature: float) -> list[Floats]:
        made = [np.zeros(len(sequence), dtype=np.float32) for sequence in sequences]
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        longer = np.flatnonzero(lengths > 1)
        limit = self._options.tokens_per_microbatch
        cut = row_microbatches if layout_of_model(self._policy).name == "rows" else microbatches
        for part in self._group.passes(lengths, longer, lambda order: cut(lengths, order, limit)):
            if not len(part):
                score_empty(self._policy, self._device)
                continue
            tokens = np.concatenate([sequences[i] for i in part])
            packing = lay_out_tokens(
                self._policy, tokens, lengths[part], self._device, share=self._options.share_prompts
            )
            follows = np.ones(len(tokens), dtype=np.bool_)
            follows[np.cumsum(lengths[part]) - lengths[part]] = False
            rows = np.flatnonzero(follows)
            once, of = distinct_rows(packing.slots[rows], np.ones(len(rows), np.float32), worth=True)
            scored = score(
                self._policy,
                packing,
                packing.at(rows[once] - 1),
                torch.from_numpy(tokens[rows[once]].astype(np.int64)).to(self._device),
                None if temperature == 1 else torch.full((len(rows[once]),), temperature, device=self._device),
                self._options.logprob_chunk,
            )
            logprobs = scored.logprobs.float().cpu().numpy()
            split = np.split(logprobs if of is None else logprobs[of], np.cumsum(lengths[part] - 1)[:-1])
            for i, values in zip(part, split, strict=True):
                made[i][1:] = values
        if self._group.size > 1 and made:
            made = np.split(self._group.sum_array(np.concatenate(made)), np.cumsum(lengths)[:-1])
        return made

    def _ready(self) -> Optimizer:
        if self._optimizer is None:
            raise WeightsMismatch(
                f"the trainer has no weights yet: call open(), and then the bridge over {self._context.transport}."
            )
        return self._optimizer

    async def _run(self, work: Callable[[], Made]) -> Made:
        """Run `work` on the worker thread. A cancelled caller still waits for its end, because it may be writing weights."""
        future = asyncio.get_running_loop().run_in_executor(self._worker, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
