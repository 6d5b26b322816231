"""The engine: calls wait in arrival order, one task decodes, and the event loop does other work between steps.

Named adapters have a batch each, and take turns: request_queue.py.

Forward passes run on the event loop itself, so no pass runs while other code does: `pause` only has to prevent new passes.
Sequences in flight then leave the batch with their tokens so far. After `resume` they are admitted again like new ones: their
prompt and tokens are prefilled under the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, ProcessDied, WeightsMismatch
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_core.types import Completion, Floats, Sampling, Tokens, TopK
from atropos_engine_hf import limits
from atropos_engine_hf.batch import Finished, RunningBatch, SequenceState
from atropos_engine_hf.blocked_weights import BlockedWeights
from atropos_engine_hf.decoder import Decoder, SlotDecoder, chunks
from atropos_engine_hf.experts import RouterRecorder
from atropos_engine_hf.graphs import Capture, CudaCapture, StepGraphs, check_recording
from atropos_engine_hf.loading import ends_of, load_model, media_tokens, read_config
from atropos_engine_hf.probe import open_decoder, path_of
from atropos_engine_hf.request_checks import RequestChecks
from atropos_engine_hf.request_queue import POLICY, Call, KeysAndValues, RequestQueue
from atropos_engine_hf.scoring import likeliest, score
from atropos_engine_hf.weights import replace
from atropos_torch_models.allocation import LARGE, keep_blocks, return_blocks
from atropos_torch_models.cpu_warmup import warm_up

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_engine_hf.adapters import Adapters
    from atropos_engine_hf.config import HFOptions

T = TypeVar("T")
TURNS = 4  # turns of the event loop between two passes, enough to read, decode and begin a call; with 1, each of these takes a pass


class HFEngine(Engine):
    """Samples from a Hugging Face causal language model. A bridge's agent finds `model` and `weights_moved` here."""

    def __init__(self, options: HFOptions, context: RunContext, capture: Capture | None = None) -> None:
        """`capture`: for tests on a CPU, what stands for CUDA graphs there."""
        self.model: Any = None  # transformers.PreTrainedModel, which has no useful type
        self.version = 0
        self._options = options
        self._context = context
        self._capture = capture
        self._policy: RequestQueue  # of `sample`
        self._named: dict[str | None, RequestQueue] = {}  # of `sample_with`, by adapter
        self._memory = KeysAndValues()
        self._paused = False
        self._weights = asyncio.Lock()  # locked while paused, and by a rescoring
        self._work = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._blocked: BlockedWeights
        self._keeps_blocks = False
        self._adapters: Adapters | None = None

    async def open(self) -> ModelInfo:
        """Load the model. Raises ConfigError or FitError if it cannot be loaded or decoded here."""
        options, directory = self._options, self._context.model
        if self._context.threads:
            torch.set_num_threads(self._context.threads)
        warm_up()
        whole = read_config(directory)
        path = path_of(whole, directory, options)
        self.model = load_model(directory, options.dtype, self._context.devices[0], options.quantization)
        info = self._described()
        self._keeps_blocks = info.device == "cpu" and info.parameters is not None and info.parameters >= LARGE
        if self._keeps_blocks:
            keep_blocks()
        decoder = open_decoder(self.model, path)
        if self._context.announced.get("router_replay"):
            decoder.routers = RouterRecorder(self.model)
        self._resumes = decoder.resumes
        self._blocked = BlockedWeights(self.model)
        self._ends = ends_of(directory, self.model)
        self._decoder = decoder
        if options.cuda_graphs and self.model.device.type == "cuda":
            self._capture = CudaCapture()
        if self._capture is not None:
            check_recording(decoder, self._capture)
        self._policy = self._queue(POLICY, decoder)
        config = self.model.config.get_text_config(decoder=True)
        self._checks = RequestChecks(
            vocabulary=self.model.get_input_embeddings().weight.shape[0],
            longest=getattr(config, "max_position_embeddings", None),
            media=media_tokens(whole),
        )
        self._scheduler = asyncio.create_task(self._schedule(), name="hf engine")
        return info

    def _queue(self, adapter: str | None, decoder: Decoder) -> RequestQueue:
        options = self._options
        graphs = None
        if self._capture is not None and isinstance(decoder, SlotDecoder):
            graphs = StepGraphs(decoder, self._capture)
        kept = options.kv_cache_gb * 1e9
        batch = RunningBatch(decoder, self._ends, options.max_batch, kept, options.prefill_tokens, graphs)
        return RequestQueue(adapter, batch)

    def _described(self) -> ModelInfo:
        return ModelInfo(
            architecture=type(self.model).__name__,
            parameters=sum(
                parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)  # a byte has two weights in 4 bits
                for parameter in self.model.parameters()
            ),
            vocabulary=self.model.config.get_text_config(decoder=True).vocab_size,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            tokenizer=fingerprint(self._context.model),
            threads=torch.get_num_threads(),
        )

    def weights_moved(self) -> None:
        """Forget graphs of parameters that have moved. Nothing else keeps pointers to parameters, and `pause` has dropped results
        computed from them."""
        for queue in self._queues if self._scheduler is not None else ():
            queue.batch.weights_moved()

    # -- sampling

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self._check_open()
        return await self._sample(self._policy, prompt, n, sampling, seeds, deadline_s)

    async def _sample(
        self,
        queue: RequestQueue,
        prompt: Tokens,
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        prompt = np.ascontiguousarray(prompt, dtype=np.int32)
        self._checks.check_prompt(prompt, n, sampling, seeds)
        call = Call(queue, [None] * n, n, asyncio.get_running_loop().create_future())
        stop_ids = frozenset(sampling.stop_ids)
        rows = [
            SequenceState(call, index, prompt, int(seed), sampling, prompt, stop_ids)
            for index, seed in enumerate(seeds[:n])
        ]
        if n and not queue.batch.fits(rows[0]):
            raise DataError(
                f"keys and values of {rows[0].end} tokens need more than kv_cache_gb = {self._options.kv_cache_gb:g}.",
                remedy="Raise engine.kv_cache_gb, or lower max_tokens.",
            )
        queue.waiting.extend(rows)
        queue.calls.add(call)
        self._wake()
        try:
            async with asyncio.timeout(deadline_s):
                if n:
                    await call.future
        except TimeoutError:
            raise DeadlineExceeded(
                f"engine 'hf' has sampled {n - call.missing} of {n} continuations within {deadline_s:g} s"
                f" ({len(queue.batch.rows)} rows in the batch, {len(queue.waiting)} waiting, {'' if self._paused else 'not '}paused)"
            ) from None
        finally:
            queue.drop(call)
            self._wake()
        return [completion for completion in call.done if completion is not None]

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Score all sequences under one version of the weights: a `pause` waits for it. Temperature 0 counts as 1, as in sampling."""
        return await self._logprobs(self._policy, sequences, temperature)

    async def _logprobs(self, queue: RequestQueue, sequences: Sequence[Tokens], temperature: float) -> list[Floats]:
        return await self._scored(
            queue, sequences, lambda some: score(self.model, some, temperature, resumes=self._resumes)
        )

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """Like `logprobs`: under one version of the weights, and temperature 0 counts as 1."""
        return await self._top_logprobs(self._policy, sequences, k, temperature)

    async def _top_logprobs(
        self, queue: RequestQueue, sequences: Sequence[Tokens], k: int, temperature: float
    ) -> list[TopK]:
        return await self._scored(
            queue, sequences, lambda some: likeliest(self.model, some, k, temperature, resumes=self._resumes)
        )

    async def _scored(
        self, queue: RequestQueue, sequences: Sequence[Tokens], scoring: Callable[[list[Tokens]], list[T]]
    ) -> list[T]:
        for sequence in sequences:
            self._checks.check_scored(sequence)
        scored: dict[int, T] = {}
        async with self._weights:
            for chunk in chunks([len(sequence) for sequence in sequences], self._options.prefill_tokens):
                self._use(queue)
                scored.update(zip(chunk, scoring([sequences[index] for index in chunk]), strict=True))
                await asyncio.sleep(0)
        return [scored[index] for index in range(len(sequences))]

    # -- weights

    async def pause(self) -> None:
        if self._paused:
            return
        await self._weights.acquire()
        self._paused = True
        for queue in self._queues:
            queue.evict()
        self._wake()

    async def resume(self, version: int) -> None:
        self.version = version
        self._blocked.moved()
        self.weights_moved()  # an adapter may have new layers
        if self._paused:
            self._paused = False
            self._weights.release()
            self._wake()

    async def load_weights(self, directory: Path) -> None:
        """Load the weights in `directory`. Raises WeightsMismatch if their names, shapes or dtypes are not those of the model."""
        if not self._paused:
            raise AtroposError("engine 'hf' loads weights while it is paused, and it is not: call pause() first")
        if self._adapters is not None and self._adapters.size_bytes:
            raise WeightsMismatch(
                "engine 'hf' holds adapters, which were trained over the base that new weights would replace.",
                remedy="Remove the adapters first, or use a bridge that moves adapters: --bridge lora.",
            )
        await replace(self.model, directory)

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Pause, load the adapter, and resume. Requests in flight continue with the new adapter and its version.

        Keys and values that the old adapter computed are dropped. Raises WeightsMismatch; the engine then stays paused."""
        from atropos_engine_hf.adapters import read_adapter  # peft, which only adapters need

        async with self.paused(version):
            self._opened_adapters().put(POLICY, read_adapter(directory))

    def _opened_adapters(self) -> Adapters:
        from atropos_engine_hf.adapters import Adapters

        if self._adapters is None:
            self._adapters = Adapters(self.model)
        return self._adapters

    def _use(self, queue: RequestQueue) -> None:
        """Let the next forward passes use the adapter of a queue."""
        if self._adapters is not None:
            self._adapters.use(queue.adapter)

    # -- named adapters

    async def add_adapter(self, directory: Path, name: str) -> None:
        """Keep an adapter for `sample_with` and the others, until it is removed. Its directory is not read again. Raises DataError if the
        name is taken, if the directory has no adapter of this model, or if adapters would take more than `adapters_gb`."""
        self._check_open()
        if not name or name in self._named:
            raise DataError(
                f"engine 'hf' already has an adapter {name!r}." if name else "an adapter needs a name.",
                remedy="Remove it first, or give the new one another name.",
            )
        if (self._context.model / "adapter_config.json").exists():
            raise DataError(
                f"engine 'hf' opened the adapter {self._context.model}, and adds no adapter over it.",
                remedy="Open its base model, and add both as named adapters.",
            )
        try:
            self._put(name, directory)
        except WeightsMismatch as error:
            raise DataError(Exception.__str__(error), remedy=error.remedy) from error
        self._named[name] = self._queue(name, self._decoder.another())

    def _put(self, name: str, directory: Path) -> None:
        from atropos_engine_hf.adapters import read_adapter

        held, stored = self._opened_adapters(), read_adapter(directory)
        if held.size_bytes + stored.size_bytes > self._options.adapters_gb * 1e9:
            raise DataError(
                f"the adapter {name!r} has {stored.size_bytes / 1e6:,.1f} MB of weights, and engine 'hf' holds"
                f" {held.size_bytes / 1e6:,.1f} MB of adapters: more than engine.adapters_gb = {self._options.adapters_gb:g} allows.",
                remedy="Remove adapters that are not used any more, or raise engine.adapters_gb.",
            )
        held.put(name, stored)
        self.weights_moved()

    async def remove_adapter(self, name: str) -> None:
        """Free an adapter once its requests in flight have ended; new ones are refused from now on. Raises DataError if there is none of
        this name."""
        queue = self._of(name)
        await queue.end()
        if self._named.pop(name, None) is not None:  # another call may have removed it meanwhile
            self._opened_adapters().remove(name)
            self.weights_moved()

    async def sample_with(
        self,
        name: str | None,
        prompt: Tokens,
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        """Like `sample`, with a named adapter, or None: with the model itself. Raises DataError for an unknown name."""
        queue = self._of(name)
        with queue.used():
            return await self._sample(queue, prompt, n, sampling, seeds, deadline_s)

    async def logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], temperature: float = 1.0
    ) -> list[Floats]:
        queue = self._of(name)
        with queue.used():
            return await self._logprobs(queue, sequences, temperature)

    async def top_logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], k: int, temperature: float = 1.0
    ) -> list[TopK]:
        queue = self._of(name)
        with queue.used():
            return await self._top_logprobs(queue, sequences, k, temperature)

    def _of(self, name: str | None) -> RequestQueue:
        """Return the queue of a named adapter, or that of the model without one. Raises DataError."""
        self._check_open()
        if name is None and None not in self._named:
            self._named[None] = self._queue(None, self._decoder.another())
        if name not in self._named:
            named = ", ".join(sorted(repr(one) for one in self._named if one is not None)) or "none"
            raise DataError(
                f"engine 'hf' has no adapter {name!r}. Its adapters: {named}.",
                remedy="Add it with add_adapter() first.",
            )
        return self._named[name]

    async def release_cache(self) -> None:
        for queue in self._queues:
            if not queue.batch.rows and queue.batch.size_bytes > limits.KEPT:
                queue.batch.release()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # what prefill, sampling and rescoring have freed as well
        if self._keeps_blocks:
            return_blocks()

    async def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
            self._scheduler = None
            waiting = sum(len(queue.calls) for queue in self._queues)
            for queue in self._queues:
                queue.fail(ProcessDied(f"engine 'hf' was closed while {waiting} calls waited for it"))
                queue.batch.close()
            self.model = self._adapters = None

    # -- the scheduler

    @property
    def _queues(self) -> list[RequestQueue]:
        return [self._policy, *self._named.values()]

    def _wake(self) -> None:
        if not self._paused and any(queue.is_busy for queue in self._queues):
            self._work.set()
        else:
            self._work.clear()

    async def _schedule(self) -> None:
        while True:
            # Between a call's arrival and this task's turn the loop has started every call of the same frame: they are
            # admitted together, and the same frame makes the same batch every time.
            await self._work.wait()
            busy = [queue for queue in self._queues if queue.is_busy]
            for queue in busy:
                if not self._paused:  # since this task was woken
                    await self._advance(queue)
            if not busy:
                self._work.clear()

    async def _advance(self, queue: RequestQueue) -> None:
        """Let waiting rows of a queue in, and sample one more token for all that run."""
        batch = queue.batch
        try:
            if room := self._memory.room(queue, [one for one in self._queues if one is not queue]):
                self._use(queue)
                self._settle(batch.admit([queue.waiting.popleft() for _ in range(room)], self.version))
                await self._turns()
            if batch.rows and not self._paused:
                self._use(queue)
                self._settle(batch.step(self.version))
        except Exception as error:  # noqa: BLE001 - whatever it is (often out of memory), the callers must hear of it
            queue.fail(error)
        if queue is not self._policy and not queue.is_busy:
            batch.release()
        self._wake()
        await self._turns()

    @staticmethod
    async def _turns() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _settle(self, finished: Sequence[Finished]) -> None:
        for row, completion in finished:
            call: Call = row.owner
            call.done[row.index] = completion
            call.missing -= 1
            if not call.missing and not call.future.done():
                call.future.set_result(None)

    def _check_open(self) -> None:
        if self._scheduler is None:
            raise AtroposError("engine 'hf' is not open: call open() first")
