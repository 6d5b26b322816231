"""A model behind an OpenAI-compatible chat URL, in place of engine and tokenizer, for an evaluation: it gets messages and returns a
message.

An environment works with token ids, which such a server does not return. Instead it gets numbers of a table: one for each
rendered part of a conversation, and one for each reply, followed by zeros up to the number of tokens that the server counted.
There are no logprobs, and nothing can be trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from atropos_core.console.waits import waiting
from atropos_core.errors import ApiError, ConfigError, DataError, DeadlineExceeded
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import UNKNOWN_VERSION, Completion, Floats, Message, Sampling, Tokens

OPEN_DEADLINE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0  # before a call is made again
RETRIED = (408, 409, 425, 429)  # and 5xx: the same call may be answered later
KEPT = ("role", "content", "tool_calls", "reasoning_content")


@dataclass(frozen=True)
class _Part:
    """The messages behind one number of the table."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] | None = None


class ChatModel(Engine):
    """Engine and tokenizer in one: `sample` as an engine; `render`, `extend` and `parse` as a tokenizer."""

    outlives_run = True

    def __init__(self, url: str, name: str, *, key_variable: str | None = None, concurrency: int = 32) -> None:
        """`key_variable`: the environment variable with the key, which is never shown. Raises ConfigError if it is not set, or if
        `url` is not a URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--model-url {url!r} is not a URL.", remedy="As http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ConfigError(
                "--model-url has a user's name or password in it.", remedy="Give a key by --key-variable."
            )
        self._key = ""
        if key_variable is not None and not (key := os.environ.get(key_variable, "")):
            raise ConfigError(
                f"--key-variable {key_variable}: this environment variable is not set.",
                remedy=f"export {key_variable}=...",
            )
        if key_variable is not None:
            self._key = key
        httpx = import_httpx("--model-url")
        self.url, self.name = url.rstrip("/").removesuffix("/chat/completions"), name
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        self._failures: tuple[type[Exception], ...] = (httpx.TransportError,)
        self._room = asyncio.Semaphore(concurrency)
        self._parts: list[_Part] = [_Part(())]  # 0 fills replies up
        self._limit = "max_tokens"  # what the server calls the bound on a reply
        self.retries = 0
        self.uncounted = 0  # replies of which the server did not say how many tokens they have

    async def open(self) -> ModelInfo:
        """Make one short call, so that a wrong key, name or address is reported before anything else. Raises ApiError."""
        body = {"model": self.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        try:
            with waiting(f"{self.url} to answer"):
                await self._post(body, OPEN_DEADLINE_S)
        except ApiError as error:
            if "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            await self._post(body, OPEN_DEADLINE_S)
        return ModelInfo(self.name, None, 0, "", self.url, "")

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        parts = [self._part(int(number)) for number in prompt if number]
        messages = _outgoing([message for part in parts for message in part.messages])
        tools = next((part.tools for part in reversed(parts) if part.tools), None)
        bodies = []
        for seed in seeds[:n]:
            body: dict[str, Any] = {
                "model": self.name, "messages": messages, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
                "seed": seed % 2**31,
            }  # fmt: skip
            if sampling.top_p != 1.0:
                body["top_p"] = sampling.top_p
            if sampling.stop:
                body["stop"] = list(sampling.stop)
            if tools:
                body["tools"] = [dict(tool) for tool in tools]
            bodies.append(body)
        answers = await asyncio.gather(*(self._post(body, deadline_s) for body in bodies))
        return [self._completion(answer, sampling) for answer in answers]

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Tokens:
        return self._add(_Part(tuple(messages), tools))

    def extend(
        self, messages: Sequence[Message], history: Tokens, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Tokens:
        return self._add(_Part(tuple(messages), tools))

    def parse(self, ids: Tokens, prompt: Tokens | None = None) -> Message:
        """Return the message. Raises DataError for anything but a reply of this model."""
        messages = self._part(int(ids[0]) if len(ids) else 0).messages
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise DataError("these ids are not a reply of the model behind --model-url.")
        return messages[0]

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    async def close(self) -> None:
        await self._http.aclose()

    def _add(self, part: _Part) -> Tokens:
        self._parts.append(part)
        return np.array([len(self._parts) - 1], np.int32)

    def _part(self, number: int) -> _Part:
        if not 0 <= number < len(self._parts):
            raise DataError(
                f"{number} is not a token of the model behind --model-url, which has none: this environment makes prompts of ids.",
                remedy="Evaluate it on a model directory: --model.",
            )
        return self._parts[number]

    def _completion(self, answer: Mapping[str, Any], sampling: Sampling) -> Completion:
        try:
            choice = answer["choices"][0]
            message = _incoming(choice["message"])
            counted = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(
                f"{self.url} did not answer with a chat completion: {type(error).__name__}: {error}"
            ) from error
        self.uncounted += not counted
        ids = np.zeros(max(counted, 1), np.int32)
        ids[:1] = self._add(_Part((message,)))
        none: Floats = np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), UNKNOWN_VERSION, np.int32)
        finish: Any = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion(ids, none, versions, finish, sampling.temperature)

    async def _post(self, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Post and return the answer. Calls that may succeed later are repeated until the deadline. Raises DeadlineExceeded with the
        last reason, ApiError at once for any other refusal."""
        until, pause, reason = monotonic() + deadline_s, FIRST_PAUSE_S, "it gave no answer"
        if self._limit != "max_tokens":
            body = {(self._limit if name == "max_tokens" else name): value for name, value in body.items()}
        while (left := until - monotonic()) > 0:
            wait_s = 0.0
            try:
                async with asyncio.timeout(left), self._room:
                    answer = await self._http.post(f"{self.url}/chat/completions", json=body)
            except TimeoutError:
                break
            except self._failures as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    return self._json(answer)
                reason = f"{answer.status_code}: {self._without_key(answer.text[:300])}"
                if answer.status_code not in RETRIED and answer.status_code < 500:
                    raise ApiError(f"{self.url} refused a call with {reason}", remedy=_remedy(answer.status_code))
                wait_s = _retry_after(answer.headers.get("retry-after"))
            self.retries += 1
            await asyncio.sleep(min(max(wait_s, pause * (0.5 + random.random())), max(until - monotonic(), 0.0)))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise DeadlineExceeded(f"{self.url} answered no call within {deadline_s:g} s; the last reason: {reason}")

    def _json(self, answer: Any) -> dict[str, Any]:
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ApiError(
                f"{self.url} answered with what is no JSON object: {self._without_key(answer.text[:200])!r}",
                remedy="The URL ends in /v1 with most servers.",
            )
        return found

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "...") if self._key else text


