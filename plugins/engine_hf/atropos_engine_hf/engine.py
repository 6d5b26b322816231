"""The engine: calls wait in arrival order, one task decodes, and the event loop does other work between steps.

Forward passes run on the event loop itself, so no pass runs while other code does: `pause` only has to prevent new passes.
Sequences in flight then leave the batch with their tokens so far. After `resume` they are admitted again like new ones: their
prompt and tokens are prefilled under the new weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, ProcessDied
from atropos_core.group_schema import check_sampling
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_core.types import Completion, Floats, Sampling, Tokens, TopK
from atropos_engine_hf import limits
from atropos_engine_hf.batch import Finished, RunningBatch, SequenceState
from atropos_engine_hf.blocked_weights import BlockedWeights
from atropos_engine_hf.decoder import chunks
from atropos_engine_hf.experts import RouterRecorder
from atropos_engine_hf.loading import ends_of, load_model, media_tokens, read_config
from atropos_engine_hf.probe import open_decoder, path_of
from atropos_engine_hf.scoring import likeliest, score
from atropos_engine_hf.weights import replace
from atropos_torch_models.allocation import LARGE, keep_blocks, return_blocks
from atropos_torch_models.cpu_warmup import warm_up

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_engine_hf.adapter import Adapter
    from atropos_engine_hf.config import HFOptions

T = TypeVar("T")
TURNS = 4  # turns of the event loop between two passes, enough to read, decode and begin a call; with 1, each of these takes a pass


@dataclass(eq=False)
class Call:
    """One call of `sample` that waits for its rows."""

    done: list[Completion | None]
    missing: int
    future: asyncio.Future[None]


class HFEngine(Engine):
    """Samples from a Hugging Face causal language model. A bridge's agent finds `model` and `weights_moved` here."""

    def __init__(self, options: HFOptions, context: RunContext) -> None:
        self.model: Any = None  # transformers.PreTrainedModel, which has no useful type
        self.version = 0
        self._options = options
        self._context = context
        self._waiting: deque[SequenceState] = deque()
        self._calls: set[Call] = set()
        self._paused = False
        self._weights = asyncio.Lock()  # locked while paused, and by a rescoring
        self._work = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._batch: RunningBatch
        self._blocked: BlockedWeights
        self._keeps_blocks = False
        self._adapter: Adapter | None = None

    async def open(self) -> ModelInfo:
        """Load the model. Raises ConfigError or FitError if it cannot be loaded or decoded here."""
        options, directory = self._options, self._context.model
        if self._context.threads:
            torch.set_num_threads(self._context.threads)
        warm_up()
        whole = read_config(directory)
        path = path_of(whole, directory, options)
        self._media = media_tokens(whole)
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
        self._batch = RunningBatch(
            decoder,
            ends_of(directory, self.model),
            max_rows=options.max_batch,
            max_bytes=options.kv_cache_gb * 1e9,
            prefill_tokens=options.prefill_tokens,
        )
        config = self.model.config.get_text_config(decoder=True)
        self._vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        self._longest: int | None = getattr(config, "max_position_embeddings", None)
        self._scheduler = asyncio.create_task(self._schedule(), name="hf engine")
        return info

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
        """Do nothing: the engine keeps no pointers to parameters, and `pause` has dropped results computed from them."""

    # -- sampling

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        prompt = np.ascontiguousarray(prompt, dtype=np.int32)
        self._check(prompt, n, sampling, seeds)
        call = Call([None] * n, n, asyncio.get_running_loop().create_future())
        stop_ids = frozenset(sampling.stop_ids)
        rows = [
            SequenceState(call, index, prompt, int(seed), sampling, prompt, stop_ids)
            for index, seed in enumerate(seeds[:n])
        ]
        if n and not self._batch.fits(rows[0]):
            raise DataError(
                f"keys and values of {rows[0].end} tokens need more than kv_cache_gb = {self._options.kv_cache_gb:g}.",
                remedy="Raise engine.kv_cache_gb, or lower max_tokens.",
            )
        self._waiting.extend(rows)
        self._calls.add(call)
        self._wake()
        try:
            async with asyncio.timeout(deadline_s):
                if n:
                    await call.future
        except TimeoutError:
            raise DeadlineExceeded(
                f"engine 'hf' has sampled {n - call.missing} of {n} continuations within {deadline_s:g} s"
                f" ({len(self._batch.rows)} rows in the batch, {len(self._waiting)} waiting, {'' if self._paused else 'not '}paused)"
            ) from None
        finally:
            self._drop(call)
        return [completion for completion in call.done if completion is not None]

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Score all sequences under one version of the weights: a `pause` waits for it. Temperature 0 counts as 1, as in sampling."""
        return await self._scored(sequences, lambda some: score(self.model, some, temperature, resumes=self._resumes))

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """Like `logprobs`: under one version of the weights, and temperature 0 counts as 1."""
        return await self._scored(
            sequences, lambda some: likeliest(self.model, some, k, temperature, resumes=self._resumes)
        )

    async def _scored(self, sequences: Sequence[Tokens], scoring: Callable[[list[Tokens]], list[T]]) -> list[T]:
        for sequence in sequences:
            self._check_ids(sequence)
            if self._longest is not None and len(sequence) > self._longest:
                raise NotImplementedError(
                    f"a sequence of {len(sequence)} tokens was to be scored, and the model has {self._longest} positions"
                )
        scored: dict[int, T] = {}
        async with self._weights:
            for chunk in chunks([len(sequence) for sequence in sequences], self._options.prefill_tokens):
                scored.update(zip(chunk, scoring([sequences[index] for index in chunk]), strict=True))
                await asyncio.sleep(0)
        return [scored[index] for index in range(len(sequences))]

    # -- weights

    async def pause(self) -> None:
        if self._paused:
            return
        await self._weights.acquire()
        self._paused = True
        self._waiting.extendleft(reversed(self._batch.evict()))
        self._wake()

    async def resume(self, version: int) -> None:
        self.version = version
        self._blocked.moved()
        if self._paused:
            self._paused = False
            self._weights.release()
            self._wake()

    async def load_weights(self, directory: Path) -> None:
        """Load the weights in `directory`. Raises WeightsMismatch if their names, shapes or dtypes are not those of the model."""
        if not self._paused:
            raise AtroposError("engine 'hf' loads weights while it is paused, and it is not: call pause() first")
        await replace(self.model, directory)

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Pause, load the adapter, and resume. Requests in flight continue with the new adapter and its version.

        Keys and values that the old adapter computed are dropped. Raises WeightsMismatch; the engine then stays paused."""
        from atropos_engine_hf.adapter import Adapter  # peft, which only adapters need

        async with self.paused(version):
            if self._adapter is None:
                self._adapter = Adapter(self.model)
            self._adapter.load(directory)

    async def release_cache(self) -> None:
        if not self._batch.rows and self._batch.size_bytes > limits.KEPT:
            self._batch.release()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # what prefill, sampling and rescoring have freed as well
        if self._keeps_blocks:
            return_blocks()

    async def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
            self._scheduler = None
            self._fail(ProcessDied(f"engine 'hf' was closed while {len(self._calls)} calls waited for it"))
            self._batch.close()
            self.model = self._adapter = None

    # -- the scheduler

    def _wake(self) -> None:
        if (self._waiting or self._batch.rows) and not self._paused:
            self._work.set()
        else:
            self._work.clear()

    async def _schedule(self) -> None:
        while True:
            # Between a call's arrival and this task's turn the loop has started every call of the same frame: they are
            # admitted together, and the same frame makes the same batch every time.
            await self._work.wait()
            if self._paused:  # since this task was woken
                continue
            try:
                if room := self._batch.take(self._waiting):
                    self._settle(self._batch.admit([self._waiting.popleft() for _ in range(room)], self.version))
                    await self._turns()
                if self._batch.rows and not self._paused:
                    self._settle(self._batch.step(self.version))
            except Exception as error:  # noqa: BLE001 - whatever it is (often out of memory), the callers must hear of it
                self._fail(error)
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

    def _drop(self, call: Call) -> None:
        """Forget a call that is answered, failed, late or cancelled."""
        self._calls.discard(call)
        if call.missing:
            self._waiting = deque(row for row in self._waiting if row.owner is not call)
            self._batch.remove(call)
            self._wake()

    def _fail(self, error: Exception) -> None:
        self._waiting.clear()
        self._batch.clear()
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(error)

    # -- checks

    def _check(self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int]) -> None:
        if self._scheduler is None:
            raise AtroposError("engine 'hf' is not open: call open() first")
        if not len(prompt):
            raise DataError("a prompt has no tokens: there is nothing to continue")
        self._check_ids(prompt)
        self._check_text(prompt)
        if len(seeds) < n:
            raise DataError(f"{n} continuations were requested with {len(seeds)} seeds: each needs its own")
        check_sampling(sampling)
        if self._longest is not None and len(prompt) + sampling.max_tokens > self._longest:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and max_tokens = {sampling.max_tokens} make"
                f" {len(prompt) + sampling.max_tokens}, and the model has {self._longest} positions.",
                remedy=f"Set max_tokens to at most {max(0, self._longest - len(prompt))}, or shorten the prompt.",
            )

    def _check_text(self, prompt: Tokens) -> None:
        for what, token in self._media.items():
            if count := int(np.count_nonzero(prompt == token)):
                raise DataError(
                    f"a prompt has {count} tokens that stand for {what} (id {token}), and engine 'hf' samples from text only: it"
                    f" has no processor for {what}, and the model never gets their pixels or samples.",
                    remedy="Leave images, videos and audio out of the tasks of this run.",
                )

    def _check_ids(self, tokens: Tokens) -> None:
        if len(tokens) and not (int(np.min(tokens)) >= 0 and int(np.max(tokens)) < self._vocabulary):
            raise DataError(
                f"token ids from {int(np.min(tokens))} to {int(np.max(tokens))} are not all in the model's vocabulary"
                f" of {self._vocabulary}: they come from another tokenizer."
            )
