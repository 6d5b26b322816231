"""A teacher behind an OpenAI-compatible server: `prompt_logprobs` of its completions, for prompts of token ids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_chat_client.client import CallFailed, ChatClient
from atropos_chat_client.retries import repeat
from atropos_core.console.waits import waiting
from atropos_core.errors import AccessRefused, ApiError, DataError, RemoteError
from atropos_core.guards.patience import Patience
from atropos_core.types import Tokens, TopK, offsets_of
from atropos_distillation.config import TeacherOptions
from atropos_server_watch.watch import ServerWatch

AT_ONCE = 8  # requests on their way
REQUEST_S = 120.0  # one that is late while others are answered is lost, and sent again
TRIES = 5
PAUSE_S = 0.5  # before the second try; doubled before each further one


class ServerSource:
    """`{url}/completions` of a server such as vLLM's. Scores at temperature 1."""

    remedy = "Name {label}.model and its engine in place of url"

    def __init__(self, options: TeacherOptions, patience: Patience) -> None:
        assert options.url is not None, "this source is for those with a url"
        self._model = options.served_model or ""
        self._answers_as = ""  # the model that its first answer named
        self._key_variable = options.key_variable
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._url = options.url.rstrip("/")
        watch = ServerWatch(f"the teacher's server {self._url}", patience, needed=True)
        self._client = ChatClient(
            self._url, os.environ.get(options.key_variable, ""), timeout_s=REQUEST_S, watched=watch.call
        )

    async def open(self) -> None:
        """Raises ApiError if the server does not answer, AccessRefused, DataError if it does not have the model."""
        with waiting(f"the teacher's server at {self._url}"):
            found = await self._ask("/models")
        names = [str(card["id"]) for card in found.get("data", ())]
        if not names or (self._model and self._model not in names):
            raise DataError(f"{self._url} serves {', '.join(names) or 'no model'}, and not {self._model!r}.")
        self._model = self._model or names[0]

    async def score(self, sequences: Sequence[Tokens], k: int, temperature: float) -> list[TopK]:
        if temperature != 1.0:
            raise NotImplementedError(
                f"a server scores a prompt only at temperature 1, but {temperature:g} was requested"
            )
        return list(await asyncio.gather(*(self._one(sequence, k) for sequence in sequences)))

    async def release_cache(self) -> None:
        """Do nothing: the run does not own the server."""

    async def _one(self, sequence: Tokens, k: int) -> TopK:
        if len(sequence) < 2:
            return top_k_of([None] * len(sequence), sequence, k)
        body = {
            "model": self._model, "prompt": sequence.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k,
        }  # fmt: skip
        async with self._limit:
            answer = await self._ask("/completions", body)
        self._answers_as = self._answers_as or str(answer.get("model", ""))
        if (token_entry := str(answer.get("model", ""))) != self._answers_as:
            raise DataError(
                f"the teacher at {self._url} answers as {token_entry!r}, and answered as {self._answers_as!r} before: another model is "
                "there now.",
                remedy="Put the former one back, and go on from the last checkpoint: `atropos resume`.",
            )
        choices = answer.get("choices") or [{}]
        entries = choices[0].get("prompt_logprobs")
        if entries is None:
            raise RemoteError(
                f"{self._url} answered without prompt_logprobs.",
                remedy="A teacher's server must give them: vLLM's does.",
            )
        return top_k_of(entries, sequence, k)

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, again if the server is busy or briefly unreachable. Raises ProcessSilent if it never answers."""
        client = self._client
        try:
            return await repeat(
                lambda: client.get(path) if body is None else client.post(path, body), tries=TRIES, pause_s=PAUSE_S
            )
        except CallFailed as failed:
            where = f"{self._url}{path}"
            if failed.is_temporary:
                raise ApiError(
                    f"the teacher's server: {where} did not answer in {TRIES} tries; the last one: {failed}",
                    remedy="Check that the server is running and that the teacher's `url` is right. Then continue the run with "
                    "`atropos resume`.",
                ) from failed
            if failed.status in (401, 403):
                raise AccessRefused(
                    f"{where} refused access with status {failed.status}.",
                    remedy=f"Put its key into the environment variable {self._key_variable}.",
                ) from failed
            if failed.status == 200:
                raise RemoteError(f"{where}: {failed}") from failed
            raise DataError(f"{where} answered with {failed}") from failed

    async def close(self) -> None:
        await self._client.close()


def top_k_of(entries: Sequence[Mapping[str, Any] | None], sequence: Tokens, k: int) -> TopK:
    """Read vLLM's prompt_logprobs: for each position a map from token id to {logprob, rank} that always includes the
    prompt's own token; None for the first position. With k = 0 only that token is taken, else the k likeliest."""
    if len(entries) != len(sequence):
        raise RemoteError(f"a server sent prompt_logprobs of {len(entries)} positions for {len(sequence)} tokens")
    ids: list[int] = []
    logprobs: list[float] = []
    counts = np.zeros(len(sequence), np.int64)
    for at, entry in enumerate(entries):
        if not entry or not at:
            continue
        for token, token_entry in sorted(entry.items(), key=lambda item: -float(item[1]["logprob"])):
            if (int(token) == int(sequence[at])) if k == 0 else int(token_entry["rank"]) <= k:
                ids.append(int(token))
                logprobs.append(float(token_entry["logprob"]))
                counts[at] += 1
    return TopK(offsets_of(counts), np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))
