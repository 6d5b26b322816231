"""Numbers about the replies of a step, for the checks that explain missing rewards, and one reply as an example.

Only the last reply of an episode counts. A reply is looked at as text, since checks know no tokenizer, except for its length and
for a passage that it repeats to its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_core.rollouts.replies import whole_reply
from atropos_core.types import Episode, Message, Metrics, ScoredGroup, Tokens

ANSWERED = "answered"  # an environment's metric: 1 if its grader found an answer in the reply, right or wrong, else 0
MOST = 64  # replies of a step that are looked at
QUOTED = 100  # characters at the end of a reply that are quoted, and in which a right answer is looked for
LONGEST_ANSWER = 40  # characters of an answer that is looked for in replies
LONGEST_PERIOD, TIMES = 24, 3  # a reply repeats itself if it ends with so many copies of at most so many tokens
# A header of a turn as chat templates write it: a word for who speaks, on its own line or before a colon.
HEADER = re.compile(
    r"^[ \t]*((?:<\|?[a-z_]+\|?>|###?|\[|\*\*)?[ \t]*(?:user|human|assistant|system|question|instruction|input)[ \t]*"
    r"(?:\*\*[ \t]*:|:|\||<\|[a-z_]+\|>|\]|(?=[ \t]*$)))|(?:<\|im_start\|>|<start_of_turn>|\[INST\])",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Reply:
    """The last reply of an episode."""

    text: str
    calls: bool  # it calls tools
    cut_off: bool
    reward: float
    correct: bool | None
    metrics: Mapping[str, float]
    answer: str  # of its task, if it is short
    environment: str
    has_text: bool = True  # False: a client sent tokens without messages

    @property
    def header(self) -> str:
        """The header of another turn that the reply writes itself; empty if there is none."""
        found = HEADER.search(self.text)
        return "" if found is None else found[0].strip()

    @property
    def is_empty(self) -> bool:
        return self.has_text and not self.text.strip() and not self.calls

    @property
    def ends_right(self) -> bool:
        """True if the right answer is at the end of the text, or another grader of the environment found it there."""
        if any(name.startswith("accuracy_") and value == 1.0 for name, value in self.metrics.items()):
            return True
        return bool(self.answer) and bool(
            re.search(rf"(?<![\w.]){re.escape(self.answer)}(?!\w|\.\d)", self.text[-QUOTED:])
        )

    @property
    def end(self) -> str:
        """The end of the reply on one line, quoted."""
        text = " ".join(self.text.split())
        return '"' + ("..." if len(text) > QUOTED else "") + text[-QUOTED:] + '"'


def replies(groups: Iterable[ScoredGroup]) -> list[Reply]:
    return [
        _reply(
            episode.messages, episode.finish, float(reward), episode.correct, episode.metrics, group.task.answer,
            group.draw.environment,
        )
        for group in groups
        for episode, reward in zip(group.episodes, group.rewards, strict=True)
    ]  # fmt: skip


def recorded_replies(rows: Iterable[Mapping[str, Any]]) -> list[Reply]:
    """Return the replies in lines of rollouts/, or of the file of an evaluation. Skips lines that are not as a run writes them."""
    found = []
    for row in rows:
        for one in row["samples"] if isinstance(row.get("samples"), list) else [row]:
            try:
                found.append(
                    _reply(
                        one["messages"], one["finish"], float(one["reward"]), one["correct"], one["metrics"], row.get("answer"),
                        row["environment"],
                    )
                )  # fmt: skip
            except (KeyError, TypeError, ValueError):
                continue  # a failed rollout has no reply
    return found


def _reply(
    messages: Sequence[Message],
    finish: str,
    reward: float,
    correct: bool | None,
    metrics: Mapping[str, float],
    answer: str | None,
    environment: str,
) -> Reply:
    last: Message = next((one for one in reversed(messages) if one.get("role") == "assistant"), {})
    wanted = (answer or "").rpartition("####")[2].strip()
    return Reply(
        whole_reply(last),
        bool(last.get("tool_calls")),
        finish == "length",
        reward,
        correct,
        metrics,
        wanted if len(wanted) <= LONGEST_ANSWER else "",
        environment,
        bool(last),
    )


def measure_replies(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return the shares of replies, from 0 to 1, that are empty, write another turn, repeat themselves, have an answer
    (`replies/answered`), or end with the right answer and earned no more than the step's lowest reward; and by how much reward
    follows length within a group."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    metrics = _reward_and_length(groups)
    sample = replies(groups)
    sample, episodes = sample[:: -(-len(sample) // MOST)], episodes[:: -(-len(episodes) // MOST)]
    metrics["replies/empty"] = _share(one.is_empty for one in sample)
    metrics["replies/other_turn"] = _share(bool(one.header) for one in sample)
    cut = [episode for episode, one in zip(episodes, sample, strict=True) if one.cut_off]
    metrics["replies/looping"] = sum(map(_loops, cut)) / len(sample)
    if (tokens := needed_tokens(episodes)) is not None:
        metrics["replies/needed_tokens"] = tokens
        metrics["replies/prompt_tokens"] = float(max((_last_reply(episode)[0] for episode in cut), default=0))
    answered = [one.metrics[ANSWERED] for one in sample if ANSWERED in one.metrics]
    if answered:
        metrics["replies/answered"] = float(np.mean(answered))
    lowest = min(one.reward for one in sample)
    if all(one.reward == lowest for one in sample) or metrics.get("replies/answered", 1.0) == 0.0:
        low = [one.ends_right and one.correct is not True for one in sample if one.reward == lowest]
        metrics["replies/right_unscored"] = sum(low) / len(sample)
    return metrics


def _share(found: Iterable[bool]) -> float:
    return float(np.mean([*found]))


def _last_reply(episode: Episode) -> tuple[int, Tokens]:
    """Return how many tokens come before the last reply, and the tokens of that reply."""
    for rollout in reversed(episode.rollouts):
        at = np.flatnonzero(rollout.sampled)
        if len(at):
            turns = np.flatnonzero(np.diff(at) > 1)
            begin = int(at[turns[-1] + 1] if len(turns) else at[0])
            return begin, rollout.tokens[begin : at[-1] + 1]
    return 0, np.zeros(0, np.int32)


def _loops(episode: Episode) -> bool:
    """True if the reply ends with copies of one passage."""
    tokens = _last_reply(episode)[1][-LONGEST_PERIOD * TIMES :]
    return any(
        bool((tokens[-TIMES * period : -period] == tokens[-(TIMES - 1) * period :]).all())
        for period in range(1, len(tokens) // TIMES + 1)
    )


def needed_tokens(episodes: Sequence[Episode]) -> float | None:
    """Estimate how many tokens 80 % of the replies need to end, if some were cut off. Lengths are taken as exponentially
    distributed, of which a censored sample has the mean (sum of all lengths) / (number that ended); with none that ended, as if
    one had."""
    lengths = [len(_last_reply(episode)[1]) for episode in episodes]
    ended = sum(episode.finish != "length" for episode in episodes)
    return None if ended == len(episodes) else sum(lengths) / max(ended, 1) * math.log(5)


def _reward_and_length(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return the correlation of reward and sampled tokens within groups; nothing if one of the two does not vary."""
    rewards, lengths = [], []
    for group in groups:
        if len(group.episodes) > 1:
            tokens = [sum(int(rollout.sampled.sum()) for rollout in one.rollouts) for one in group.episodes]
            rewards.append(group.rewards - group.rewards.mean())
            lengths.append(np.array(tokens, np.float64) - np.mean(tokens))
    if not rewards:
        return {}
    reward, length = np.concatenate(rewards).astype(np.float64), np.concatenate(lengths)
    scale = math.sqrt(float((reward**2).sum() * (length**2).sum()))
    return {"reward/length_correlation": float((reward * length).sum()) / scale} if scale > 0 else {}


def example(check: str, found: Sequence[Reply]) -> Reply | None:
    """Return a reply that shows what `check` found; None if the check is not about replies."""
    if check not in _SHOWS or not found:
        return None
    return max(found, key=_SHOWS[check])


# The reply that is shown for a check is the one for which this is largest.
_SHOWS: Mapping[str, Callable[[Reply], tuple[float, ...]]] = {
    "chat_template": lambda one: (bool(one.header) or one.is_empty, one.cut_off),
    "cut_off": lambda one: (one.cut_off, -one.reward),
    "answer_format": lambda one: (one.metrics.get(ANSWERED) != 1.0, not one.cut_off, one.ends_right, -one.reward),
    "reward_collapse": lambda one: (not one.cut_off, one.ends_right),
    "broken_policy": lambda one: (-one.reward, one.cut_off),
    "policy_collapse": lambda one: (-one.reward, one.cut_off),
    "length_reward": lambda one: (one.reward, len(one.text)),
}
