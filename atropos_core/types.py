"""The vocabulary, in the order in which a run produces it: from Draw and Task to ScoredGroup and Batch.

Records are frozen dataclasses with numpy columns. Trailing comments give axes: T tokens of one rollout, G rollouts of one
task, S sequences of a batch, N tokens of a batch. Only masks say which tokens count: where a mask is False, the value at
the same position is 0 and has no meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Versions = NDArray[np.int32]
Message = Mapping[str, Any]  # OpenAI chat form: role, content, and any key that the chat template knows
Metrics = dict[str, float]

ABSTAINED = "abstained"  # metric, 1 for an episode that its environment did not score (`Score.abstains`)
UNKNOWN_VERSION = -1  # of a token whose client did not report a version
MOST_KEPT = 512  # tokens that top_p, top_k and min_p leave at a position, so that what is recorded of them is bounded
MOST_TIES = 64  # tokens that an engine may keep beyond them, being as likely as the last

Split = Literal["train", "test"]
Finish = Literal["stop", "length"]


def tokens(values: Sequence[int] | Tokens) -> Tokens:
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy.

    Logits are divided by the temperature. Then, in this order and as in vLLM: `min_p` keeps tokens with at least this share of the
    likeliest one's probability; `top_k` keeps this many of the likeliest; `top_p` keeps the fewest of these that hold this share of
    their joint probability. Each of them keeps at most MOST_KEPT tokens."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_ids: tuple[int, ...] = ()  # end a completion, in addition to the model's own end tokens; only for one call
    stop: tuple[str, ...] = ()  # texts that end a reply; a policy's `sample` handles them, since engines see only ids
    min_p: float = 0.0  # 0: none

    @property
    def truncated(self) -> bool:
        """True if the distribution is cut, so that logprobs are renormalised over the tokens that are kept."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0)

    @property
    def most_kept(self) -> int:
        """The most tokens that are kept at a position; 0: all."""
        return min(self.top_k or MOST_KEPT, MOST_KEPT) if self.truncated else 0

    def of_run(self) -> dict[str, Any]:
        """The values that a run sets, by name, as JSON; `stop` and `min_p` only if they are set, since older ends know neither."""
        kept = {name: value for name, value in vars(self).items() if name not in ("stop_ids", "stop", "min_p")}
        return kept | ({"stop": list(self.stop)} if self.stop else {}) | ({"min_p": self.min_p} if self.min_p else {})

    @classmethod
    def from_run(cls, values: Mapping[str, Any]) -> Sampling:
        return cls(**{**values, "stop": tuple(values.get("stop", ()))})


@dataclass(frozen=True)
class Task:
    """One problem of an environment. `id` is unique within its split."""

    id: str
    messages: tuple[Message, ...]  # the opening of the conversation
    answer: str | None = None  # the reply of an oracle; None if there is no such reply
    data: Mapping[str, Any] = field(default_factory=dict)  # anything the environment wants to keep


@dataclass(frozen=True)
class Draw:
    """The curriculum's decision to run one task. Every seed of its rollouts derives from `seed`."""

    id: int
    environment: str
    split: Split
    index: int
    seed: int


