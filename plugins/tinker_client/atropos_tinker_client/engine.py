"""The engine `tinker`: samples from the weights that a Tinker server has saved for sampling.

Published weights never change. Requests in flight end with the weights and the version that they began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded
from atropos_core.group_schema import check_sampling
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import Completion, Floats, Sampling, Tokens
from atropos_tinker_client.service import OPEN_S, WORK_S, Service, answer, described
from atropos_tinker_client.stop_ids import stop_ids

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_tinker_client.config import TinkerEngineOptions

SEEDS = 2**63


class TinkerEngine(Engine):
    """A bridge's extension calls `sample_from`."""

    def __init__(self, options: TinkerEngineOptions, context: RunContext) -> None:
        self.version = 0
        self._options = options
        self._context = context
        self._service: Service | None = None
        self._client: Any = None  # tinker.SamplingClient, Any because the package is optional
        self._dtype = str(context.announced.get("tinker/dtype", "bfloat16"))
        self._running = asyncio.Event()
        self._at_once = asyncio.Semaphore(options.concurrency)

    async def open(self) -> ModelInfo:
        """Begin a session, and sample from the base model until weights are published."""
        self._service = await Service.open("engine")
        self._stops = stop_ids(self._context.model)
        base = self._service.model(self._options.base_model, "engine")
        self._client = await answer(
            "a sampling client", self._service.session.create_sampling_client(base_model=base), OPEN_S
        )
        self._running.set()
        return described(self._context.model, self._dtype)

    async def sample_from(self, path: str, version: int) -> None:
        """Sample new requests from the weights that the server has saved under this path, and mark their tokens with `version`."""
        client = await answer(
            f"the weights {path}", self._open_service.session.create_sampling_client(model_path=path), OPEN_S
        )
        self._client, self.version = client, version

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        check_sampling(sampling)
        if not len(prompt):
            raise DataError("a prompt has no tokens: there is nothing to continue")
        if len(seeds) < n:
            raise DataError(f"{n} continuations were requested with {len(seeds)} seeds: each needs its own")
        if sampling.min_p:
            raise DataError("a Tinker server knows no min_p.", remedy="Set min_p = 0.")
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._continue(prompt, sampling, int(seed))) for seed in seeds[:n]]
        except TimeoutError:
            done = sum(task.done() and not task.cancelled() for task in tasks)
            raise DeadlineExceeded(
                f"engine 'tinker' has sampled {done} of {n} continuations within {deadline_s:g} s"
            ) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        if temperature not in (0.0, 1.0):
            raise NotImplementedError(
                f"a Tinker server scores at temperature 1, and logprobs at temperature {temperature:g} were requested"
            )
        return list(await asyncio.gather(*(self._score(sequence) for sequence in sequences)))

    async def pause(self) -> None:
        """Begin no request until `resume`. The server's weights do not change, so those in flight may end."""
        self._running.clear()

    async def resume(self, version: int) -> None:
        self.version = version
        self._running.set()

    async def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            await service.close()

    @property
    def _open_service(self) -> Service:
        if self._service is None:
            raise AtroposError("engine 'tinker' is not open: call open() first")
        return self._service

    async def _continue(self, prompt: Tokens, sampling: Sampling, seed: int) -> Completion:
        import tinker

        parameters = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=seed % SEEDS,
            stop=[*self._stops, *sampling.stop_ids],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
        )
        await self._running.wait()
        async with self._at_once:
            client, version = self._client, self.version
            request = client.sample(tinker.ModelInput.from_ints(prompt.tolist()), 1, parameters)
            (made,) = (await answer("a sample", request, WORK_S)).sequences
        tokens, logprobs = np.asarray(made.tokens, np.int32), np.asarray(made.logprobs, np.float32)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            policy_version=np.full(len(tokens), version, np.int32),
            finish="stop" if made.stop_reason == "stop" else "length",
            temperature=sampling.temperature,
            truncated=sampling.truncated,
        )

    async def _score(self, sequence: Tokens) -> Floats:
        import tinker

        if len(sequence) < 2:
            return np.zeros(len(sequence), np.float32)
        async with self._at_once:
            prompt = tinker.ModelInput.from_ints(sequence.tolist())
            found = await answer("logprobs", self._client.compute_logprobs(prompt), WORK_S)
        return np.array([0.0, *found[1:]], np.float32)
