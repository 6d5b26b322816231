"""SkyRL's inference engines as an Atropos engine: prompt ids in; sampled ids, logprobs and the policy version out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import Completion, Sampling, Tokens, tokens

_OURS = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
_HARMLESS = {"stop": None, "repetition_penalty": 1.0}  # values that leave the distribution unchanged


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """Convert SkyRL's sampling parameters to a Sampling."""
    try:
        return Sampling(
            int(params["max_tokens"]),
            float(params.get("temperature", 1.0)),
            float(params.get("top_p", 1.0)),
            max(int(params.get("top_k", 0)), 0),
            min_p=float(params.get("min_p", 0.0)),
        )
    except KeyError as error:
        raise ConfigError(f"SkyRL's sampling parameters have no {error}: {dict(params)}") from None


def refuse_more(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for sampling parameters that Atropos engines, behind the API or a ring, do not support."""
    for name, harmless in _HARMLESS.items():
        if params.get(name, harmless) != harmless:
            raise ConfigError(
                f"generator.sampling_params.{name} = {params[name]!r} has no effect: it reaches only SkyRL's own engines, "
                "but Atropos engines sample these trajectories.",
                remedy=f"Leave it at {harmless!r}, or use atropos.source=here.",
            )


_session: ContextVar[tuple[SkyRLEngine, str]] = ContextVar("atropos_skyrl_session")  # of the rollout that this task is


class SkyRLEngine(Engine):
    """SkyRL's engines for one group of one generate() call.

    The call's sampling parameters apply unless the environment sets its own. Each rollout is a session of SkyRL's router, so
    that all its turns use the same prefix cache; `finish` ends the sessions."""

    _numbers = itertools.count()

    def __init__(
        self, client: Any, params: Mapping[str, Any], version: Callable[[], int], model: str | None = None,
        salt: str | None = None,
    ) -> None:  # fmt: skip
        self._client = client  # an InferenceEngineInterface of SkyRL
        self._model = model  # the name that the client knows the policy by, which with LoRA is the adapter's
        self._salt = salt  # of the engine's prefix cache, so that rollouts do not use entries of older weights
        self._sessions: list[str] = []
        self._params = dict(params)
        self._version = version

    async def open(self) -> ModelInfo:
        raise NotImplementedError("SkyRL opens its engines itself")

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        session = self._session()
        return list(await asyncio.gather(*(self._one(prompt.tolist(), sampling, seed, session) for seed in seeds)))

    def _session(self) -> str:
        engine, session = _session.get((None, ""))
        if engine is not self:
            session = f"atropos-{next(self._numbers)}"
            self._sessions.append(session)
            _session.set((self, session))
        return session

    async def finish(self) -> None:
        """End the sessions of the finished rollouts. SkyRL's client never raises here."""
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(self._client.finish_session(session) for session in sessions))

    async def _one(self, prompt: list[int], sampling: Sampling, seed: int, session: str) -> Completion:
        params = self._params | {name: getattr(sampling, name) for name in _OURS}
        params |= {"top_k": sampling.top_k or -1, "logprobs": self._params.get("logprobs") or 1, "seed": seed}
        version = self._version()  # read first: it may become too old, but is never too new
        if sampling.stop_ids:
            params["stop_token_ids"] = [*(params.get("stop_token_ids") or ()), *sampling.stop_ids]
        request = {"prompt_token_ids": [prompt], "sampling_params": params, "session_ids": [session]}
        if self._salt is not None:
            request["cache_salt"] = self._salt
        reply = await self._client.generate(request, model=self._model)
        ids, finish = reply["response_ids"][0], reply["stop_reasons"][0]
        logprobs = (reply.get("response_logprobs") or [None])[0]
        if finish not in ("stop", "length"):
            raise DataError(f"SkyRL's engine ended a sample with {finish!r}")
        if not ids or logprobs is None or len(logprobs) != len(ids):
            known = "no logprobs" if logprobs is None else f"{len(logprobs)} logprobs"
            raise DataError(f"SkyRL's engine gave {len(ids)} tokens and {known}")
        return Completion(
            tokens(ids), np.asarray(logprobs, np.float32), np.full(len(ids), version, np.int32), finish,
            sampling.temperature, sampling.truncated,
        )  # fmt: skip

    async def pause(self) -> None:
        raise NotImplementedError("SkyRL pauses its engines itself")

    async def resume(self, version: int) -> None:
        raise NotImplementedError("SkyRL resumes its engines itself")
