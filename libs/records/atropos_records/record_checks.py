"""Check the records of a step against each other; `atropos audit` reports each contradiction.

Masks, values and versions have one meaning (docs/records.md), so a changed one contradicts the others. Ids decode to the texts.
Rewards follow from their parts and the run's weights, and their mean is the metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import MessageDropped
from atropos_core.rollouts.replies import AS_SAMPLED
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import UNKNOWN_VERSION, Bools, Message, Tokens
from atropos_records.rollout_records import EpisodeRecord, RecordedStep
from atropos_records.step_tokens import SequenceTokens, TokenFile

MOST_OF_ONE_KIND = 100  # faults of a step: what is wrong everywhere needs no list
SINGLE = 1e-4  # relative: sums in float32, in another order
EXCERPT = 40  # characters


@dataclass(frozen=True)
class Fault:
    """A contradiction in the records."""

    step: int
    says: str
    task: str = ""
    sequence: int | None = None
    position: int | None = None  # of a token in its sequence
    recorded: float | None = None  # of a logprob: nats, as is the next
    recomputed: float | None = None
    version: int | None = None  # that it is said to be of


@dataclass(frozen=True)
class Expected:
    """Values that the records must agree with."""

    weights: Mapping[str, float]  # of each reward
    max_staleness: int | None
    tokenizer: ChatTokenizer


def check_step(step: RecordedStep, metrics: Mapping[str, float], expected: Expected) -> Iterator[Fault]:
    """Yield the faults of a step. `metrics` are those of the step. Raises DataError for a damaged file."""
    episodes, tokens = step.episodes, step.tokens
    yield from _rewards(step, metrics, expected.weights)
    if tokens is None:
        return
    connected = list(_connections(step, episodes, tokens))
    yield from connected
    if connected:  # nothing else could be said of the right task
        return
    yield from _masks(step, tokens, metrics)
    yield from _versions(step, tokens, metrics, expected.max_staleness)
    for episode in episodes:
        sequences = step.sequences(episode)
        yield from _episode(step, episode, sequences)
        yield from _texts(step, episode, sequences, expected.tokenizer)


def _rewards(step: RecordedStep, metrics: Mapping[str, float], weights: Mapping[str, float]) -> Iterator[Fault]:
    leased: list[float] = []
    for one in step.episodes:
        if one.failed or one.scored_reward is None:
            continue
        if one.outcome == "trained" or one.dropped_by.startswith(("transform.", "reward.")):
            leased.append(one.scored_reward)
        if weights and weights.keys() <= one.parts.keys():
            made = sum(weight * one.parts[name] for name, weight in weights.items())
            if abs(made - one.scored_reward) > SINGLE * max(1.0, abs(made)):
                says = f"its reward is {one.scored_reward:g}, and its parts make {made:g}"
                yield Fault(step.step, f"line {one.line + 1}: {says}", one.task)
    mean, count = metrics.get("reward/mean"), metrics.get("rollouts/count")
    if mean is not None and count == len(leased) and leased:  # a transform may have left out single episodes
        found = float(np.mean(leased))
        if abs(found - mean) > SINGLE * max(1.0, float(np.abs(leased).max())):
            yield Fault(step.step, f"the mean of its rewards is {found:g}, and the metric reward/mean {mean:g}")


def _connections(step: RecordedStep, episodes: Sequence[EpisodeRecord], tokens: TokenFile) -> Iterator[Fault]:
    """Check that lines and sequences refer to each other."""
    lines = _column(tokens, "episodes")
    wanted = [one.line for one in episodes for _ in one.sequences]
    numbers = [number for one in episodes for number in one.sequences]
    if numbers != list(range(tokens.sequences)) or lines.tolist() != wanted:
        yield Fault(
            step.step,
            f"{step.path.name} speaks of {len(numbers)} sequences, and {tokens.path.name} has {tokens.sequences}, or of other "
            "episodes: the two files are not of one step",
        )


def _masks(step: RecordedStep, tokens: TokenFile, metrics: Mapping[str, float]) -> Iterator[Fault]:
    sampled, trained = _column(tokens, "sampled"), _column(tokens, "trained")
    logprobs, advantages = _column(tokens, "logprobs"), _column(tokens, "advantages")
    versions = _column(tokens, "versions")
    known = np.isfinite(logprobs)
    with_logprobs = np.repeat(np.logical_or.reduceat(known, tokens.offsets[:-1]), np.diff(tokens.offsets))
    for wrong, says in (
        (_column(tokens, "ids") < 0, "its token id is below 0"),
        (trained & ~sampled, "it is trained, and was not sampled"),
        (known & ~sampled, "it has a logprob, and was not sampled"),
        (~known & sampled & with_logprobs, "it was sampled, and has no logprob"),
        (known & (logprobs > 1e-5), "its logprob is above 0"),
        ((versions != UNKNOWN_VERSION) & ~sampled, "it has a policy version, and was not sampled"),
        (np.isfinite(advantages) & ~trained, "it has an advantage, and is not trained"),
        (~np.isfinite(advantages) & trained, "it is trained, and has no advantage"),
    ):
        yield from _where(step, tokens, wrong, says)
    counted = trained.copy()
    counted[tokens.offsets[:-1]] = False  # nothing predicts the first token of a sequence
    said = metrics.get("tokens")
    if said is not None and said != counted.sum():
        yield Fault(step.step, f"{counted.sum()} of its tokens are trained, and the trainer counted {said:g}")


def _versions(
    step: RecordedStep, tokens: TokenFile, metrics: Mapping[str, float], max_staleness: int | None
) -> Iterator[Fault]:
    newest = version_before(metrics)
    if newest is None:
        return
    versions, trained = _column(tokens, "versions"), _column(tokens, "trained")
    refused = [one.line for one in step.episodes if one.dropped_by == "no_such_version"]
    line_of = np.repeat(_column(tokens, "episodes"), np.diff(tokens.offsets))
    never = (versions > newest) & ~np.isin(line_of, refused)
    yield from _where(step, tokens, never, f"its policy version did not exist: the newest was {newest}")
    if max_staleness is not None:
        stale = trained & (versions != UNKNOWN_VERSION) & (newest - versions > max_staleness)
        yield from _where(
            step, tokens, stale, f"it is trained, and staler than training.max_staleness = {max_staleness}"
        )


def version_before(metrics: Mapping[str, float]) -> int | None:
    """Return the policy version that a step's update started from, or None if the metrics do not have it."""
    after = metrics.get("policy/version")
    return None if after is None else int(after) - (0 if metrics.get("step/skipped") else 1)


