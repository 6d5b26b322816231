"""A remote model behind an OpenAI-compatible URL, used instead of the policy, to compare how an agent does with it.

It is not trained: the server returns text without ids. The agent may use any of our APIs. The outgoing request is a chat
completion, or a completion if the agent asked for one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from atropos_agent_api.calls import CALLS_USED, SESSION_ENDED, Answer, Call, CallRefused, Choice
from atropos_agent_api.config import BaselineOptions
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.record import SessionRecord
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.account import Account
from atropos_agent_api.tokens.canonical import plain_message
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_chat_client.client import CallFailed, ChatClient, read_key
from atropos_chat_client.messages import openai_messages
from atropos_core.conversation import Policy
from atropos_core.errors import ApiError, DataError
from atropos_core.types import Message, Rollout, Sampling, Tokens

CALL_DEADLINE_S = 300.0


class Baseline:
    """The remote server, and the key that programs never see."""

    def __init__(self, options: BaselineOptions) -> None:
        """Raises ConfigError if the key is missing."""
        key = read_key(options.key_variable, "baseline.key_variable") if options.key_variable is not None else ""
        self.model = options.model
        self._client = ChatClient(options.url, key, timeout_s=CALL_DEADLINE_S)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ApiError."""
        try:
            return await self._client.post(path, body)
        except CallFailed as failed:
            raise ApiError(f"the baseline at {self._client.url} failed: {failed}") from failed

    async def close(self) -> None:
        await self._client.close()


class BaselineSession(Session):
    """One episode with that model. It has the limits of any session; the server decides how to sample."""

    def __init__(
        self, baseline: Baseline, policy: Policy, format: ChatFormat, options: SessionOptions, *, seed: int, name: str
    ) -> None:
        super().__init__(policy, format, options, seed=seed, name=name)
        self._baseline = baseline
        self._sampling_of_run = policy.sampling
        self._render = format.render
        self._most_calls = options.max_calls
        self._said: tuple[Message, ...] = ()
        self._ids: Tokens = np.zeros(0, np.int32)
        self._finish = "stop"
        self._received = 0

    async def answer(self, call: Call) -> Answer:
        if self.ended:
            raise CallRefused(
                f"this session has ended: {self.ended}. {SESSION_ENDED}", status=409, code="session_ended"
            )
        if call.n != 1 or call.logprobs:
            raise CallRefused(
                "a baseline answers with one choice and no logprobs. Leave n and logprobs out.",
                field="n" if call.n != 1 else "logprobs",
            )
        if self._most_calls and self._calls >= self._most_calls:
            raise CallRefused(
                f"this session has used all of its {self._most_calls} calls. {CALLS_USED}",
                status=403,
                code="call_limit",
            )
        self._calls += 1
        try:
            found = await self._baseline.post(
                "/chat/completions" if call.prompt is None else "/completions", self._body(call)
            )
            message, finish = _reply(found, call)
            used = int((found.get("usage") or {}).get("completion_tokens") or 0)
        except (ApiError, KeyError, IndexError, TypeError, ValueError) as error:
            named = (
                error
                if isinstance(error, ApiError)
                else ApiError(f"the baseline's answer is not a completion: {error!r}")
            )
            self.failure = self.failure or named
            raise CallRefused(str(named).splitlines()[0], status=502, code="baseline_failed") from error
        prompt: tuple[Message, ...] = call.messages or ({"role": "user", "content": str(call.prompt)},)
        self._said, self._finish = (*prompt, message), finish
        self._ids = await self._render([{"role": "user", "content": message.get("content") or "."}], ())
        self._received += used
        choice = Choice(message, finish, np.zeros(used, np.int32), np.zeros(used, np.float32))
        return Answer(
            id=str(found.get("id") or f"{self.id}-{self._calls}"),
            model=call.model,
            choices=(choice,),
            prompt_tokens=int((found.get("usage") or {}).get("prompt_tokens") or 0),
            created=int(time.time()),
        )

    async def count(self, call: Call) -> int:
        raise CallRefused(
            "a baseline cannot count tokens before it answers. Read usage in its answer.",
            status=404,
            code="unsupported",
        )

    def not_delivered(self, answer_id: str) -> None:
        """Does nothing, since nothing is trained."""

    def record(self) -> SessionRecord:
        """One rollout with the text of the last reply, tokenised by the run's model, since an episode must have a rollout. None of
        its tokens is sampled or trained."""
        none = np.zeros(len(self._ids), np.bool_)
        rollouts = (
            (
                Rollout(
                    self._ids, none, none, None, np.zeros(len(self._ids), np.int32), self._sampling_of_run.temperature
                ),
            )
            if len(self._ids)
            else ()
        )
        account = Account(rollouts, (self._said,) * len(rollouts), (), (), len(rollouts), 0)
        metrics = {"agent/calls": float(self._calls), "agent/baseline_tokens": float(self._received)}
        return SessionRecord(account, (), self._said, self._finish, metrics)

    def _body(self, call: Call) -> dict[str, Any]:
        """The request, with the run's sampling. OpenAI's own API has neither top_k nor min_p and refuses them by name; vLLM, SGLang and
        llama.cpp take them. So they are sent only if they are set."""
        run = self._sampling_of_run
        most = run.max_tokens if call.max_tokens is None else min(run.max_tokens, call.max_tokens)
        body: dict[str, Any] = {"model": self._baseline.model, "max_tokens": most, "temperature": run.temperature}
        usual = Sampling()
        body |= {
            name: getattr(run, name)
            for name in ("top_p", "top_k", "min_p")
            if getattr(run, name) != getattr(usual, name)
        }
        if call.stop:
            body["stop"] = list(call.stop)
        if call.prompt is not None:
            if not isinstance(call.prompt, str):
                raise CallRefused(
                    "a baseline needs a prompt as text: ids belong to another tokenizer. Send its text.", field="prompt"
                )
            return body | {"prompt": call.prompt}
        body["messages"] = openai_messages(call.messages)
        if call.tools:
            choice: Any = call.tool_choice
            if choice.startswith("tool:"):
                choice = {"type": "function", "function": {"name": choice.removeprefix("tool:")}}
            body |= {"tools": list(call.tools), "tool_choice": choice}
        return body


def _reply(found: Mapping[str, Any], call: Call) -> tuple[Message, Any]:
    """The reply and its finish. Raises KeyError, IndexError, TypeError or ValueError if this is not a completion."""
    choice = found["choices"][0]
    text = choice["text"] if call.prompt is not None else None
    said = {"role": "assistant", "content": text} if text is not None else {**choice["message"], "role": "assistant"}
    kept = {
        name: said[name]
        for name in ("role", "content", "tool_calls", "reasoning_content")
        if said.get(name) is not None
    }
    kept.setdefault("content", "")
    if not isinstance(kept["content"], str):
        raise DataError(f"its content is {kept['content']!r:.80}, not text")
    finish = choice.get("finish_reason")
    named = "tool_calls" if kept.get("tool_calls") else "length" if finish == "length" else "stop"
    return plain_message(kept), named
