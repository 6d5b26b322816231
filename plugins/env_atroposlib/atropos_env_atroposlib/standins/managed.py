"""`managed_server`: samples with their ids, masks and logprobs, one node for each, in the order of the choices.

A prompt that begins with a node's whole text continues it: its ids are kept, only new text is encoded, and the node is replaced.
Any other prompt starts a node. A sampled end of turn is part of the node's text, so that the next prompt does not repeat it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from atropos_env_atroposlib.standins.answers import Answer, chat_answer, text_answer
from atropos_env_atroposlib.standins.link import Reply, link
from atropos_env_atroposlib.standins.servers import APIServer, rendered, sampled

MASKED, NO_LOGPROB = -100, 1.0


class SequenceNode(BaseModel):
    """One whole history: entry t of each list belongs to `tokens[t]`."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]  # MASKED for tokens that were not sampled
    logprobs: list[float]  # NO_LOGPROB there
    metadata: dict[str, Any] | None = None


class ManagedServer:
    def __init__(self, server: APIServer, tokenizer: Any = None, **ignored: Any) -> None:
        self.server = server
        self.tokenizer = tokenizer or link().tokenizer
        self.current_nodes: list[SequenceNode] = []

    async def chat_completion(self, messages: Sequence[Mapping[str, Any]] = (), **given: Any) -> Answer:
        tools = given.pop("tools", None)
        replies = await self._sample(rendered(messages, tools), given, special=False)
        return chat_answer(replies, self.server.config.model_name, tools=bool(tools))

    async def completion(self, prompt: str = "", **given: Any) -> Answer:
        replies = await self._sample(prompt, given, special=True)
        return text_answer(replies, self.server.config.model_name)

    def get_state(self) -> dict[str, Any]:
        return {"nodes": self.current_nodes}

    def reset(self) -> None:
        self.current_nodes = []

    async def get_logprobs(self, **given: Any) -> dict[str, Any]:
        return await self.server.get_logprobs(**given)

    async def _sample(self, text: str, given: dict[str, Any], *, special: bool) -> list[Reply]:
        extended = next((node for node in self.current_nodes if text.startswith(node.full_text)), None)
        known = None if extended is None else (extended.full_text, extended.tokens)
        replies = await sampled(link().ids(text, special=special, history=known), text, given)
        made = [self._node(one, text, extended) for one in replies]
        if extended is not None and made:
            at = next((i for i, node in enumerate(self.current_nodes) if node is extended), None)
            if at is not None:
                self.current_nodes[at] = made.pop(0)
        self.current_nodes += made
        return replies

    def _node(self, reply: Reply, text: str, before: SequenceNode | None) -> SequenceNode:
        masked, logprobs = (before.masked_tokens, before.logprobs) if before is not None else ([], [])
        new = len(reply.prompt) - len(masked)
        return SequenceNode(
            full_text=text + reply.marked,
            tokens=[*reply.prompt, *reply.tokens],
            masked_tokens=[*masked, *[MASKED] * new, *reply.tokens],
            logprobs=[*logprobs, *[NO_LOGPROB] * new, *reply.logprobs],
            metadata={"finish_reason": reply.finish},
        )


class ManagedServerAdapter:
    """A server in the shape of OpenAI's client: `client.chat.completions.create(...)`."""

    def __init__(self, managed_server: ManagedServer | APIServer, base_url: str = "") -> None:
        self.base_url = base_url
        self.completions = _Create(managed_server.completion)
        self.chat = _Chat(managed_server)


class _Chat:
    def __init__(self, managed: ManagedServer | APIServer) -> None:
        self.completions = _Create(managed.chat_completion)


class _Create:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def create(self, **given: Any) -> Any:
        """Returns OpenAI's own classes if its package is loaded: libraries that use such a client check for them."""
        answer: Answer = await self._call(**given)
        if (openai := sys.modules.get("openai")) is None:
            return answer
        kind = openai.types.chat.ChatCompletion if answer.object == "chat.completion" else openai.types.Completion
        return kind.model_validate(answer.model_dump())