@dataclass(frozen=True)
class Kept:
    """The tokens that `top_p`, `top_k` and `min_p` kept at each of T positions: the ids of one position after those of another.
    A position without any was sampled from the whole distribution, or not sampled."""

    sizes: NDArray[np.int32]  # [T]
    token_ids: Tokens  # [K]

    def __post_init__(self) -> None:
        if self.sizes.ndim != 1 or self.sizes.min(initial=0) < 0 or self.token_ids.shape != (self.sizes.sum(),):
            raise DataError(
                f"sizes of kept tokens must be whole numbers that add up to the {self.token_ids.size} token ids"
            )

    @property
    def size_bytes(self) -> int:
        return self.sizes.nbytes + self.token_ids.nbytes

    def part(self, length: int) -> Kept:
        """Return what was kept at the first `length` positions."""
        sizes = self.sizes[:length]
        return Kept(sizes, self.token_ids[: sizes.sum()])

    @classmethod
    def joined(cls, length: int, parts: Iterable[tuple[int, Kept | None]]) -> Kept | None:
        """Return what was kept at `length` positions: in each part, from this position on. Parts are in order and do not overlap.
        None if nothing was cut in any of them."""
        there = [(start, kept) for start, kept in parts if kept is not None]
        if not there:
            return None
        sizes = np.zeros(length, np.int32)
        for start, kept in there:
            sizes[start : start + len(kept.sizes)] = kept.sizes
        return cls(sizes, np.concatenate([kept.token_ids for _, kept in there]))


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the layers of a mixture of experts chose while they computed these T positions. A position that was not
    computed (the last of a reply), or of which the engine does not say it, has none."""

    known: Bools  # [T]
    numbers: (
        NDArray[np.uint8] | NDArray[np.uint16]
    )  # [R, L, k] of the R known positions: of each of L layers, k experts

    def __post_init__(self) -> None:
        shape = (int(np.count_nonzero(self.known)), *self.numbers.shape[1:])
        if self.known.ndim != 1 or self.numbers.ndim != 3 or self.numbers.shape != shape or 0 in shape[1:]:
            raise DataError(
                f"routed experts must be [positions, layers, experts of a token] for the {shape[0]} known positions, not "
                f"{list(self.numbers.shape)}"
            )

    @property
    def size_bytes(self) -> int:
        return self.known.nbytes + self.numbers.nbytes

    def part(self, length: int) -> RoutedExperts:
        """Return those of the first `length` positions."""
        known = self.known[:length]
        return RoutedExperts(known, self.numbers[: np.count_nonzero(known)])

    @classmethod
    def joined(cls, length: int, parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
        """Return those of `length` positions. Each part has the first ones of them; where several know a position, the first counts,
        which is of when its token was sampled. None if no part knows any. Raises DataError for parts of several shapes."""
        there = [part for part in parts if part is not None]
        if not there:
            return None
        if len({part.numbers.shape[1:] for part in there}) > 1:
            raise DataError(
                "replies of one rollout come from models with other layers or experts: they cannot be joined"
            )
        known = np.zeros(length, np.bool_)
        dtype = np.result_type(*(part.numbers for part in there))
        made: NDArray[Any] = np.zeros((length, *there[0].numbers.shape[1:]), dtype)
        for part in (one.part(length) for one in there):
            at = np.flatnonzero(part.known)
            new = ~known[at]
            made[at[new]] = part.numbers[new]
            known[at] = True
        return cls(known, made[known])


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    tokens: Tokens  # [T]
    logprobs: Floats  # [T] of the sampled token, under the distribution that was sampled from
    policy_version: Versions  # [T]
    finish: Finish
    temperature: float
    truncated: bool = False
    kept: Kept | None = None  # of T positions; None if nothing was cut, or if the engine does not say what was kept
    experts: RoutedExperts | None = None  # of the prompt's positions and the T of the reply


@dataclass(frozen=True)
class TopK:
    """A teacher's likeliest tokens at each of T positions, any number per position. Position t holds the distribution that
    predicts `tokens[t]`: entries `[offsets[t], offsets[t + 1])` of the other columns."""

    offsets: NDArray[np.int64]  # [T + 1]
    token_ids: Tokens  # [K]
    logprobs: Floats  # [K]

    def __post_init__(self) -> None:
        offsets, size = self.offsets, len(self.token_ids)
        if (
            offsets.ndim != 1
            or not len(offsets)
            or offsets[0] != 0
            or offsets[-1] != size
            or (np.diff(offsets) < 0).any()
        ):
            raise DataError(f"a teacher's offsets must rise from 0 to its {size} token ids")
        if self.token_ids.shape != (size,) or self.logprobs.shape != (size,):
            raise DataError(f"a teacher has {self.logprobs.shape} logprobs for {self.token_ids.shape} token ids")
        if size and (not np.isfinite(self.logprobs).all() or self.token_ids.min() < 0):
            raise DataError("a teacher has a logprob that is not a finite number, or a token id below 0")

    @property
    def size_bytes(self) -> int:
        return self.offsets.nbytes + self.token_ids.nbytes + self.logprobs.nbytes


@dataclass(frozen=True)
class TurnRewards:
    """Rewards placed inside a rollout: each at the last token of the span that earned it, a turn of the policy or a step of one
    reply. A span begins after the previous one, or at the first sampled token.

    An episode's environment gives parts of `Episode.score`. In a scored group they are parts of the episode's entry in `rewards`
    as it was scored, so they have the weights of the run's rewards. The rest of that total is the outcome reward, which only the
    end of the episode earned (`atropos_core.turn_rewards.outcome_rewards`)."""

    ends: NDArray[np.int64]  # [K] rising strictly: the position after the span's last token, which was sampled
    values: NDArray[np.float64]  # [K]

    def __post_init__(self) -> None:
        ends, values = self.ends, self.values
        if not (isinstance(ends, np.ndarray) and isinstance(values, np.ndarray)):
            raise DataError(
                "turn rewards must be two numpy columns.",
                remedy="From plain numbers: atropos_core.turn_rewards.turn_rewards(ends, values); or Score(value, turns=[...]).",
            )
        if ends.dtype != np.int64 or values.dtype != np.float64 or ends.ndim != 1 or values.shape != ends.shape:
            raise DataError(
                f"turn rewards must be int64 ends and as many float64 values, not {ends.dtype}{list(ends.shape)} and "
                f"{values.dtype}{list(values.shape)}"
            )
        if len(ends) and (ends[0] < 1 or (ends[1:] <= ends[:-1]).any()):
            raise DataError(f"the ends of turn rewards must rise from 1 or more: {ends.tolist()!r:.200}")
        if not np.isfinite(values).all():
            raise DataError(f"turn rewards must be finite numbers: {values.tolist()!r:.200}")

    @property
    def size_bytes(self) -> int:
        return self.ends.nbytes + self.values.nbytes


@dataclass(frozen=True)
class Rollout:
    """One token history. Entry t of every column belongs to `tokens[t]`."""

    tokens: Tokens  # [T]
    sampled: Bools  # [T] sampled by the policy
    trained: Bools  # [T] counted by the loss
    logprobs: Floats | None  # [T], None if the client sent none
    policy_version: Versions  # [T]
    temperature: float
    truncated: bool = False
    advantages: Floats | None = None  # [T] from the environment; they replace what transforms compute
    ref_logprobs: Floats | None = None  # [T] of a reference model
    teacher: TopK | None = None  # of T positions
    sft: bool = False  # supervised data, not sampled: trained with an imitation loss
    kept: Kept | None = None  # of T positions; a truncated rollout can be trained only with it
    experts: RoutedExperts | None = None  # of T positions
    turns: TurnRewards | None = None  # parts of the episode's total; None: no reward was placed in this rollout
    # [K] of each unbroken run of sampled tokens: its number among those of the whole episode, by time. None in all rollouts of an
    # episode: the rollouts were sampled one after the other
    turn_order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ROLLOUT_COLUMNS[1:]:
            column = getattr(self, name)
            if column is not None and column.shape != (length,):
                raise DataError(f"rollout column {name!r} has shape {column.shape}, but there are {length} tokens")
        for name in ("logprobs", "ref_logprobs"):
            column = getattr(self, name)
            if column is not None and not np.isfinite(column).all():
                raise DataError(f"a rollout has a number in {name!r} that is not finite")
        if self.teacher is not None and len(self.teacher.offsets) != length + 1:
            raise DataError(f"a teacher has {len(self.teacher.offsets) - 1} positions, but there are {length} tokens")
        if self.kept is not None and len(self.kept.sizes) != length:
            raise DataError(f"kept tokens of {len(self.kept.sizes)} positions, but there are {length} tokens")
        if self.experts is not None and len(self.experts.known) != length:
            raise DataError(f"routed experts of {len(self.experts.known)} positions, but there are {length} tokens")
        if not (self.turns is None or isinstance(self.turns, TurnRewards)):
            raise DataError(f"a rollout has a {type(self.turns).__name__} as `turns`, not TurnRewards")
        if self.turns is not None and len(self.turns.ends):
            last = self.turns.ends - 1
            if last[-1] >= length:
                raise DataError(f"a turn reward ends at token {last[-1] + 1}, but there are {length} tokens")
            if not self.sampled[last].all():
                at = last[~self.sampled[last]][0]
                raise DataError(f"a turn reward is placed at token {at}, which the policy did not sample")
        if self.turn_order is not None:
            self._check_turn_order(self.turn_order)

    def _check_turn_order(self, order: NDArray[np.int64]) -> None:
        if not isinstance(order, np.ndarray) or order.dtype != np.int64 or order.ndim != 1:
            raise DataError("the turn order of a rollout must be an int64 column, one number for each turn")
        turns = int(np.count_nonzero(self.sampled & ~np.append(self.sampled[1:], False)))
        if len(order) != turns:
            raise DataError(f"a rollout has {turns} turns, and its turn order has {len(order)} numbers")
        if len(order) and (order[0] < 0 or (order[1:] <= order[:-1]).any()):
            raise DataError(f"the turn order of a rollout must rise from 0 or more: {order.tolist()!r:.200}")

    @property
    def size_bytes(self) -> int:
        columns = [getattr(self, name) for name in ROLLOUT_COLUMNS]
        size: int = sum(column.nbytes for column in columns if column is not None)
        size += 0 if self.turn_order is None else self.turn_order.nbytes
        return size + sum(
            more.size_bytes for more in (self.teacher, self.kept, self.experts, self.turns) if more is not None
        )


@dataclass(frozen=True)
class Score:
    """An environment's score of one reply."""

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    # no score: `value` is 0, and other rewards decide. If there are none, the episode is not trained
    abstains: bool = False
    # parts of `value`: a number for each turn of the policy, in order, or for spans of tokens one TurnRewards (or None) for each
    # rollout. None: the whole `value` was earned at the end
    turns: Sequence[float] | Sequence[TurnRewards | None] | None = None


