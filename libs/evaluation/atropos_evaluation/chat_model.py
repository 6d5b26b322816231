"""A model behind an OpenAI-compatible chat URL, in place of engine and tokenizer: it gets messages and returns a message.

An environment works with token ids, which such a server does not return. Instead it gets numbers of a table: one for each
rendered part of a conversation, and one for each reply, followed by zeros up to the number of tokens that the server counted.
There are no logprobs, and nothing can be trained.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from atropos_chat_client.client import CallFailed, ChatClient, read_key
from atropos_chat_client.messages import arguments_text, openai_messages
from atropos_chat_client.retries import repeat
from atropos_core.console.waits import waiting
from atropos_core.errors import ApiError, ConfigError, DataError, DeadlineExceeded
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import UNKNOWN_VERSION, Completion, Floats, Message, Sampling, Tokens

OPEN_DEADLINE_S = 60.0
PAUSE_S, JITTER = 0.5, 0.5  # between the first tries of a call; calls that failed together are not repeated together
FIELDS = ("role", "content", "tool_calls", "reasoning_content")  # of a message


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
        key = read_key(key_variable, "--key-variable") if key_variable is not None else ""
        self._client = ChatClient(url, key, connections=concurrency)
        self.url, self.name = self._client.url, name
        self._slots = asyncio.Semaphore(concurrency)
        self._parts: list[_Part] = [_Part(())]  # number 0 pads replies
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
        messages = openai_messages([message for part in parts for message in part.messages])
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
        await self._client.close()

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
            message = _message_of(choice["message"])
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
        """Post and return the answer. A call that may succeed later is repeated until the deadline. Raises DeadlineExceeded with the
        last reason, and ApiError at once for any other refusal."""
        reason = "it gave no answer"
        if self._limit != "max_tokens":
            body = {(self._limit if name == "max_tokens" else name): value for name, value in body.items()}

        async def post_once() -> dict[str, Any]:
            nonlocal reason
            try:
                async with self._slots:
                    return await self._client.post("/chat/completions", body)
            except CallFailed as failed:
                reason = str(failed)
                self.retries += failed.is_temporary
                raise

        try:
            async with asyncio.timeout(deadline_s):
                return await repeat(post_once, pause_s=PAUSE_S, jitter=JITTER)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} answered no call within {deadline_s:g} s; the last reason: {reason}"
            ) from None
        except CallFailed as failed:
            raise ApiError(f"a call of {self.url} failed: {failed}", remedy=_remedy(failed.status)) from failed


def _message_of(said: Mapping[str, Any]) -> Message:
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
    return {name: message[name] for name in FIELDS if message.get(name) is not None}


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
    arguments = arguments_text(function.get("arguments"))
    return f'<tool_call>{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}</tool_call>'


def _remedy(status: int | None) -> str:
    if status in (401, 403):
        return "Name the environment variable that holds the key: --key-variable NAME"
    if status == 404:
        return "Check that --model-url ends as the server wants it (most in /v1), and that it has a model named as --model-name."
    return "The URL ends in /v1 with most servers." if status == 200 else ""
