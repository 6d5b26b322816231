"""The engine: each continuation is one request to vLLM's `/inference/v1/generate`, token ids in, token ids out.

vLLM reports every token's version (`weight_versions`), and every request's `cache_salt` is the version that it begins under. While paused,
new requests wait here, so that none begins under another version than its salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from atropos_core.console.waits import waiting
from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, FitError, ProcessDied, WeightsMismatch
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_core.types import Completion, Floats, Metrics, Sampling, Tokens, TopK, tokens
from atropos_engine_vllm import generate, model
from atropos_engine_vllm.adapters import Adapters, Loaded
from atropos_engine_vllm.api import Api, Refused
from atropos_engine_vllm.attach import check_attached
from atropos_engine_vllm.command import SERVED, announced_adapters, named_adapters
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.differing import refuse_adapted_experts, refuse_differing
from atropos_engine_vllm.managed_server import ManagedServer
from atropos_engine_vllm.named_adapters import NamedAdapters
from atropos_engine_vllm.reload import METHOD
from atropos_engine_vllm.router_replay import check_replay, records_experts
from atropos_engine_vllm.speculation import DraftCounts, check_numba, check_request, check_speculation, has_numba
from atropos_engine_vllm.speculation_worker import OPEN
from atropos_engine_vllm.versions import check_installed, installed

T = TypeVar("T")

POLL_S = 0.2
DYING_S = 5.0  # from its first sign to the end of all processes
DRAIN_S = 600.0  # for requests to end with the adapter that they began with
WEIGHTS_S = 1200.0  # for reading a model directory
CACHE_S = 120.0  # for freeing the memory of a GPU, or taking it again
SCORED_AT_ONCE = 32  # sequences
STAGES: Mapping[str, str] = {
    "init": "/init_weight_transfer_engine",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
}


class VLLMEngine(Engine):
    """Samples from a vLLM server. It is the `WeightServer` that a bridge's agent finds."""

    def __init__(self, options: VLLMOptions, context: RunContext) -> None:
        if context.deterministic and context.transport is not None:
            raise FitError(
                "deterministic = true, but vLLM forms its batches by the arrival time of requests, and the batch that a request"
                " shares shifts logprobs by 1e-5.",
                remedy="Use `--engine hf` for a deterministic run.",
            )
        if options.url is None:
            check_installed(context.devices[0], installed())
        if options.speculation is not None:
            check_numba(has_numba())
        check_replay(options, context)
        check_speculation(options, context)
        self.version = 0
        self.worker_devices = context.devices
        self._adapter: Path | None = None  # the model to open, if it is an adapter over a base
        if named_adapters(context):
            self._check_named(options, context)
        if adapter := model.adapter_config(context.model):
            self._adapter = context.model
            base = Path(adapter["base_model_name_or_path"])
            announced = {"lora": {"rank": adapter["r"]}}
            context = dataclasses.replace(context, model=base, transport="adapter", announced=announced)
        self._options = options
        self._context = context
        self._server: ManagedServer | None = None
        self._api: Api | None = None
        self._adapters: Adapters | None = None
        self._named: NamedAdapters | None = None
        self._resumes = False  # True for a server that is not ours, once we have paused it
        self._running = asyncio.Event()  # cleared while paused
        self._weights = asyncio.Lock()  # locked while paused, and by a rescoring
        self._turn = asyncio.Lock()  # one pause or resume at a time
        self._cache = asyncio.Lock()  # one release or return of the KV cache at a time
        self._released = False  # True while the KV cache is freed
        self._computing = 0  # requests that need the KV cache
        self._config = model.read_config(context.model)
        self._stops = model.ends_of(context.model, self._config)
        self._served = SERVED
        self._speculates = options.speculation is not None
        self._drafts = DraftCounts()

    @staticmethod
    def _check_named(options: VLLMOptions, context: RunContext) -> None:
        """A run checks these before it starts an engine; named adapters come without one."""
        if model.adapter_config(context.model):
            raise FitError(
                f"engine 'vllm' is to open the adapter {context.model}, and adds no adapters over it.",
                remedy="Open its base model, and add both as named adapters.",
            )
        if options.url is None:
            refuse_differing(context.model, context.devices[0])
        refuse_adapted_experts(options, context)

    async def open(self) -> ModelInfo:
        """Raises ConfigError or FitError for impossible options, ProcessDied or DeadlineExceeded if no server comes up."""
        options, context = self._options, self._context
        on_cpu = context.devices[0] == "cpu"
        dtype, slots = model.dtype(self._config, options.dtype, on_cpu), options.lora_slots(named_adapters(context))
        most_rank, raise_rank = options.max_lora_rank, "Raise engine.max_lora_rank."
        try:
            if options.url is None:
                self._server = ManagedServer.start(options, context, dtype)
                server = self._server
                self._api = Api(server.url, server.key, self._lost, server.is_dying, patience=context.patience)
                with waiting(
                    f"its vLLM server to come up ({options.start_timeout_s:g} s at most; its log is {server.log})"
                ):
                    await self._until_up(server)
            else:
                key = os.environ.get("VLLM_API_KEY")
                self._api = Api(options.url, key, self._lost, patience=context.patience)
                found = await check_attached(self._api, context, self._config)
                dtype, self._served, slots = found.dtype, found.served, found.lora_slots
                most_rank, raise_rank = found.lora_rank, "Start the server with a higher --max-lora-rank."
                self._speculates = found.speculates
                self._resumes = True
                await self._api.post("/pause?mode=keep&clear_cache=true")
                await self.load_weights(context.model)  # another run may have left other weights there
                await self._api.post("/resume")
            self._longest = int((await self._names())[self._served]["max_model_len"])
            self._vocabulary = int(model.text_config(self._config)["vocab_size"])
            await self._api.post("/update_weight_version", {"new_version": str(self.version)})
            if self._speculates:
                await self._api.post("/collective_rpc", {"method": OPEN})
            with waiting("vLLM to sample a first token"):
                await self._warm_up()
            self._adapters = Adapters(self._api, slots, drain_s=DRAIN_S, taken=await self._names())
            if named_adapters(context):
                self._named = NamedAdapters(self._api, self._adapters, context.model, most_rank, raise_rank)
                await self._named.open()
        except BaseException as error:
            try:
                await self.close()
            except AtroposError as later:  # a failed server may refuse to continue as well: the first error says why
                error.add_note(f"Nor could the engine be closed: {later}")
            raise
        self._running.set()
        if self._adapter is not None:
            await self.load_adapter(self._adapter, self.version)
        return ModelInfo(
            architecture=str(self._config["architectures"][0]),
            parameters=model.parameters(context.model, self._config),
            vocabulary=self._vocabulary,
            dtype=dtype,
            device="cpu" if on_cpu else ", ".join(context.devices),
            tokenizer=fingerprint(context.model),
            threads=(context.threads or 0) if on_cpu else 0,
        )

    async def _warm_up(self) -> None:
        """Sample a token, greedily and not, so that unsupported features and compilation show before the run begins."""
        last, deadline_s = tokens([self._vocabulary - 1]), self._options.start_timeout_s
        bodies = [
            generate.request(last, Sampling(1, temperature), 0, self._stops, "warm-up", self._vocabulary)
            | {"model": self._served}
            for temperature in (0.0, 1.0)
        ]
        try:
            await asyncio.gather(*(self._opened.post(generate.PATH, body, deadline_s=deadline_s) for body in bodies))
        except DataError as error:
            raise FitError(
                f"the vLLM server at {self._opened.url} refuses the last of this model's {self._vocabulary} token"
                f" ids: {error}",
                remedy="Start it with the model that the run trains.",
            ) from error

    # -- sampling

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await self._sample(lambda adapters: adapters.current, prompt, n, sampling, seeds, deadline_s)

    async def _sample(
        self,
        choose: Callable[[Adapters], Loaded | None],
        prompt: Tokens,
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        generate.check(prompt, n, sampling, seeds, self._vocabulary, self._longest)
        if self._speculates:
            check_request(sampling)
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._continue(choose, prompt, sampling, int(seed), deadline_s))
                    for seed in seeds[:n]
                ]
        except TimeoutError:
            done = sum(task.done() and not task.cancelled() for task in tasks)
            state = "running" if self._running.is_set() else "paused"
            raise DeadlineExceeded(
                f"engine 'vllm' has sampled {done} of {n} continuations within {deadline_s:g} s (it is {state})"
            ) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _continue(
        self,
        choose: Callable[[Adapters], Loaded | None],
        prompt: Tokens,
        sampling: Sampling,
        seed: int,
        deadline_s: float,
    ) -> Completion:
        await self._running.wait()
        assert self._adapters is not None, "open() has made it before it lets anything run"
        async with self._adapters.using(choose(self._adapters)) as adapter, self._with_cache():
            await self._running.wait()  # a pause may have come before the cache was there
            body = generate.request(prompt, sampling, seed, self._stops, self._salt(adapter), self._vocabulary)
            body["model"] = adapter.name if adapter else self._served
            answer = await self._opened.post(generate.PATH, body, deadline_s=deadline_s)
        routed_after = len(prompt) if records_experts(self._context) else None
        return generate.completion(answer, sampling, adapter.version if adapter else None, routed_after=routed_after)

    def _salt(self, adapter: Loaded | None) -> str:
        """Requests share cached prefixes only under the same weights."""
        if adapter is not None and adapter.version is None:
            return adapter.name
        return f"v{self.version if adapter is None else adapter.version}"

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Score all under one version of the weights: a `pause` waits for it. Temperature 0 counts as 1, as in sampling.
        Raises NotImplementedError for any other: vLLM scores a prompt by the model's own distribution."""
        self._check_unadapted()
        return await self._scored(None, sequences, temperature, 0, generate.scores)

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """Like `logprobs`, with the same NotImplementedError. A server gives at most 20, unless `extra_args` has a higher
        --max-logprobs."""
        self._check_unadapted()
        return await self._scored(None, sequences, temperature, k, lambda answer, _: generate.top_logprobs(answer, k))

    def _check_unadapted(self) -> None:
        if announced_adapters(self._context):
            raise NotImplementedError(
                "engine 'vllm' does not score prompts with adapters (vLLM's CPU kernels fail): have the trainer score it"
            )

    async def _scored(
        self,
        adapter: Loaded | None,
        sequences: Sequence[Tokens],
        temperature: float,
        likeliest: int,
        read: Callable[[Mapping[str, Any], Tokens], T],
    ) -> list[T]:
        if temperature not in (0.0, 1.0):
            raise NotImplementedError(
                f"vLLM scores given tokens only at temperature 1, but {temperature:g} was requested: sample at temperature 1, or have"
                " the trainer score it"
            )
        if any(len(sequence) >= self._longest for sequence in sequences):
            raise NotImplementedError(
                f"vLLM scores prompts of up to {self._longest - 1} tokens here (it samples one more token after each)"
            )
        assert self._adapters is not None, "open() has made it before it lets anything run"
        async with self._adapters.using(adapter), self._weights, self._with_cache():
            limit = asyncio.Semaphore(SCORED_AT_ONCE)

            async def score(sequence: Tokens) -> T:
                if len(sequence) < 2:
                    return read({"prompt_logprobs": [None] * len(sequence)}, sequence)
                async with limit:
                    body = generate.scoring_request(sequence, self._salt(adapter), likeliest)
                    body["model"] = adapter.name if adapter else self._served
                    return read(await self._opened.post(generate.PATH, body, deadline_s=WEIGHTS_S), sequence)

            return list(await asyncio.gather(*(score(sequence) for sequence in sequences)))

    # -- weights

    async def pause(self) -> None:
        async with self._turn:
            if not self._running.is_set():
                return
            await self._weights.acquire()
            self._running.clear()
            self._opened.watch.excused = {generate.PATH}
            # "keep" freezes what is in flight; the caches are cleared, so that it is prefilled again under new weights.
            await self._opened.post("/pause?mode=keep&clear_cache=true")

    async def resume(self, version: int) -> None:
        async with self._turn:
            await self._opened.post("/update_weight_version", {"new_version": str(version)})
            self.version = version
            if not self._running.is_set():
                await self._opened.post("/resume")
                self._opened.watch.excused = ()
                self._running.set()
                self._weights.release()

    async def load_weights(self, directory: Path) -> None:
        """Raises WeightsMismatch if vLLM cannot load them: its weights are then unknown, and the engine stays paused."""
        if self._running.is_set():
            raise AtroposError("engine 'vllm' loads weights only while it is paused")
        model.read_config(directory)
        body = {"method": METHOD, "args": [str(directory.resolve())]}
        try:
            await self._opened.post("/collective_rpc", body, deadline_s=WEIGHTS_S, may_fail=True)
        except (DataError, Refused) as error:
            raise WeightsMismatch(
                f"vLLM cannot load the weights in {directory}: {error}\n{self._tail()}".rstrip()
            ) from error

    async def load_adapter(self, directory: Path, version: int) -> None:
        if self._adapters is None:
            raise AtroposError("engine 'vllm' is not open: call open() first")
        await self._adapters.load(directory, version)
        self.version = version

    # -- named adapters

    async def add_adapter(self, directory: Path, name: str) -> None:
        """Raises DataError if the name is taken, if the directory has no adapter of this model, or if vLLM cannot apply all of it."""
        await self._named_adapters.add(directory, name)

    async def remove_adapter(self, name: str) -> None:
        await self._named_adapters.remove(name)

    async def sample_with(
        self,
        name: str | None,
        prompt: Tokens,
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        adapter = self._named_adapters.of(name)
        async with self._named_adapters.using(adapter):
            return await self._sample(lambda _: adapter, prompt, n, sampling, seeds, deadline_s)

    async def logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], temperature: float = 1.0
    ) -> list[Floats]:
        """Raises NotImplementedError as `logprobs` does."""
        adapter = self._named_adapters.of(name, scores=True)
        return await self._scored(adapter, sequences, temperature, 0, generate.scores)

    async def top_logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], k: int, temperature: float = 1.0
    ) -> list[TopK]:
        """Raises NotImplementedError as `logprobs` does."""
        adapter = self._named_adapters.of(name, scores=True)
        k = min(k, self._vocabulary)
        return await self._scored(
            adapter, sequences, temperature, k, lambda answer, _: generate.top_logprobs(answer, k)
        )

    @property
    def _named_adapters(self) -> NamedAdapters:
        if self._named is None:
            raise NotImplementedError(
                "this engine was started without room for named adapters: only `atropos tinker` announces them"
            )
        return self._named

    async def transfer_weights(
        self, stage: Literal["init", "start", "update", "finish"], info: Mapping[str, Any], deadline_s: float
    ) -> None:
        body = {"init": {"init_info": dict(info)}, "update": {"update_info": dict(info)}}.get(stage)
        try:
            await self._opened.post(STAGES[stage], body, deadline_s=deadline_s)
        except (DataError, Refused) as error:
            raise WeightsMismatch(f"weight transfer, stage {stage!r}: {error}\n{self._tail()}".rstrip()) from error

    # -- the KV cache

    async def release_cache(self) -> None:
        """Free the KV cache; does nothing without `enable_sleep_mode` or while something is computed. The server stays paused until
        the first request takes the memory again."""
        if not self._options.enable_sleep_mode or self._computing or self._released:
            return
        self._released = True
        async with self._cache:
            # Requests in flight were aborted here, and no caller waits for them.
            await self._opened.post("/pause?mode=abort&clear_cache=true")
            await self._opened.post("/release_kv_cache_memory", deadline_s=CACHE_S, may_fail=True)

    @contextlib.asynccontextmanager
    async def _with_cache(self) -> AsyncIterator[None]:
        """Take the KV cache's memory for the block."""
        self._computing += 1
        try:
            if self._released:
                async with self._cache:
                    if self._released:
                        await self._opened.post(
                            "/wake_up", deadline_s=CACHE_S, may_fail=True
                        )  # its scheduler continues
                        self._released = False
            yield
        finally:
            self._computing -= 1

    async def step_metrics(self) -> Metrics:
        """Return how many proposed tokens were accepted; nothing without `speculation`."""
        if self._options.speculation is None:
            return {}
        return self._drafts.since_last(await self._opened.get("/metrics"))

    async def close(self) -> None:
        api, self._api = self._api, None
        server, self._server = self._server, None
        adapters, self._adapters = self._adapters, None
        # Closed in reverse order of naming, each even if an earlier one fails.
        async with contextlib.AsyncExitStack() as ending:
            if server is not None:
                ending.push_async_callback(server.close)
            if api is not None:
                ending.push_async_callback(api.close)
                if self._resumes:
                    ending.push_async_callback(api.post, "/resume")
            if adapters is not None:
                await adapters.close(unload=server is None)

    # -- the server

    @property
    def _opened(self) -> Api:
        if self._api is None:
            raise AtroposError("engine 'vllm' is not open: call open() first")
        return self._api

    async def _until_up(self, server: ManagedServer) -> None:
        until = asyncio.get_running_loop().time() + self._options.start_timeout_s
        while not await self._opened.answers():
            if server.ended.is_set():
                raise server.explain()
            if asyncio.get_running_loop().time() > until:
                raise DeadlineExceeded(
                    f"the vLLM server did not come up within start_timeout_s = {self._options.start_timeout_s:g}.\n"
                    f"{server.tail()}".rstrip(),
                    remedy=f"Its log is {server.log}",
                )
            await asyncio.sleep(POLL_S)
        server.watch(self._end_with_server)

    def _end_with_server(self, error: ProcessDied) -> None:
        """An engine without its server ends too: the supervisor sees that at once, without any request."""
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - into this process's log, whose end the supervisor shows
        os._exit(1)

    async def _lost(self, what: str) -> AtroposError:
        server = self._server
        if self._api is None:
            return ProcessDied(f"engine 'vllm' was closed during a request ({what}).")
        if server is None:
            return ProcessDied(f"the vLLM server at {self._options.url} does not answer ({what}).")
        with contextlib.suppress(TimeoutError):  # its guard, and with it this process, ends as soon as it is lost
            await asyncio.wait_for(server.ended.wait(), DYING_S)
            return server.explain()
        return ProcessDied(f"the vLLM server does not answer ({what}).\n{server.tail()}".rstrip())

    def _tail(self) -> str:
        return self._server.tail() if self._server is not None else ""

    async def _names(self) -> dict[str, dict[str, Any]]:
        """The models and adapters that it serves, by name."""
        return {card["id"]: card for card in (await self._opened.get("/v1/models"))["data"]}