def _episode(step: RecordedStep, one: EpisodeRecord, sequences: Sequence[SequenceTokens]) -> Iterator[Fault]:
    sampled = sum(int(of.sampled.sum()) for of in sequences)
    if sampled != one.sampled_tokens:
        yield Fault(
            step.step, f"line {one.line + 1} says {one.sampled_tokens} sampled tokens, and {sampled} are", one.task
        )
    versions = {int(version) for of in sequences for version in np.unique(of.versions[of.sampled])} - {UNKNOWN_VERSION}
    if versions != set(one.versions):
        yield Fault(
            step.step, f"line {one.line + 1} says versions {list(one.versions)}, and {sorted(versions)} are", one.task
        )
    trained = sum(int(of.trained.sum()) for of in sequences)
    if trained and one.outcome not in ("trained", None):
        yield Fault(step.step, f"line {one.line + 1} says {one.outcome}, and {trained} tokens are trained", one.task)
    yield from _turn_reward_faults(step, one, sequences)
    for (number, first), (other, second) in combinations(zip(one.sequences, sequences, strict=True), 2):
        shorter = min(len(first.ids), len(second.ids))
        same = np.logical_and.accumulate(first.ids[:shorter] == second.ids[:shorter])
        twice = np.flatnonzero(same & first.trained[:shorter] & second.trained[:shorter])
        if len(twice):
            says = f"{len(twice)} tokens are trained here and in sequence {number} as well, from this one on"
            yield Fault(step.step, says, one.task, other, int(twice[0]))


