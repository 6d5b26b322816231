"""Rewards of text: exact, numeric, format, length; and the environment's own score."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from atropos_core.builtin.config import ExactOptions, FormatOptions, LengthOptions, NumericOptions
from atropos_core.builtin.numbers import answer_value, is_same, last_value
from atropos_core.errors import DataError
from atropos_core.interfaces import Reward
from atropos_core.rollouts.replies import searched
from atropos_core.types import Episode, Floats, Message, Score, Task


class EnvironmentReward(Reward):
    """The score that the environment gave each episode, with its turn rewards."""

    of_environment = True  # so that an episode without one has no reward

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats | Sequence[float | Score]:
        if all(rollout.turns is None for episode in episodes for rollout in episode.rollouts):
            return np.array([episode.score for episode in episodes], np.float32)
        return [Score(one.score, turns=[rollout.turns for rollout in one.rollouts]) for one in episodes]


class ExactReward(Reward):
    """1 if the last reply is exactly the task's answer; else 0."""

    def __init__(self, options: ExactOptions) -> None:
        self._options = options

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        wanted = self._normal(_answer(task))
        return np.array([self._normal(last_reply(episode)) == wanted for episode in episodes], np.float32)

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text


class NumericReward(Reward):
    """1 if the last number of the last reply is the number of the task's answer; else 0."""

    def __init__(self, options: NumericOptions) -> None:
        self._tolerance = options.tolerance

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        answer = _answer(task)
        try:
            wanted = answer_value(answer)
        except ValueError as error:
            raise DataError(
                f"the answer of task {task.id!r} {error}: {answer!r:.80}",
                remedy="Leave one number there, or end the answer in `#### 12`. The reward exact compares texts.",
            ) from None
        found = [last_value(last_reply(episode)) for episode in episodes]
        return np.array([is_same(number, wanted, self._tolerance) for number in found], np.float32)


class FormatReward(Reward):
    """The share of the patterns that the last reply contains. Patterns that name a thinking tag are searched in the whole reply, others
    in the reply without its reasoning (`replies.searched`)."""

    def __init__(self, options: FormatOptions) -> None:
        self._patterns = [re.compile(pattern, re.DOTALL) for pattern in options.patterns]

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        replies = [last_message(episode) for episode in episodes]
        found = [[bool(of.search(searched(reply, of.pattern))) for of in self._patterns] for reply in replies]
        return np.array([np.mean(one) for one in found], np.float32)


class LengthReward(Reward):
    """A penalty for long rollouts: 0 up to `free_tokens` sampled tokens, falling to -1 at `limit_tokens`
    (the soft overlong penalty of DAPO, arXiv 2503.14476, eq. 13)."""

    def __init__(self, options: LengthOptions) -> None:
        self._free, self._limit = options.free_tokens, options.limit_tokens

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        lengths = np.array([sum(int(rollout.sampled.sum()) for rollout in episode.rollouts) for episode in episodes])
        over = (lengths - self._free) / max(self._limit - self._free, 1)
        return np.asarray(-np.clip(over, 0.0, 1.0), np.float32)


def last_message(episode: Episode) -> Message:
    """Return the last assistant message; empty if there is none."""
    return next((one for one in reversed(episode.messages) if one.get("role") == "assistant"), {})


def last_reply(episode: Episode) -> str:
    """Return the content of the last assistant message, without reasoning and tool calls; empty if there is none."""
    return str(last_message(episode).get("content") or "")


def _answer(task: Task) -> str:
    if task.answer is None:
        raise DataError(f"task {task.id!r} has no answer to compare with")
    return task.answer
