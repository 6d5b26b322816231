"""Make the groups of a recorded step again, as rewards and transforms get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from atropos_core.config.component import RunReward
from atropos_core.errors import DataError
from atropos_core.types import Draw, Episode, Message, Rollout, ScoredGroup, Task
from atropos_records.rollout_records import EpisodeRecord, RecordedStep
from atropos_records.step_tokens import SequenceTokens, sequences_of

SEED = 0  # of a draw: it is not recorded, and nothing is sampled again


@dataclass(frozen=True)
class RecordedGroup:
    """A group of a recorded step, with the rewards that it had before any transform changed them."""

    step: int
    group: ScoredGroup
    lines: Sequence[EpisodeRecord]  # [G] of the group's episodes
    failed: int  # rollouts without an episode

    @property
    def was_leased(self) -> bool:
        """True if the step's transforms got it: it was trained, or a transform left it out."""
        first = self.lines[0]
        return first.outcome in ("trained", "flat", None) or first.dropped_by.startswith("transform.")

    @property
    def was_trained(self) -> bool:
        return self.lines[0].outcome in ("trained", None)

    def as_scored(self) -> ScoredGroup:
        """Return the group as the transforms got it. The masks of a group that was not trained are not recorded: all sampled tokens
        count."""
        if self.was_trained:
            return replace(self.group, advantages=None)
        episodes = tuple(
            replace(episode, rollouts=tuple(replace(one, trained=one.sampled) for one in episode.rollouts))
            for episode in self.group.episodes
        )
        return replace(self.group, episodes=episodes, advantages=None)


def without_turns(group: ScoredGroup) -> ScoredGroup:
    """Return the group without rewards inside its rollouts."""
    if all(one.turns is None for episode in group.episodes for one in episode.rollouts):
        return group
    episodes = tuple(
        replace(episode, rollouts=tuple(replace(one, turns=None) for one in episode.rollouts))
        for episode in group.episodes
    )
    return replace(group, episodes=episodes)


def turns_of_environment(rewards: Mapping[str, RunReward]) -> bool:
    """True if recorded turn rewards are as the environment gave them: no other reward and no weight was mixed in."""
    return {name: (one.use, one.weight) for name, one in rewards.items()} == {"environment": ("environment", 1.0)}


class NotRecorded(dict[str, Any]):
    """Stands for `Task.data`, which is not recorded: reading it raises DataError."""

    def _refuse(self, *_: object) -> NoReturn:
        raise DataError(
            "the task's data are not recorded: `atropos rescore --environments` opens the run's environments, which have them."
        )

    __getitem__ = __contains__ = __iter__ = get = keys = values = items = _refuse


