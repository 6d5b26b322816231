"""The rollouts of one step: listed, searched, and each with its tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.turn_rewards import outcome_reward
from atropos_core.types import UNKNOWN_VERSION, TurnRewards
from atropos_records.rollout_records import EpisodeRecord, RecordedStep
from atropos_records.step_tokens import SequenceTokens
from atropos_viewer.answers import SavedAnswers
from atropos_viewer.page_values import number, numbers, text_of
from atropos_viewer.rollout_table import table, why_left_out
from atropos_viewer.token_texts import TokenTexts


class StepRollouts:
    """`texts` loads the run's tokenizer when it is needed. If the file of tokens is damaged, the texts are still readable."""

    def __init__(
        self,
        recorded: RecordedStep,
        texts: Callable[[], TokenTexts],
        policy_version: int | None,
        saved: SavedAnswers | None = None,
    ) -> None:
        self._recorded, self._token_texts, self._policy_version = recorded, texts, policy_version
        self._episodes = recorded.episodes
        try:
            self._tokens, self._why_no_tokens = recorded.tokens, recorded.why_no_tokens
        except DataError as error:
            self._tokens, self._why_no_tokens = None, str(error)
        self._answers = None if saved is None else saved.of_step(recorded.step, self._episodes, self._tokens)

    def table(self) -> dict[str, Any]:
        answers = {} if self._answers is None else self._answers.table()
        return (
            table(self._episodes, self._tokens)
            | answers
            | {
                "policy_version": self._policy_version,  # at the start of the step
                "notices": self._notices(),
            }
        )

    def search(self, text: str) -> list[int]:
        """The rows with this text in their messages, task or failure, ignoring case."""
        wanted = text.casefold()
        return [at for at, said in enumerate(self._searched) if wanted in said]

    def one(self, at: int) -> dict[str, Any]:
        """One rollout with its messages and tokens. Raises DataError if the row does not exist."""
        if not 0 <= at < len(self._episodes):
            raise DataError(f"step {self._recorded.step} has no rollout {at}: it has {len(self._episodes)}.")
        one = self._episodes[at]
        sequences = self._recorded.sequences(one) if self._tokens is not None else []
        texts = self._token_texts() if sequences else None
        return {
            "at": at,
            "task": one.task,
            "environment": one.environment,
            "draw": one.draw,
            "answer": one.answer,
            "reward": number(one.reward),
            "advantage": number(one.advantage),
            "correct": one.correct,
            "finish": one.finish,
            "count": one.sampled_tokens,
            "parts": {name: number(value) for name, value in one.parts.items()},
            "metrics": {name: number(value) for name, value in one.metrics.items()},
            "versions": list(one.versions),
            "failed": one.failed,
            "where": one.failed_in,
            "left_out": self._why[at],
            "messages": list(one.messages),
            "tools": list(self._tools_shown.get(one.tools or "", ())),
            "turn_rewards": self._turn_rewards(one),
            "outcome_reward": number(outcome_reward(one.reward, one.turn_rewards))
            if one.reward is not None and one.turn_rewards
            else None,
            "sequences": [
                _sequence(sequence, texts, turns) | self._replayed(recorded)
                for sequence, turns, recorded in zip_longest(
                    sequences, one.turn_rewards[: len(sequences)], one.sequences
                )
            ]
            if texts is not None
            else [],
            **({} if self._answers is None else self._answers.of_rollout(at)),
            "policy_version": self._policy_version,
            "notices": self._notices() + ([texts.why_none] if texts is not None and texts.why_none else []),
        }

    def _turn_rewards(self, one: EpisodeRecord) -> list[float | None]:
        """The turn reward of each message: of one of the policy, the sum of those in its tokens. If it is unknown which tokens are a
        message's, those of messages in order, if there are as many. Empty if there are none."""
        if not one.turn_rewards:
            return []
        made: list[float | None] = [None] * len(one.messages)
        spans = self._recorded.reply_spans(one) if self._tokens is not None else []
        given = dict(zip(one.sequences, one.turn_rewards, strict=False))
        for span in spans:
            if (turns := given.get(span.sequence)) is not None:
                inside = (turns.ends > span.start) & (turns.ends <= span.end)
                made[span.message] = number(math.fsum(turns.values[inside])) if inside.any() else None
        values = [value for turns in one.turn_rewards if turns is not None for value in turns.values.tolist()]
        spoken = [at for at, message in enumerate(one.messages) if message.get("role") == "assistant"]
        if not spans and len(spoken) == len(values):
            for at, value in zip(spoken, values, strict=True):
                made[at] = number(value)
        return made

    @cached_property
    def _tools_shown(self) -> Mapping[str, Any]:
        return self._recorded.tools()

    def _replayed(self, sequence: int) -> dict[str, Any]:
        return {} if self._answers is None else self._answers.of_sequence(sequence)

    def _notices(self) -> list[str]:
        of_answers = [] if self._answers is None else self._answers.notices
        if not self._why_no_tokens:
            return of_answers
        return [f"Values of tokens are not shown: {self._why_no_tokens.rstrip('.')}.", *of_answers]

    @cached_property
    def _why(self) -> list[str]:
        return why_left_out(self._episodes)

    @cached_property
    def _searched(self) -> list[str]:
        return [_all_text(one).casefold() for one in self._episodes]


def _sequence(one: SequenceTokens, texts: TokenTexts, turns: TurnRewards | None) -> dict[str, Any]:
    """One branch, as columns over its tokens."""
    turn_rewards = np.full(len(one.ids), np.nan)
    if turns is not None:
        there = turns.ends <= len(one.ids)  # the others are a fault, which an audit names
        turn_rewards[turns.ends[there] - 1] = turns.values[there]
    differs = (
        None
        if one.trainer_logprobs is None or (one.truncated and one.kept is None)
        else one.trainer_logprobs - one.logprobs
    )
    versions = [None if version == UNKNOWN_VERSION else version for version in one.versions.tolist()]
    ids = one.ids.tolist()
    return {
        "pieces": texts.of(ids),
        "ids": ids,
        "sampled": one.sampled.astype(np.int8).tolist(),
        "trained": one.trained.astype(np.int8).tolist(),
        "advantage": numbers(one.advantages),
        "turn_reward": numbers(turn_rewards),
        "logprob": numbers(one.logprobs),
        "difference": numbers(differs),
        "entropy": numbers(one.entropy),
        "version": versions if any(version is not None for version in versions) else None,
        "teacher": numbers(one.teacher_logprobs),
        "temperature": number(one.temperature),
    }


def _all_text(one: EpisodeRecord) -> str:
    said = [one.task, one.failed]
    for message in one.messages:
        said.append(text_of(message))
        if message.get("tool_calls"):
            said.append(json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
    return "\n".join(said)
