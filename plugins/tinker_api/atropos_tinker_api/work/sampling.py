"""Sampling: requests of all samplers at once, each with its adapter in the engine.

Sampling requests are not in a journal. After a restart their results are unknown, and the client sends them again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, HubFull, ProcessDied
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive
from atropos_core.stepwise import AdapterEngine
from atropos_core.types import Completion, Floats, TopK
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.refused import Refused, error_body, said
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.samplers import Sampler, Samplers
from atropos_tinker_api.wire.answers import NO_LOGPROB, NO_TOKEN, Sample, TopLogprobs, sample_response
from atropos_tinker_api.work.adapter_policy import AdapterPolicy
from atropos_tinker_api.work.adapters_in_engine import AdaptersInEngine
from atropos_tinker_api.work.operations import Limits
from atropos_tinker_api.work.sample_request import SampleRequest, read_sample_request

SAMPLE_S = 3600.0  # for one request
MOST_REQUESTS = 4096  # in flight, or done and not fetched
KEEP_S = 600.0  # a result that is not fetched
KEEP_FETCHED_S = 60.0  # a result that was fetched, in case the answer was lost
SEEDS = 1 << 63


@dataclass
class Pending:
    """One request. `fetched`: when its result was first taken."""

    body: bytes
    n: int
    task: asyncio.Task[tuple[Kind, bytes]]
    done: float | None = None
    fetched: float | None = None


class SamplingWork:
    """`failed` is set to the error of an engine that has ended."""

    def __init__(
        self, engine: AdapterEngine, samplers: Samplers, tokenizer: ChatTokenizer, limits: Limits, most_adapters: int
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self.adapters = AdaptersInEngine(engine, samplers, most_adapters)
        self._requests: OrderedDict[str, Pending] = OrderedDict()

    def submit(self, sampler: Sampler, seq: int, body: bytes, given: Fields) -> tuple[str, int]:
        """Begin a request unless it has begun. Return its id and its number of samples. Raises Refused, HubFull, DataError."""
        id = f"{sampler.id}:{seq}"
        if (known := self._requests.get(id)) is not None:
            if known.body != body:
                raise Refused(f"seq_id {seq} of sampling session {sampler.id} is that of another request.")
            return id, known.n
        self._forget()
        if len(self._requests) >= MOST_REQUESTS:
            raise HubFull(f"{MOST_REQUESTS:,} sampling requests are in flight.", remedy="Send it again in a moment.")
        n = given.integer("num_samples", 1, least=1, most=1 << 20)
        task = asyncio.create_task(self._answer(sampler, seq, given), name=f"sample {id}")
        pending = self._requests[id] = Pending(body, n, task)
        task.add_done_callback(lambda _: setattr(pending, "done", time.monotonic()))
        return id, n

    async def result(self, id: str, hold_s: float) -> tuple[Kind, bytes] | None:
        """Return the result, or None if it is not there within `hold_s`. Raises Refused (410) for an unknown one, ProcessDied."""
        if (pending := self._requests.get(id)) is None:
            raise Refused(
                f"this server has no sampling request {id[:200]!r}: send it again.", status=410, category="server"
            )
        await asyncio.wait({pending.task}, timeout=hold_s)
        if not pending.task.done():
            return None
        if pending.task.cancelled():
            raise Refused(f"sampling request {id} was cancelled.", status=410)
        pending.fetched = pending.fetched or time.monotonic()
        return pending.task.result()

    def cancel(self, id: str) -> None:
        if (pending := self._requests.pop(id, None)) is not None:
            pending.task.cancel()

    async def close(self) -> None:
        for pending in self._requests.values():
            pending.task.cancel()
        await asyncio.gather(*(pending.task for pending in self._requests.values()), return_exceptions=True)

    def _forget(self) -> None:
        """Forget results that were fetched a while ago, and those that were not fetched for long."""
        now = time.monotonic()
        for id, one in list(self._requests.items()):
            if one.done is None:
                continue
            if now - (one.fetched or now) > KEEP_FETCHED_S or now - one.done > KEEP_S:
                del self._requests[id]

    async def _answer(self, sampler: Sampler, seq: int, given: Fields) -> tuple[Kind, bytes]:
        try:
            request = read_sample_request(given, self._limits)
            async with self.adapters.using(sampler) as adapter:
                return Kind.DONE_PROTOBUF, await self._sample(request, adapter, sampler, seq)
        except Refused as error:
            return Kind.FAILED, error_body(str(error), error.category)
        except ProcessDied:
            raise
        except DataError as error:
            return Kind.FAILED, error_body(said(error), "user")
        except NotImplementedError as error:  # of an engine that cannot score this
            return Kind.FAILED, error_body(str(error), "user")
        except (DeadlineExceeded, AtroposError) as error:
            return Kind.FAILED, error_body(f"{type(error).__name__}: {said(error)}", "server")

    async def _sample(self, request: SampleRequest, adapter: str | None, sampler: Sampler, seq: int) -> bytes:
        seed = derive(0, sampler.id, seq) if request.seed is None else request.seed % SEEDS
        policy = AdapterPolicy(self._engine, adapter, self._tokenizer, SAMPLE_S)
        completions = await policy.complete(request.prompt, request.n, request.sampling, seed, ends=request.ends)
        prompt_logprobs, prompt_top = await self._score_prompt(request, adapter)
        tops: list[TopLogprobs | None] = [None] * len(completions)
        if request.top_sample:
            tops = [*await self._top_of_samples(request, adapter, completions)]
        samples = [
            Sample(one.tokens, one.logprobs, one.finish == "stop", top)
            for one, top in zip(completions, tops, strict=True)
        ]
        return sample_response(samples, prompt_logprobs, prompt_top)

    async def _score_prompt(
        self, request: SampleRequest, adapter: str | None
    ) -> tuple[Floats | None, TopLogprobs | None]:
        """Return the prompt's logprobs, NaN at positions that are not scored, and its likeliest tokens."""
        first = max(1, len(request.prompt) - request.last_n) if request.last_n is not None else 1
        logprobs: Floats | None = None
        if request.prompt_logprobs:
            [scored] = await self._engine.logprobs_with(adapter, [request.prompt], 1.0)
            logprobs = np.array(scored, np.float32)
            logprobs[:first] = np.nan
        if not request.top_prompt:
            return logprobs, None
        [top] = await self._engine.top_logprobs_with(adapter, [request.prompt], request.top_prompt, 1.0)
        return logprobs, dense(top, first, len(request.prompt), request.top_prompt, pad=first)

    async def _top_of_samples(
        self, request: SampleRequest, adapter: str | None, completions: list[Completion]
    ) -> list[TopLogprobs]:
        whole = [np.concatenate([request.prompt, one.tokens]).astype(np.int32) for one in completions]
        temperature = request.sampling.temperature or 1.0
        tops = await self._engine.top_logprobs_with(adapter, whole, request.top_sample, temperature)
        begin = len(request.prompt)
        return [dense(top, begin, len(one), request.top_sample) for top, one in zip(tops, whole, strict=True)]


def dense(top: TopK, begin: int, end: int, k: int, *, pad: int = 0) -> TopLogprobs:
    """Return the likeliest tokens at positions `begin` to `end`, after `pad` positions without any."""
    ids = np.full((pad + end - begin, k), NO_TOKEN, np.int32)
    logprobs = np.full((pad + end - begin, k), NO_LOGPROB, np.float32)
    for row, position in enumerate(range(begin, end), pad):
        here = slice(int(top.offsets[position]), int(top.offsets[position + 1]))
        order = np.argsort(-top.logprobs[here], kind="stable")[:k]
        ids[row, : len(order)] = top.token_ids[here][order]
        logprobs[row, : len(order)] = top.logprobs[here][order]
    return TopLogprobs(ids, logprobs)
