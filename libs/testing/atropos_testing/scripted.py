"""Policies that follow a script, so that environments can be run without a model.

Their ids are Unicode code points, so that any text, however hostile, goes through `sample` and `parse` unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.rollouts.replies import message_of, opening_of
from atropos_core.seeds import derive, of_replies
from atropos_core.types import Completion, Finish, Message, Sampling, Task, Tokens

END = 0x110000  # one past the last code point: the end of every turn
ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages; chat templates leave others out
OTHER = 2 * END  # what OtherIds adds to each id that it samples
MOST_CHARACTERS = 4_000_000  # of a prompt: about a million tokens, which no model reads
_LOGPROB = -0.5


@dataclass(frozen=True)
class Script:
    """The replies of a policy: `reply(task, seed)`, on every turn. An innocent one may contain an answer only by chance."""

    name: str
    reply: Callable[[Task, int], str]
    finish: Finish = "stop"
    innocent: bool = True


class ScriptedPolicy(Policy):
    """One rollout's policy. `given` has every reply's ids, `roles` the roles of the messages that it was sent, and `has_tools` is
    True if it was sent tools. With `spread_s`, each reply takes a different time, up to that long, so that concurrent rollouts overtake
    one another."""

    def __init__(self, script: Script, task: Task, *, spread_s: float = 0.0) -> None:
        self.sampling = Sampling()
        self.given: list[Tokens] = []
        self.roles: set[str] = set()
        self.has_tools = False
        self._script = script
        self._task = task
        self._spread_s = spread_s

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        if not messages and after is None:
            raise DataError("render() was given no messages")
        self.roles.update(str(message["role"]) for message in messages)
        self.has_tools = self.has_tools or bool(tools)
        rendered = [f"tools {json.dumps(list(tools), default=str)}"] if tools and after is None else []
        rendered += [f"{message['role']} {render_content(message)}" for message in messages]
        size = sum(map(len, rendered)) + (0 if after is None else len(after))
        if size > MOST_CHARACTERS:
            longest = max(messages, key=lambda message: len(render_content(message)), default={})
            raise DataError(
                f"the prompt has {size:,} characters, more than any model reads (at most {MOST_CHARACTERS:,} are tried here).",
                remedy=f"Its longest message has the role {longest.get('role')!r}: cut what a tool or a file returns before it becomes "
                "a message.",
            )
        return np.concatenate([*(np.append(to_ids(text), END) for text in rendered), to_ids("assistant ")]).astype(
            np.int32
        )

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        if np.asarray(prompt).ndim != 1 or not len(prompt):
            raise DataError(f"sample() wants one row of prompt ids, not shape {np.asarray(prompt).shape}")
        await self._before_replying(seed)
        replies = [self._script.reply(self._task, one) for one in of_replies(seed, n)]
        return [self._completion(text, sampling or self.sampling) for text in replies]

    async def _before_replying(self, seed: int) -> None:
        await asyncio.sleep(self._spread_s * (derive(seed, "spread") % 1024) / 1024)

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return message_of(to_text(tokens), None if prompt is None else opening_of(to_text(prompt)))

    def _completion(self, text: str, sampling: Sampling) -> Completion:
        ids = to_ids(text) if self._script.finish == "length" else np.append(to_ids(text), END).astype(np.int32)
        self.given.append(ids)
        return Completion(
            tokens=ids,
            logprobs=np.full(len(ids), _LOGPROB, np.float32),
            policy_version=np.zeros(len(ids), np.int32),
            finish=self._script.finish,
            temperature=sampling.temperature,
            truncated=sampling.truncated,
        )


class OtherIds(ScriptedPolicy):
    """Samples a text as other ids than `render` makes of it: an environment that encodes a reply again gets tokens that were never
    sampled. `prompts` has every prompt that it was given."""

    def __init__(self, script: Script, task: Task) -> None:
        super().__init__(script, task)
        self.prompts: list[Tokens] = []

    async def sample(self, prompt: Tokens, **keywords: Any) -> list[Completion]:
        self.prompts.append(np.asarray(prompt, np.int32))
        return await super().sample(prompt, **keywords)

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        ids = np.asarray(tokens)
        return await super().parse(np.where(ids >= OTHER, ids - OTHER, ids), prompt=prompt)

    def _completion(self, text: str, sampling: Sampling) -> Completion:
        made = super()._completion(text, sampling)
        self.given[-1] = (made.tokens + OTHER).astype(np.int32)
        return replace(made, tokens=self.given[-1])


class SilentPolicy(ScriptedPolicy):
    """Does not answer until it is released; then its reply is empty, so that even a stubborn rollout ends."""

    def __init__(self, script: Script, task: Task) -> None:
        super().__init__(script, task)
        self.sampling_began = asyncio.Event()
        self.released = asyncio.Event()

    async def _before_replying(self, seed: int) -> None:
        self.sampling_began.set()
        await self.released.wait()


class FailingPolicy(ScriptedPolicy):
    """Fails as the run's own policy does if the engine is late."""

    async def _before_replying(self, seed: int) -> None:
        await asyncio.sleep(0)
        raise DeadlineExceeded("the engine: sample() gave no answer within 0 s (a contract check runs a late engine)")


def to_ids(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def to_text(ids: Tokens) -> str:
    kept = np.asarray(ids)[np.asarray(ids) < END].astype(np.int32)
    return kept.tobytes().decode("utf-32-le", "surrogatepass")


def render_content(message: Message) -> str:
    """Return a message as plain text. Raises DataError for a message that no chat template could render."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = json.dumps(message["tool_calls"], default=str)
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in content)
    raise DataError(f"the content of a {message['role']} message must be text, not {content!r}")
