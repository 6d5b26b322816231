"""Turn an environment's group into episodes: find which of its tokens were sampled, and with which logprobs.

Logprobs that the environment returns are not trusted. Each sequence is looked up among everything that was sampled for the group:
by its ids, then by its text, ignoring white space and special tokens. A match is trained with the ids that were sampled; what
follows them was not sampled. A sequence without a match is trained without logprobs. If only its prompt is to be trained, it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import (
    UNKNOWN_VERSION,
    Bools,
    Completion,
    Episode,
    Failed,
    Floats,
    Kept,
    Rollout,
    Tokens,
    Versions,
)

MASKED = -100


@dataclass(frozen=True)
class History:
    """A prompt with one reply. Entry t of every column belongs to `tokens[t]`."""

    tokens: Tokens
    sampled: Bools
    logprobs: Floats
    versions: Versions
    temperature: float
    truncated: bool
    kept: Kept | None


@dataclass
class Sampled:
    """Everything that was sampled for one group."""

    histories: list[History] = field(default_factory=list)

    def add(self, prompt: Tokens, completion: Completion) -> None:
        """Add a reply. If the prompt begins with an earlier history, what was sampled in that one is kept."""
        size, reply = len(prompt), len(completion.tokens)
        before = self.longest_beginning(prompt)
        kept = 0 if before is None else len(before.tokens)
        columns = _columns(size + reply)
        if before is not None:
            for column, had in zip(columns, (before.sampled, before.logprobs, before.versions), strict=True):
                column[:kept] = had
        columns[0][size:] = True
        columns[1][size:] = completion.logprobs
        columns[2][size:] = completion.policy_version
        tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
        truncated = completion.truncated or (before is not None and before.truncated)
        cuts = Kept.joined(len(tokens), [(0, None if before is None else before.kept), (size, completion.kept)])
        self.histories.append(History(tokens, *columns, completion.temperature, truncated, cuts))

    def rollouts(self) -> tuple[Rollout, ...]:
        """Each history as a rollout without trained tokens, to record an evaluation."""
        return tuple(
            Rollout(
                one.tokens,
                one.sampled,
                one.sampled,
                one.logprobs,
                one.versions,
                one.temperature,
                one.truncated,
                kept=one.kept,
            )
            for one in self.histories
        )

    def longest_beginning(self, tokens: Tokens) -> History | None:
        """The longest history that these tokens begin with."""
        found = [one for one in self.histories if _starts(tokens, one.tokens)]
        return max(found, key=lambda one: len(one.tokens), default=None)


@dataclass
class Counts:
    """Numbers of sequences, since this process started."""

    by_ids: int = 0
    by_text: int = 0
    without_logprobs: int = 0
    of_prompts: int = 0  # failed: only a prompt was to be trained


class Matcher:
    """Reads groups. `decode` gives the text of ids, without special tokens."""

    def __init__(self, decode: Callable[[Tokens], str]) -> None:
        self.counts = Counts()
        self._decode = decode

    def episodes(self, group: Mapping[str, Any], sampled: Sampled) -> list[Episode | Failed]:
        """An episode or failure for each sequence. Raises DataError for a group that cannot be trained."""
        rows, masks, scores = (list(group.get(name) or ()) for name in ("tokens", "masks", "scores"))
        if not len(rows) == len(masks) == len(scores):
            raise DataError(f"a group has {len(rows)} sequences, {len(masks)} masks and {len(scores)} scores")
        return [self._episode(group, at, sampled) for at in range(len(rows))]

    def _episode(self, group: Mapping[str, Any], at: int, sampled: Sampled) -> Episode | Failed:
        overrides = {**dict(group.get("group_overrides") or {}), **dict(_at(group, "overrides", at) or {})}
        tokens = np.asarray(group["tokens"][at], np.int32)
        masks = np.asarray(group["masks"][at], np.int32)
        if tokens.ndim != 1 or not len(tokens) or masks.shape != tokens.shape:
            raise DataError(f"sequence {at} of a group has tokens {tokens.shape} and masks {masks.shape}")
        trained = masks == tokens
        if not trained.any():
            others = masks[masks != MASKED]
            why = (
                f"the mask of a trained token is its id, but here it is {others[0]}"
                if len(others)
                else "each is masked"
            )
            raise DataError(f"sequence {at} of a group has no token to train: {why}")
        sft = bool(overrides.get("sft"))
        rollout = self._rollout(tokens, trained, sampled, sft)
        if (
            rollout is not None
            and rollout.logprobs is None
            and not sft
            and any(one.truncated for one in sampled.histories)
        ):
            return Failed(
                f"sequence {at} is not among the replies that were sampled for it, and those were sampled with top_p, top_k or min_p: "
                "which tokens these kept is not known for it. Have the environment return the tokens that it got, or sample with "
                "top_p = 1",
                "rollout_group",
            )
        if rollout is None:
            return Failed(
                f"sequence {at} has no reply: what is to be trained of it is part of a prompt", "rollout_group"
            )
        more: dict[str, Any] = {}
        own = _at(group, "advantages", at)
        if overrides.get("set_advantage_to_zero"):
            more["advantages"] = np.zeros(len(rollout.tokens), np.float32)
        elif isinstance(own, list) and len(own) == len(rollout.tokens):
            more["advantages"] = np.where(rollout.trained, np.asarray(own, np.float32), 0).astype(np.float32)
        if overrides.get("temperature") is not None and rollout.logprobs is None:
            more["temperature"] = float(overrides["temperature"])
        messages = _at(group, "messages", at)
        said = tuple(one for one in messages if isinstance(one, dict)) if isinstance(messages, list) else ()
        made = Rollout(**{**vars(rollout), **more})
        if not said:
            said = ({"role": "assistant", "content": self._decode(made.tokens[made.trained])},)
        return Episode((made,), float(group["scores"][at]), messages=said)

    def _rollout(self, tokens: Tokens, trained: Bools, sampled: Sampled, sft: bool) -> Rollout | None:
        found = None if sft else self._by_ids(tokens, trained, sampled) or self._by_text(tokens, trained, sampled)
        if found is not None:
            return found
        if not sft and self._is_of_a_prompt(tokens, trained, sampled):
            self.counts.of_prompts += 1
            return None
        self.counts.without_logprobs += not sft
        versions = np.full(len(tokens), UNKNOWN_VERSION, np.int32)
        known = [int(one.versions[one.sampled].min()) for one in sampled.histories]
        if known:
            versions[trained] = min(known)
        temperature = sampled.histories[0].temperature if sampled.histories else 1.0
        return Rollout(
            tokens, np.zeros_like(trained) if sft else trained, trained, None, versions, temperature, sft=sft
        )

    def _by_ids(self, tokens: Tokens, trained: Bools, sampled: Sampled) -> Rollout | None:
        """Match a sequence that begins with a whole history, or is the beginning of one."""
        found = sampled.longest_beginning(tokens)
        if found is None:
            found = next((one for one in sampled.histories if _starts(one.tokens, tokens)), None)
        if found is None:
            return None
        return self._of(found, tokens, trained, "by_ids")

    def _by_text(self, tokens: Tokens, trained: Bools, sampled: Sampled) -> Rollout | None:
        """Match a sequence whose text begins with a history's text."""
        text = self._text(tokens)
        found = [(len(said), one) for one in sampled.histories if text.startswith(said := self._text(one.tokens))]
        if not found:
            return None
        history = max(found, key=lambda one: one[0])[1]
        return self._of(history, history.tokens, self._moved(tokens, trained, history), "by_text")

    def _is_of_a_prompt(self, tokens: Tokens, trained: Bools, sampled: Sampled) -> bool:
        """True if a history's text begins with the sequence's text, and none of its trained text was sampled."""
        text, spans = self._text(tokens), self._spans(tokens, trained)
        return any(
            self._text(one.tokens).startswith(text)
            and not any(_overlap(span, other) for span in spans for other in self._spans(one.tokens, one.sampled))
            for one in sampled.histories
        )

    def _moved(self, tokens: Tokens, trained: Bools, history: History) -> Bools:
        """Flags of the history's replies that are trained: those with most of their text trained in the sequence."""
        spans = self._spans(tokens, trained)
        result = np.zeros(len(history.tokens), np.bool_)
        for (begin, end), (low, high) in zip(
            _runs(history.sampled), self._spans(history.tokens, history.sampled), strict=True
        ):
            covered = sum(_overlap((low, high), span) for span in spans)
            is_empty = high == low and end == len(result)  # only an end of turn
            result[begin:end] = is_empty or 2 * covered > high - low
        return result

    def _spans(self, tokens: Tokens, flags: Bools) -> list[tuple[int, int]]:
        """The begin and end, in the text, of each run of True."""
        return [(self._size(tokens[:a]), self._size(tokens[:b])) for a, b in _runs(flags)]

    def _size(self, tokens: Tokens) -> int:
        return len(self._text(tokens))

    def _text(self, tokens: Tokens) -> str:
        return "".join(self._decode(tokens).split()) if len(tokens) else ""

    def _of(self, history: History, tokens: Tokens, trained: Bools, how: str) -> Rollout | None:
        """A rollout of these tokens. None if nothing that is to be trained was sampled."""
        size = min(len(tokens), len(history.tokens))
        columns = _columns(len(tokens))
        for column, had in zip(columns, (history.sampled, history.logprobs, history.versions), strict=True):
            column[:size] = had[:size]
        counted = trained & columns[0]
        if not counted.any():
            return None
        setattr(self.counts, how, getattr(self.counts, how) + 1)
        kept = None if history.kept is None else Kept.joined(len(tokens), [(0, history.kept.part(size))])
        return Rollout(
            tokens, columns[0], counted, columns[1], columns[2], history.temperature, history.truncated, kept=kept
        )


def _columns(length: int) -> tuple[Any, Any, Any]:
    """Empty columns: sampled flags, logprobs, versions."""
    return np.zeros(length, np.bool_), np.zeros(length, np.float32), np.zeros(length, np.int32)


def _runs(flags: Bools) -> list[tuple[int, int]]:
    """The begin and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)


def _starts(tokens: Tokens, with_these: Tokens) -> bool:
    size = len(with_these)
    return size <= len(tokens) and bool((tokens[:size] == with_these).all())


def _at(group: Mapping[str, Any], name: str, at: int) -> Any:
    rows: Sequence[Any] = group.get(name) or ()
    return rows[at] if isinstance(rows, list) and at < len(rows) else None