@dataclass(frozen=True)
class Episode:
    """One run of an environment on a task, scored: one rollout, or several if the environment rewrites its history."""

    rollouts: tuple[Rollout, ...]
    score: float  # the environment's own
    correct: bool | None = None  # counted by accuracy; None if right and wrong do not apply
    parts: Mapping[str, float] = field(default_factory=dict)  # named parts of the score
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the whole conversation, for rewards and for people
    finish: str = "stop"


@dataclass(frozen=True)
class Failed:
    """A rollout that did not end in an episode. It is data: it keeps its position in the group."""

    cause: str  # one line, with what to do if that is known
    where: str = ""  # e.g. "rollout", "reward"
    trace: str = ""


@dataclass(frozen=True)
class ScoredGroup:
    """G episodes of one task, with rewards. Advantages are None until a transform sets them."""

    draw: Draw
    task: Task
    episodes: tuple[Episode, ...]  # [G] those that finished
    rewards: Floats  # [G]
    parts: Mapping[str, Floats] = field(default_factory=dict)  # [G] each
    failed: tuple[Failed, ...] = ()
    advantages: Floats | None = None  # [G]
    wire: Mapping[str, Any] = field(default_factory=dict)  # JSON that only clients of the old protocol understand

    def __post_init__(self) -> None:
        if self.rewards.shape != (len(self.episodes),):
            raise DataError(
                f"group of task {self.task.id!r}: {len(self.episodes)} episodes but rewards of shape {self.rewards.shape}"
            )
        if not np.isfinite(self.rewards).all():
            raise DataError(f"group of task {self.task.id!r}: rewards {self.rewards.tolist()} are not all finite")

    @property
    def size_bytes(self) -> int:
        """Bytes of the token columns and of `wire` as JSON, plus one kilobyte per message as an allowance for Python's
        overhead."""
        size = sum(rollout.size_bytes for episode in self.episodes for rollout in episode.rollouts)
        size += len(json.dumps(self.wire)) if self.wire else 0
        return size + 1024 * (1 + sum(len(episode.messages) for episode in self.episodes))

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version of any sampled token in the group. None if no token has a known version."""
        versions = [
            int(known.min())
            for episode in self.episodes
            for rollout in episode.rollouts
            if len(known := rollout.policy_version[rollout.sampled & (rollout.policy_version != UNKNOWN_VERSION)])
        ]
        return min(versions, default=None)

    def with_advantages(self, advantages: Floats) -> ScoredGroup:
        return replace(self, advantages=np.asarray(advantages, dtype=np.float32))


@dataclass(frozen=True)
class Column:
    """An extra column of a batch, so that new losses can add inputs without changing Batch."""

    axis: Literal["token", "sequence", "group"]
    values: NDArray[Any]
    present: Bools


@dataclass(frozen=True)
class Ragged:
    """An extra column with any number of values per token: token n has entries `[offsets[n], offsets[n + 1])`."""

    offsets: NDArray[np.int64]  # [N + 1]
    values: NDArray[Any]

    def select(self, at: NDArray[np.int64]) -> Ragged:
        """Return the column of only these tokens, in this order."""
        counts = np.diff(self.offsets)[at]
        offsets = offsets_of(counts)
        return Ragged(offsets, self.values[np.repeat(self.offsets[at] - offsets[:-1], counts) + np.arange(offsets[-1])])


@dataclass(frozen=True)
class Batch:
    """S packed sequences: sequence s is `[offsets[s], offsets[s + 1])` of every token column."""

    tokens: Tokens  # [N]
    offsets: NDArray[np.int64]  # [S + 1]
    sampled: Bools  # [N]
    trained: Bools  # [N]
    logprobs: Floats  # [N] 0 where not sampled
    has_logprobs: Bools  # [S]
    policy_version: Versions  # [N]
    advantages: Floats  # [N] 0 where not trained
    temperature: Floats  # [S]
    truncated: Bools  # [S]
    group: NDArray[np.int32]  # [S] sequences of one task share a number
    version: int  # the policy version that this batch updates
    columns: Mapping[str, Column] = field(default_factory=dict)
    ragged: Mapping[str, Ragged] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def kept_sizes(self) -> NDArray[np.int64]:
        """[N] How many tokens top_p, top_k and min_p kept; 0 if nothing was cut, or if that is not known."""
        kept = self.ragged.get(KEPT)
        return np.zeros(len(self.tokens), np.int64) if kept is None else np.diff(kept.offsets)

    @property
    def unknown_cut(self) -> Bools:
        """[S] True for a truncated sequence whose sender does not say which tokens were kept."""
        if not self.truncated.any():
            return self.truncated
        unknown: Bools = self.truncated & (np.add.reduceat(self.kept_sizes, self.offsets[:-1]) == 0)
        return unknown

    @property
    def episode(self) -> NDArray[np.int32]:
        """[S]: sequences of one episode share a number, and count as one in a mean over sequences. Taken from the column
        "episode"; without that column, each sequence is its own episode."""
        given = self.columns.get("episode")
        return np.arange(self.sequences, dtype=np.int32) if given is None else given.values

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Return a batch of only these sequences, in this order, with their token, sequence, group and ragged columns."""
        rows = np.asarray(indices, dtype=np.int64)
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        at = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        picked = {"token": at, "sequence": rows}
        return replace(
            self,
            **{name: getattr(self, name)[at] for name in TOKEN_COLUMNS},
            **{name: getattr(self, name)[rows] for name in SEQUENCE_COLUMNS},
            offsets=offsets_of(self.lengths[rows]),
            columns={
                name: column
                if column.axis == "group"
                else replace(
                    column, values=column.values[picked[column.axis]], present=column.present[picked[column.axis]]
                )
                for name, column in self.columns.items()
            },
            ragged={name: column.select(at) for name, column in self.ragged.items()},
        )


def offsets_of(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [len + 1] offsets: where each run of `counts` entries begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


ROLLOUT_COLUMNS = ("tokens", "sampled", "trained", "logprobs", "policy_version", "advantages", "ref_logprobs")
TOKEN_COLUMNS = ("tokens", "sampled", "trained", "logprobs", "policy_version", "advantages")
SEQUENCE_COLUMNS = ("has_logprobs", "temperature", "truncated", "group")
KEPT = "kept_token_ids"  # a ragged column of a batch: `Rollout.kept`
EXPERTS = "experts"  # a token column of a batch, [N, L, k]: `Rollout.experts`
TURNS = "turn_rewards"  # a token column of a batch, float64, present at the last token of a span: `Rollout.turns`
