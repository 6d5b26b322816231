"""The policy, as an environment sees it, and one conversation with it. Use them to write an environment's `rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from atropos_core.errors import DataError
from atropos_core.seeds import derive
from atropos_core.turn_rewards import placed, with_turns
from atropos_core.types import (
    ABSTAINED,
    Completion,
    Episode,
    Kept,
    Message,
    Rollout,
    RoutedExperts,
    Sampling,
    Score,
    Tokens,
)


class Policy(Protocol):
    """The model: renders messages to prompt ids, samples replies and parses them."""

    sampling: Sampling

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        """Return prompt ids for a reply. With `after` (a history that ends in a sampled reply), return only the ids that
        extend it by `messages`: sampled tokens are never encoded again. Raises DataError if the chat template rewrites
        history, because the prompt then does not extend `after`."""

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Sample `n` continuations. Without `sampling`, use the run's settings."""

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        """Parse sampled ids into an assistant message: content, reasoning_content, and tool_calls with arguments as dicts.
        Pass the `prompt` that they continue: if it ends in an open `<think>`, the reply begins as reasoning."""


class Conversation:
    """Sends messages, samples replies, and keeps every id as it was sampled.

    async def rollout(self, task, policy, *, seed):
        talk = Conversation(policy, seed=seed)
        guess = await talk.reply(*task.messages)
        guess = await talk.reply({"role": "user", "content": "Are you sure?"})
        return talk.episode(Score(...))

    `Score(value, turns=[...])` places parts of `value` at the replies, one number for each.

    `tools`: JSON schemas in OpenAI's form, shown to the model. In a reply's `tool_calls`, `function["name"]` is a str and
    `function["arguments"]` a dict. Answer each call with one message of the role "tool" (docs/multi-turn.md).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self._policy = policy
        self._seed = seed
        self._sampling = sampling
        self._tools = tools
        self._turns = 0
        self._finished: list[Rollout] = []
        self._places: list[tuple[int, int]] = []  # of each reply: its rollout, and its end there (0: it has no tokens)
        self._ids: list[Tokens] = []
        self._sampled: list[Completion | None] = []  # parallel to `_ids`: None for what the environment said
        self.finish = "stop"

    async def reply(self, *messages: Message) -> Message:
        """Send `messages` and return the policy's reply. If the reply is cut off at the token limit, `finish` becomes
        "length"."""
        history = np.concatenate(self._ids) if self._ids else None
        rendered = await self._policy.render(messages, tools=self._tools, after=history)
        prompt = rendered if history is None else np.concatenate([history, rendered])
        [completion] = await self._policy.sample(prompt, sampling=self._sampling, seed=derive(self._seed, self._turns))
        self._turns += 1
        self._ids += [rendered, completion.tokens]
        self._sampled += [None, completion]
        self.finish = completion.finish
        answer = await self._policy.parse(completion.tokens, prompt=prompt)
        self.messages += [*messages, answer]
        return answer

    def start_over(self) -> None:
        """End this token history. The next `reply` starts a new rollout of the same episode, with only its own messages."""
        if self._ids:
            ends = np.cumsum([len(ids) for ids in self._ids]).tolist()
            replies = [(end, len(of.tokens)) for end, of in zip(ends, self._sampled, strict=True) if of is not None]
            self._places += [(len(self._finished), end if size else 0) for end, size in replies]
            self._finished.append(self._rollout())
            self._ids, self._sampled = [], []

    def episode(self, score: Score) -> Episode:
        """Return the finished episode. Raises DataError if the policy never replied, or `score.turns` does not fit its replies."""
        self.start_over()
        if not self._finished:
            raise DataError("an episode needs at least one reply of the policy")
        rollouts = tuple(self._finished)
        if score.turns is not None:
            if score.abstains:
                raise DataError(
                    "a score abstains and has turn rewards: leave out `turns`, or give the score that they are parts of."
                )
            rollouts = with_turns(rollouts, placed(rollouts, score.turns, self._places))
        return Episode(
            rollouts=rollouts,
            score=score.value,  # `rollouts.checked` makes it a plain number, and refuses anything else
            correct=score.correct,
            parts=dict(score.parts),
            metrics={**score.metrics, ABSTAINED: 1.0} if score.abstains else dict(score.metrics),
            messages=tuple(self.messages),
            finish=self.finish,
        )

    def _rollout(self) -> Rollout:
        completions = [completion for completion in self._sampled if completion is not None]
        sampled = np.concatenate(
            [np.full(len(ids), of is not None) for ids, of in zip(self._ids, self._sampled, strict=True)]
        )
        logprobs = np.zeros(len(sampled), np.float32)
        versions = np.zeros(len(sampled), np.int32)
        logprobs[sampled] = np.concatenate([completion.logprobs for completion in completions])
        versions[sampled] = np.concatenate([completion.policy_version for completion in completions])
        return Rollout(
            tokens=np.concatenate(self._ids).astype(np.int32),
            sampled=sampled,
            trained=sampled,
            logprobs=logprobs,
            policy_version=versions,
            temperature=completions[-1].temperature,
            truncated=any(completion.truncated for completion in completions),
            kept=Kept.joined(len(sampled), self._kept()),
            experts=RoutedExperts.joined(len(sampled), (completion.experts for completion in completions)),
        )

    def _kept(self) -> Iterator[tuple[int, Kept | None]]:
        start = 0
        for ids, completion in zip(self._ids, self._sampled, strict=True):
            yield start, None if completion is None else completion.kept
            start += len(ids)