class NoTokens(tuple[Rollout, ...]):
    """Stands for `Episode.rollouts` of a step without tokens: reading them raises DataError."""

    def _refuse(self, *_: object) -> NoReturn:
        raise DataError(
            "the rollouts' tokens are not recorded: a run records them with sink.jsonl.tokens = true, up to sink.jsonl.tokens_max_mb."
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse


def recorded_groups(step: RecordedStep) -> Iterator[RecordedGroup]:
    """Yield the groups of a step that have episodes, in their recorded order. Raises DataError for damaged records."""
    sequences = _sequences(step)
    by_draw: dict[int, list[EpisodeRecord]] = {}
    for one in step.episodes:
        by_draw.setdefault(one.draw, []).append(one)
    for draw, lines in by_draw.items():
        ended = [one for one in lines if not one.failed]
        if ended:
            yield RecordedGroup(step.step, _group(step, draw, ended, sequences), ended, len(lines) - len(ended))


def _sequences(step: RecordedStep) -> Sequence[SequenceTokens] | None:
    """Return all sequences of a step, with each column read once; None if the step has none."""
    if step.tokens is None:
        return None
    columns = {name: column for name in step.tokens.names if (column := step.tokens.column(name)) is not None}
    step.tokens.column.cache_clear()  # the file refers to itself, and would keep them until the garbage collector comes
    return sequences_of(columns)


def _group(
    step: RecordedStep, draw: int, lines: Sequence[EpisodeRecord], sequences: Sequence[SequenceTokens] | None
) -> ScoredGroup:
    first = lines[0]
    rewards = [one.scored_reward for one in lines]
    if any(reward is None for reward in rewards):
        raise DataError(f"{step.path}: an episode of task {first.task!r} has no reward.")
    advantages = [one.advantage for one in lines]
    known = first.outcome == "trained" and all(one is not None for one in advantages)
    own = first.outcome == "trained" and not known  # of each token: an environment or a transform gave them
    return ScoredGroup(
        Draw(draw, first.environment, "test" if first.split == "test" else "train", first.task_index or 0, SEED),
        Task(first.task, opening(first.messages), first.answer, NotRecorded()),
        tuple(_episode(step, one, sequences, own) for one in lines),
        np.array(rewards, np.float32),
        {name: np.array([one.parts[name] for one in lines], np.float32) for name in _shared_parts(lines)},
        advantages=np.array(advantages, np.float32) if known else None,
    )


def _shared_parts(lines: Sequence[EpisodeRecord]) -> list[str]:
    return [name for name in lines[0].parts if all(name in one.parts for one in lines)]


def opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages before the first reply."""
    replies = (at for at, one in enumerate(messages) if one.get("role") == "assistant")
    return tuple(messages[: next(replies, len(messages))])


def _episode(
    step: RecordedStep, line: EpisodeRecord, sequences: Sequence[SequenceTokens] | None, own_advantages: bool
) -> Episode:
    if sequences is None:
        rollouts: tuple[Rollout, ...] = ()
    elif line.sequences and not 0 <= min(line.sequences) <= max(line.sequences) < len(sequences):
        raise DataError(
            f"{step.path}, line {line.line + 1}: it names sequence {max(line.sequences)}, but {step.tokens_path.name} has "
            f"{len(sequences)}.",
            remedy="The two files are not of one run: copy both again.",
        )
    else:
        turns = line.turn_rewards or (None,) * len(line.sequences)
        if len(turns) != len(line.sequences):
            raise DataError(f"{step.path}, line {line.line + 1}: it has turn rewards of {len(turns)} sequences.")
        orders = line.turn_order or (None,) * len(line.sequences)
        if len(orders) != len(line.sequences):
            raise DataError(f"{step.path}, line {line.line + 1}: it has a turn order of {len(orders)} sequences.")
        rollouts = tuple(
            replace(
                rollout_of(sequences[number], own_advantages),
                turns=placed,
                turn_order=None if order is None else np.array(order, np.int64),
            )
            for number, placed, order in zip(line.sequences, turns, orders, strict=True)
        )
    return Episode(
        rollouts,
        line.score or 0.0,
        line.correct,
        dict(line.parts),
        dict(line.metrics),
        line.messages,
        line.finish or "stop",
    )


def rollout_of(tokens: SequenceTokens, own_advantages: bool = False) -> Rollout:
    """Return the rollout as the batch had it. `trained` is what was recorded: False in a group that was not trained.
    `own_advantages`: with the recorded advantages of its tokens, which are as the loss took them."""
    known = np.isfinite(tokens.logprobs)
    reference = tokens.ref_logprobs
    has_logprobs = bool(known[tokens.sampled].all()) if tokens.sampled.any() else bool(known.any())
    return Rollout(
        tokens.ids,
        tokens.sampled,
        tokens.trained,
        np.where(known, tokens.logprobs, np.float32(0)) if has_logprobs else None,
        tokens.versions,
        tokens.temperature,
        tokens.truncated,
        np.where(tokens.trained, tokens.advantages, np.float32(0)) if own_advantages else None,
        ref_logprobs=None if reference is None or np.isnan(reference).any() else reference,
        kept=tokens.kept,
        experts=tokens.experts,
    )