def _turn_reward_faults(step: RecordedStep, one: EpisodeRecord, sequences: Sequence[SequenceTokens]) -> Iterator[Fault]:
    """Check that turn rewards are at sampled tokens."""
    if one.turn_rewards and len(one.turn_rewards) != len(sequences):
        says = f"line {one.line + 1} has turn rewards of {len(one.turn_rewards)} sequences, and it has {len(sequences)}"
        yield Fault(step.step, says, one.task)
        return
    for number, tokens, turns in zip(one.sequences, sequences, one.turn_rewards, strict=False):
        for at in () if turns is None else (turns.ends - 1).tolist():
            if at >= len(tokens.ids):
                says = f"line {one.line + 1} has a turn reward here, and the sequence has {len(tokens.ids)} tokens"
                yield Fault(step.step, says, one.task, number, at)
            elif not tokens.sampled[at]:
                yield Fault(step.step, "it has a turn reward, and was not sampled", one.task, number, at)


def _texts(
    step: RecordedStep, one: EpisodeRecord, sequences: Sequence[SequenceTokens], tokenizer: ChatTokenizer
) -> Iterator[Fault]:
    """Check that ids decode to the messages. Skipped if an episode branched, or its messages are not its replies."""
    spans = step.reply_spans(one)
    if len(sequences) != 1 or not spans:
        return
    (tokens,), (number,) = sequences, one.sequences
    yield from _prompt(step, one, tokens, spans[0].message, spans[0].start, tokenizer)
    for span in spans:
        ids = tokens.ids[span.start : span.end]
        if not _is_said(one.messages[span.message], ids, tokens.ids[: span.start], tokenizer):
            said, text = str(one.messages[span.message].get("content")), tokenizer.decode(ids)
            at = next(
                (n for n, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), min(len(said), len(text))
            )
            says = (
                f"tokens {span.start} to {span.end - 1} decode to {_excerpt(text, at)}, and message {span.message + 1} says "
                f"{_excerpt(said, at)}"
            )
            yield Fault(step.step, says, one.task, number, span.start)


def _prompt(
    step: RecordedStep, one: EpisodeRecord, tokens: SequenceTokens, messages: int, end: int, tokenizer: ChatTokenizer
) -> Iterator[Fault]:
    try:
        rendered = tokenizer.render(one.messages[:messages])
    except MessageDropped as error:  # in a run that was recorded before such a prompt became an error
        yield Fault(step.step, Exception.__str__(error), one.task, one.sequences[0])
        return
    if len(rendered) == end:
        for position in np.flatnonzero(rendered != tokens.ids[:end]):
            says = (
                f"its id is {tokens.ids[position]}, and the messages before the first reply make {rendered[position]}"
            )
            yield Fault(step.step, says, one.task, one.sequences[0], int(position))
        return
    text = tokenizer.decode(tokens.ids[:end], keep_special=True)  # rendered with tools, or by other means
    for number, message in enumerate(one.messages[:messages]):
        content = message.get("content")
        if isinstance(content, str) and tokenizer.decode(tokenizer.encode(content.strip())) not in text:
            says = f"message {number + 1} is not in what the tokens before the first reply decode to"
            yield Fault(step.step, says, one.task, one.sequences[0])


def _is_said(message: Message, ids: Tokens, prompt: Tokens, tokenizer: ChatTokenizer) -> bool:
    parsed = tokenizer.parse(ids, prompt)
    if all(message.get(name) == value for name, value in parsed.items() if name not in AS_SAMPLED):
        return True
    content = message.get("content")  # of an agent that has another format, or an environment that keeps less
    return isinstance(content, str) and bool(content.strip()) and content.strip() in tokenizer.decode(ids)


def _where(step: RecordedStep, tokens: TokenFile, wrong: Bools, says: str) -> Iterator[Fault]:
    places = np.flatnonzero(wrong)
    for place in places[:MOST_OF_ONE_KIND]:
        sequence = int(np.searchsorted(tokens.offsets, place, "right")) - 1
        task = step.episodes[int(_column(tokens, "episodes")[sequence])].task
        yield Fault(step.step, says, task, sequence, int(place - tokens.offsets[sequence]))
    if len(places) > MOST_OF_ONE_KIND:
        yield Fault(step.step, f"{says}: so it is of {len(places) - MOST_OF_ONE_KIND} more tokens")


def _column(tokens: TokenFile, name: str) -> NDArray[Any]:
    column = tokens.column(name)
    assert column is not None, "checked when the file was opened"
    return column


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - EXCERPT // 2)
    return ("…" if start else "") + repr(text[start : start + EXCERPT])