def _outgoing(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages for OpenAI's API: arguments of calls as text, each call with an id that its answer names, and no reasoning,
    which the API does not accept."""
    made: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for at, message in enumerate(messages):
        one = {name: value for name, value in message.items() if name != "reasoning_content"}
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [
                {
                    "id": f"call_{at}_{number}", "type": "function", **call,
                    "function": {**call["function"], "arguments": _as_text(call["function"].get("arguments"))},
                }
                for number, call in enumerate(calls)
            ]  # fmt: skip
            unanswered = [call["id"] for call in one["tool_calls"]]
        elif message.get("role") == "tool" and unanswered:
            one.setdefault("tool_call_id", unanswered[0])
            unanswered = [call for call in unanswered if call != one["tool_call_id"]]
        made.append(one)
    return made


def _incoming(said: Mapping[str, Any]) -> Message:
    """Convert a reply as a local one is parsed: arguments as objects. A call that cannot be parsed is text after the content."""
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    message = {"role": "assistant", "content": said.get("content") or "", "reasoning_content": reasoning}
    if not isinstance(message["content"], str):
        raise TypeError(f"its content is a {type(message['content']).__name__}, and no text")
    if calls := said.get("tool_calls"):
        given = [(call, _as_object(call["function"].get("arguments"))) for call in calls]
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call, arguments in given
            if arguments is not None
        ] or None
        unread = [_as_said(call["function"]) for call, arguments in given if arguments is None]
        message["content"] = "\n".join([*([message["content"]] if message["content"] else []), *unread])
    return {name: message[name] for name in KEPT if message.get(name) is not None}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)


def _as_object(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments as a dict, or None if they are not one: broken JSON, a list, a number."""
    if arguments is None or arguments == "":
        return {}  # how some servers write that there are none
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _as_said(function: Mapping[str, Any]) -> str:
    """Return a call as a model writes it, whatever its arguments are."""
    return f'<tool_call>{{"name": {json.dumps(function.get("name"))}, "arguments": {_as_text(function.get("arguments"))}}}</tool_call>'


def _retry_after(value: str | None) -> float:
    """Return the seconds; the other form, a date, is ignored."""
    try:
        return max(float(value or 0.0), 0.0)
    except ValueError:
        return 0.0


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Name the environment variable that holds the key: --key-variable NAME"
    if status == 404:
        return "See that --model-url ends as the server wants it (most in /v1), and that it has a model named as --model-name."
    return ""


def import_httpx(feature: str) -> Any:
    """Import httpx, an optional dependency of core. Raises ConfigError that says how to install it."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            f"{feature} needs the module 'httpx', which is not installed.", remedy="pip install 'atropos-core[api]'"
        ) from error
    return httpx
