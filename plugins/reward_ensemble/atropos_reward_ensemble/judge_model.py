"""Calls of the judge's model, with retries and a budget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from atropos_chat_client.client import CallFailed, ChatClient
from atropos_chat_client.retries import repeat
from atropos_core.errors import DataError
from atropos_core.types import Metrics
from atropos_reward_ensemble.config import JudgeOptions


class JudgeModel:
    """`read` turns the text of an answer into a number, and raises ValueError if it has none."""

    def __init__(self, options: JudgeOptions, read: Callable[[str], float]) -> None:
        self._options = options
        self._read = read
        self._turn = asyncio.Semaphore(options.concurrency)
        key = os.environ.get(options.key_env, "") if options.key_env else ""
        self._client = ChatClient(options.url, key, timeout_s=options.timeout_s)
        self._requests = self._tokens = 0  # over the whole run
        self._retries = 0  # since the last metrics()

    async def ask(self, body: Mapping[str, Any]) -> float:
        """Ask until there is a number. Raises DataError after the last try, or at once if the budget is spent or the server refuses."""
        tries, made = self._options.retries + 1, 0

        async def ask_once() -> float:
            nonlocal made
            async with self._turn:
                self._pay()
                self._retries += made > 0
                made += 1
                return await self._number(body)

        try:
            return await repeat(ask_once, tries=tries, pause_s=self._options.backoff_s)
        except CallFailed as failed:
            last = f" (the last of {tries} tries)" if failed.is_temporary else ""
            raise DataError(f"{self._client.url}: {failed}{last}") from failed

    async def _number(self, body: Mapping[str, Any]) -> float:
        """Return the number in the answer to one request. An answer without one may be followed by a better one."""
        try:
            answer = await self._client.post("/chat/completions", body)
            text = self._client.reply_text(answer)
            used = int((answer.get("usage") or {}).get("total_tokens") or 0)
            self._tokens += used
            if self._options.max_total_tokens is not None and not used:
                raise DataError(f"{self._client.url}: it does not say usage.total_tokens, which max_total_tokens needs")
            return self._read(text)
        except CallFailed as failed:
            failed.is_temporary = failed.is_temporary or failed.status == 200
            raise
        except (ValueError, TypeError, AttributeError) as error:
            unusable = CallFailed(self._client.without_key(str(error)), status=200)
            unusable.is_temporary = True
            raise unusable from error

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

    def metrics(self) -> Metrics:
        counts = {"requests": float(self._requests), "tokens": float(self._tokens), "retries": float(self._retries)}
        self._retries = 0
        return counts

    def state(self) -> dict[str, Any]:
        return {"requests": self._requests, "tokens": self._tokens}

    def load(self, state: Mapping[str, Any]) -> None:
        self._requests, self._tokens = int(state["requests"]), int(state["tokens"])

    async def close(self) -> None:
        await self._client.close()
