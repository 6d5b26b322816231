"""Calls of an OpenAI-compatible chat model, with a deadline, retries and a budget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.guards.deadlines import within
from atropos_core.types import Metrics
from atropos_reward_ensemble.config import JudgeOptions

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # a later try may succeed
MAX_WAIT_S = 30.0  # longest wait before a retry, whatever the server asks for


class _Failed(Exception):
    """One try that gave no result."""

    def __init__(self, cause: str, *, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.again, self.after_s = again, after_s


class ChatModel:
    """`read` turns the text of an answer into a number, and raises ValueError if it has none."""

    def __init__(self, options: JudgeOptions, read: Callable[[str], float]) -> None:
        self._options = options
        self._read = read
        self._url = options.url.rstrip("/") + "/chat/completions"
        self._key = os.environ.get(options.key_env, "") if options.key_env else ""
        self._turn = asyncio.Semaphore(options.concurrency)
        self._client: httpx.AsyncClient | None = None
        self._requests = self._tokens = 0  # over the whole run
        self._retries = 0  # since the last metrics()

    async def ask(self, body: Mapping[str, Any]) -> float:
        """Ask until there is a number. Raises DataError after the last try, or at once if the budget is spent or the server refuses."""
        cause = ""
        for attempt in range(self._options.retries + 1):
            async with self._turn:
                self._pay()
                try:
                    return await self._try(body)
                except _Failed as failed:
                    cause, after_s = str(failed), failed.after_s
                    if not failed.again:
                        break
            if attempt < self._options.retries:
                self._retries += 1
                await asyncio.sleep(min(max(self._options.backoff_s * 2**attempt, after_s), MAX_WAIT_S))
        else:
            cause += f" (the last of {self._options.retries + 1} tries)"
        raise DataError(f"{self._url}: {cause}")

    async def _try(self, body: Mapping[str, Any]) -> float:
        if self._client is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = httpx.AsyncClient(headers=headers, timeout=self._options.timeout_s)
        try:
            response = await within(self._client.post(self._url, json=dict(body)), self._options.timeout_s, "the judge")
        except (httpx.TimeoutException, DeadlineExceeded):
            raise _Failed(f"no answer within {self._options.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _Failed(f"it cannot be reached: {type(error).__name__}: {error}") from None
        if response.status_code != 200:
            raise _Failed(
                f"status {response.status_code}: {self._hidden(response.text[:200])}",
                again=response.status_code in AGAIN,
                after_s=_seconds(response.headers.get("retry-after", "")),
            )
        try:
            answer = response.json()
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            self._tokens += int(usage.get("total_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _Failed(f"its answer is not a chat completion: {self._hidden(response.text[:200])!r}") from None
        if self._options.max_total_tokens is not None and not usage.get("total_tokens"):
            raise _Failed("it does not say usage.total_tokens, which max_total_tokens needs", again=False)
        try:
            return self._read(str(text or ""))
        except ValueError as error:
            raise _Failed(self._hidden(str(error))) from None

    def _pay(self) -> None:
        """Called before every request, retries included. Requests in flight may exceed the bound on tokens, not that on requests."""
        options = self._options
        if options.max_requests is not None and self._requests >= options.max_requests:
            raise DataError(f"the judge's budget is spent: max_requests = {options.max_requests:,}")
        if options.max_total_tokens is not None and self._tokens >= options.max_total_tokens:
            raise DataError(
                f"the judge's budget is spent: {self._tokens:,} tokens of max_total_tokens = {options.max_total_tokens:,}"
            )
        self._requests += 1

    def _hidden(self, text: str) -> str:
        """The text without the key: servers repeat the key that they refuse."""
        return text.replace(self._key, "[the key]") if self._key else text

    def metrics(self) -> Metrics:
        counts = {"requests": float(self._requests), "tokens": float(self._tokens), "retries": float(self._retries)}
        self._retries = 0
        return counts

    def state(self) -> dict[str, Any]:
        return {"requests": self._requests, "tokens": self._tokens}

    def load(self, state: Mapping[str, Any]) -> None:
        self._requests, self._tokens = int(state["requests"]), int(state["tokens"])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _seconds(text: str) -> float:
    """The seconds of a Retry-After header; dates are not supported."""
    try:
        return max(float(text), 0.0)
    except ValueError:
        return 0.0
