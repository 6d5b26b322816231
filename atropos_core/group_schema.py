"""The schema of groups, for groups from HTTP, shared memory, a journal or an environment in this process.

A group that passes can be trained: 32-bit arithmetic does not overflow on it, and it does not use a name of the run's own.
Policy versions are checked elsewhere (`atropos_core.rollouts.policy_versions`), because only a trainer knows which existed.

Token columns are checked by their extremes over all rollouts at once (by the position of the largest value, which numpy finds at
a third of the cost of the value). The wrong value is searched for only if there is one. A group of 8 kB in one to eight rollouts
costs 12 to 26 us, a quarter of decoding its frame (CPU time of one core of a busy machine). A server skips this check for most
groups (its `fast_check`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.types import (
    MOST_KEPT,
    MOST_TIES,
    Bools,
    Draw,
    Episode,
    Failed,
    Floats,
    Kept,
    Rollout,
    RoutedExperts,
    Sampling,
    ScoredGroup,
    Task,
    Tokens,
    TopK,
    TurnRewards,
)

LARGEST_REWARD = 1e9  # of rewards, scores, their parts and advantages: its fourth power still fits 32 bits
LARGEST_METRIC = 1e30
LOGPROB_ROUNDING = (
    1e-3  # a logprob above 0 by less is rounding: in 32 bits log-softmax is off by 6e-5 at logits of 1,000
)
LOWEST_LOGPROB = -1e4  # servers that limit logprobs use -9999
LEAST_TEMPERATURE, MOST_TEMPERATURE = (
    0.01,
    100.0,
)  # in addition to 0, which is greedy; vLLM also raises lower values to 0.01
MOST_CHARACTERS = 500  # of a name that is kept for every group: an environment, a task's id
MOST_NAME = 200  # characters of a metric's or part's name
LOOK_S = 0.2  # at tasks that are made as they are read, before a run begins
MAX_DEPTH = 64  # of lists and mappings in what is left to environments
ID_BOUND = 1 << 31  # token ids and versions are below it
MOST_STOP_IDS = 4096  # of one call
MOST_STOPS = 16  # texts that end a reply
NUMBER_BOUND = 1 << 63  # numbers of draws and seeds are below it
SPLITS = ("train", "test")

# Means of metrics and parts are recorded as eval/NAME and reward/NAME, next to these metrics of the run.
RUN_METRICS = frozenset({"reward", "accuracy", "problems", "failed", "version"})
RUN_SECTIONS = (
    "alignment/", "bridge/", "curriculum/", "eval/", "groups/", "health/", "pass@", "policy/", "reward/", "rollouts/",
    "staleness/", "step/", "time/", "tokens/", "trainer/",
)  # fmt: skip
RUN_PARTS = frozenset({"mean", "std"})

_INT, _BOOL, _FLOAT = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_BOUNDS = {
    "logprobs": (LOWEST_LOGPROB, LOGPROB_ROUNDING),
    "ref_logprobs": (LOWEST_LOGPROB, LOGPROB_ROUNDING),
    "advantages": (-LARGEST_REWARD, LARGEST_REWARD),
}
_DTYPES = {
    "tokens": _INT, "sampled": _BOOL, "trained": _BOOL, "policy_version": _INT, **dict.fromkeys(_BOUNDS, _FLOAT)
}  # fmt: skip
_EXPERTS = (np.dtype(np.uint8), np.dtype(np.uint16))
_TEACHER = (np.dtype(np.int64), np.dtype(np.int32), _FLOAT)

Named = Callable[[str, int], str]  # a column and a token in it -> the sender's name of that value


@dataclass(slots=True, eq=False)  # not frozen: that would take three times as long to make
class TokenColumns:
    """The token columns of one rollout, or of several concatenated: [N] each, `teacher` of N positions."""

    tokens: Tokens
    sampled: Bools
    trained: Bools
    logprobs: Floats | None
    ref_logprobs: Floats | None
    advantages: Floats | None
    teacher: TopK | None


def check_group(group: Any, vocabulary: int = 0, *, episodes: bool = True) -> None:
    """Raises DataError, with the field and the value, for a group that must not be trained. `vocabulary` 0: unknown. Without
    `episodes`, a group whose rollouts all failed passes."""
    if not isinstance(group, ScoredGroup):
        raise DataError(f"a {type(group).__name__} is no ScoredGroup")
    check_draw(group.draw)
    check_task(group.task)
    given = group.episodes
    if not isinstance(given, tuple) or not (given or not episodes):
        raise DataError("the group has no episodes")
    check_numbers("rewards", group.rewards, len(given))
    if group.advantages is not None:
        check_numbers("advantages", group.advantages, len(given))
    if not isinstance(group.parts, Mapping):
        _refuse("parts", group.parts, "must be a mapping")
    for name, part in group.parts.items():
        check_part_name(name)
        check_numbers(f"parts[{name!r}]", part, len(given))
    if type(group.wire) is not dict or group.wire:
        _check_tree("wire", group.wire)
    if not isinstance(group.failed, tuple):
        _refuse("failed", group.failed, "must be a tuple")
    for failure in group.failed:
        check_failed(failure)
    rollouts: list[Rollout] = []
    for number, episode in enumerate(given):
        if not _is_plain(episode):
            _check_scored(f"episodes[{number}]", episode)
        rollouts += episode.rollouts
    if _check_rollouts(rollouts, vocabulary, lambda at: _rollout_name(given, at)):
        for number, rollout in enumerate(rollouts):
            if rollout.temperature == 0:
                check_greedy(_rollout_name(given, number), columns_of(rollout), sft=rollout.sft)
    for number, episode in enumerate(given):
        if len(episode.rollouts) > 1 or episode.rollouts[0].turn_order is not None:
            _check_turn_order(f"episodes[{number}]", episode.rollouts)


def check_kept_is_known(group: ScoredGroup) -> None:
    """Raises DataError for a truncated rollout to train that does not say which tokens were kept."""
    rollouts = [rollout for episode in group.episodes for rollout in episode.rollouts]
    for number, one in enumerate(rollouts):
        if one.truncated and not one.sft and one.trained.any() and (one.kept is None or not len(one.kept.token_ids)):
            raise DataError(
                f"{_rollout_name(group.episodes, number)} was sampled with top_p, top_k or min_p, and does not say which tokens "
                "these kept. Its logprobs are renormalised over them: without them, the update would be biased.",
                remedy="Send the rollout's `kept`, a Kept(sizes, token_ids): how many tokens were kept at each position, and their ids. "
                "Or sample with top_p = 1, top_k = 0 and min_p = 0.",
            )


def check_episode(episode: Any, vocabulary: int = 0) -> None:
    """Check one episode as `check_group` does, but allow greedy ones, which evaluations sample. Raises DataError."""
    _check_scored("episode", episode)
    _check_rollouts(episode.rollouts, vocabulary, lambda at: f"rollouts[{at}]")
    _check_turn_order("episode", episode.rollouts)


def check_draw(draw: Any) -> None:
    """Raises DataError for anything but a valid Draw."""
    if not isinstance(draw, Draw):
        raise DataError(f"a {type(draw).__name__} is not a draw")
    for name, number in (("id", draw.id), ("index", draw.index), ("seed", draw.seed)):
        if type(number) is not int or not -NUMBER_BOUND <= number < NUMBER_BOUND:
            _refuse(f"draw.{name}", number, "must be a whole number of 64 bits")
    check_name("draw.environment", draw.environment)
    if type(draw.split) is not str or draw.split not in SPLITS:
        _refuse("draw.split", draw.split, "must be 'train' or 'test'")


def check_task(task: Any) -> None:
    """Raises DataError for anything but a valid Task."""
    if not isinstance(task, Task):
        raise DataError(f"a {type(task).__name__} is not a task")
    check_name("task.id", task.id)
    if type(task.messages) is not tuple or task.messages:
        _check_messages("task.messages", task.messages)
    if task.answer is not None:
        _check_text("task.answer", task.answer)
    if type(task.data) is not dict or task.data:
        _check_tree("task.data", task.data)


def check_tasks(environment: str, tasks: Sequence[Task], most: int = 100_000) -> None:
    """Check that the first `most` tasks have different ids and pass `check_task`. Of lazy tasks, check as many as can be made in
    LOOK_S. Raises DataError."""
    seen: dict[str, int] = {}
    until = time.monotonic() + LOOK_S
    for index in range(min(len(tasks), most)):
        if time.monotonic() > until:
            return
        task = tasks[index]
        try:
            check_task(task)
        except DataError as error:
            raise DataError(f"environment {environment!r}, task {index}: {Exception.__str__(error)}") from None
        if (first := seen.setdefault(task.id, index)) != index:
            raise DataError(
                f"environment {environment!r}: tasks {first} and {index} of one split both have the id {task.id!r:.100}.",
                remedy="An id names one task, in records, curricula and groups: number them.",
            )


def check_sampling(sampling: Any) -> None:
    """Raises DataError for anything but a valid Sampling."""
    if not isinstance(sampling, Sampling):
        raise DataError(f"a {type(sampling).__name__} says nothing of sampling")
    for name, least in (("max_tokens", 1), ("top_k", 0)):
        number = getattr(sampling, name)
        if type(number) is not int or not least <= number < ID_BOUND:
            _refuse(f"sampling.{name}", number, f"must be a whole number of {least} or more")
    check_temperature("sampling.temperature", sampling.temperature)
    if not _is_number(sampling.top_p, 0.0, 1.0) or not sampling.top_p:
        _refuse("sampling.top_p", sampling.top_p, "must be a number above 0 and at most 1")
    if not _is_number(sampling.min_p, 0.0, 1.0):
        _refuse("sampling.min_p", sampling.min_p, "must be a number from 0 to 1")
    if sampling.top_k > MOST_KEPT:
        _refuse("sampling.top_k", sampling.top_k, f"must be 0 or at most {MOST_KEPT}: what is kept is recorded")
    stops = sampling.stop_ids
    if (
        type(stops) is not tuple
        or len(stops) > MOST_STOP_IDS
        or not all(type(one) is int and 0 <= one < ID_BOUND for one in stops)
    ):
        _refuse("sampling.stop_ids", stops, f"must be a tuple of at most {MOST_STOP_IDS:,} token ids")
    texts = sampling.stop
    if type(texts) is not tuple or len(texts) > MOST_STOPS or not all(type(one) is str and one for one in texts):
        _refuse("sampling.stop", texts, f"must be a tuple of at most {MOST_STOPS} texts that are not empty")
    for one in texts:
        check_name("sampling.stop", one)


def check_temperature(name: str, value: Any) -> None:
    """Raises DataError for an invalid temperature. 0 is greedy: its logprobs are those of temperature 1."""
    if not (_is_number(value, LEAST_TEMPERATURE, MOST_TEMPERATURE) or (_is_number(value, 0, 0))):
        _refuse(name, value, f"must be 0 (greedy), or a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}")


def check_greedy(name: str, columns: TokenColumns, *, sft: bool) -> None:
    """Raises DataError for a rollout of temperature 0 whose tokens would be trained as if they had been sampled."""
    own = columns.advantages
    if sft or not columns.trained.any() or (own is not None and not own[columns.trained].any()):
        return
    raise DataError(
        f"{name}.temperature is 0, and its tokens are to be trained: the likeliest token was taken each time, so they are "
        "no sample of the policy, and a ratio against their logprobs means nothing.",
        remedy=f"Sample what is trained at a temperature from {LEAST_TEMPERATURE:g}, or train nothing of this rollout.",
    )


def check_numbers(name: str, values: Any, length: int, most: float = LARGEST_REWARD) -> None:
    """Check that the values are f32[length], none beyond `most`. Raises DataError."""
    if type(values) is not np.ndarray or values.dtype != _FLOAT or values.shape != (length,):
        kind = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
        raise DataError(f"{name} must be float32, one an episode: {length}, not {kind}")
    if not _is_within(values, -most, most):
        wrong = int((~(np.abs(values) <= most)).argmax())
        _refuse(f"{name}[{wrong}]", float(values[wrong]), f"must be a number from {-most:g} to {most:g}")


def check_number(name: str, value: Any, most: float = LARGEST_REWARD) -> None:
    """Raises DataError for anything but a number of at most `most`."""
    if not _is_number(value, -most, most):
        _refuse(name, value, f"must be a number from {-most:g} to {most:g}")


def check_name(name: str, value: Any) -> None:
    """Raises DataError for anything but a valid name."""
    _check_text(name, value)
    if len(value) > MOST_CHARACTERS:
        raise DataError(f"{name} has {len(value)} characters, more than {MOST_CHARACTERS}: {value[:40]!r}...")


def check_part_name(name: Any) -> None:
    """Raises DataError: `reward/NAME` must not be one of the run's own metrics."""
    _check_metric_text("a part", name)
    if name in RUN_PARTS:
        raise DataError(f"a part is called {name!r}, and reward/{name} is a metric of the run's own: rename it")


def check_metric_name(name: Any) -> None:
    """Raises DataError for a metric name that is invalid, or one of the run's own."""
    _check_metric_text("a metric", name)
    if name in RUN_METRICS or name.startswith(RUN_SECTIONS):
        raise DataError(f"a metric is called {name!r}, which is a name of the run's own metrics: rename it")


def check_failed(failure: Any) -> None:
    """Raises DataError for anything but a valid Failed."""
    if not isinstance(failure, Failed):
        raise DataError(f"a {type(failure).__name__} is not a failure")
    for name in ("cause", "where", "trace"):
        _check_text(f"failed.{name}", getattr(failure, name))


def check_token_columns(columns: TokenColumns, vocabulary: int, named: Named) -> None:
    """Check that columns have one shape and the right types. Where a mask is False, a logprob has no meaning and may be any finite
    number. Raises DataError."""
    tokens = columns.tokens
    at = int(tokens.view(np.uint32).argmax())  # one pass for both ends: below 0 is above them all
    if not 0 <= tokens.item(at) < (vocabulary or ID_BOUND):
        _refuse_token(named("tokens", at), tokens.item(at), vocabulary)
    counted = columns.sampled if columns.trained is columns.sampled else columns.sampled | columns.trained
    for name, (low, high) in _BOUNDS.items():
        values: Floats | None = getattr(columns, name)
        if values is None or not len(values):
            continue
        if values.item(values.argmin()) >= low:  # of NaN the first, which is not
            highest_value = values.item(values.argmax())
            if highest_value <= high:
                continue
            if (
                name != "advantages"  # old clients send 1.0 for masked tokens
                and highest_value <= _LARGEST_FLOAT
                and np.maximum.reduce(values, where=counted, initial=low) <= high
            ):
                continue
        wrong = ~((values >= low) & (values <= high))
        if name != "advantages":
            wrong &= counted | ~np.isfinite(values)
        if wrong.any():
            at = int(wrong.argmax())
            what = "a logprob is at most 0" if high < 1 else f"must be a number from {low:g} to {high:g}"
            if high < 1 and values[at] <= 0:
                what = f"a logprob is at least {low:g}"
            _refuse(named(name, at), float(values[at]), what)
    if columns.teacher is not None:
        _check_teacher(columns, vocabulary, named)


def columns_of(rollout: Rollout) -> TokenColumns:
    return TokenColumns(
        rollout.tokens, rollout.sampled, rollout.trained, rollout.logprobs, rollout.ref_logprobs, rollout.advantages,
        rollout.teacher,
    )  # fmt: skip


def _is_plain(episode: Any) -> bool:
    """True if only the episode's rollouts can be wrong: it has a valid score, and no other values."""
    return (
        type(episode) is Episode
        and type(score := episode.score) is float
        and -LARGEST_REWARD <= score <= LARGEST_REWARD
        and type(episode.rollouts) is tuple
        and bool(episode.rollouts)
        and type(episode.messages) is tuple
        and not episode.messages
        and type(episode.parts) is type(episode.metrics) is dict
        and not episode.parts
        and not episode.metrics
        and (episode.correct is None or type(episode.correct) is bool)
        and type(episode.finish) is str
        and episode.finish in ("stop", "length")
    )


def _check_scored(name: str, episode: Any) -> None:
    """Check an episode, except its rollouts' columns."""
    if not isinstance(episode, Episode):
        raise DataError(f"a {type(episode).__name__} is not an episode")
    check_number(f"{name}.score", episode.score)
    if not isinstance(episode.rollouts, tuple) or not episode.rollouts:
        raise DataError(f"{name} has no rollouts")
    if type(episode.messages) is not tuple or episode.messages:
        _check_messages(f"{name}.messages", episode.messages)
    for what, of, check, most in (
        ("parts", episode.parts, check_part_name, LARGEST_REWARD),
        ("metrics", episode.metrics, check_metric_name, LARGEST_METRIC),
    ):
        if not isinstance(of, Mapping):
            _refuse(f"{name}.{what}", of, "must be a mapping")
        for key, value in of.items():
            check(key)
            check_number(f"{name}.{what}[{key!r}]", value, most)
    if episode.correct is not None and type(episode.correct) is not bool:
        _refuse(f"{name}.correct", episode.correct, "must be True, False or None")
    check_name(f"{name}.finish", episode.finish)


def _check_turn_order(name: str, rollouts: Sequence[Any]) -> None:
    """Raises DataError unless all turns of an episode have different numbers, or none has one. Types were checked before."""
    orders = [rollout.turn_order for rollout in rollouts]
    if all(order is None for order in orders):
        return
    if any(order is None for order in orders):
        raise DataError(f"{name} has a turn order in some of its rollouts only: give one to each, or to none")
    numbers = np.concatenate(orders)
    if len(np.unique(numbers)) < len(numbers):
        raise DataError(f"{name} gives one number to several turns of its rollouts: {numbers.tolist()!r:.200}")


def _check_rollouts(rollouts: Sequence[Any], vocabulary: int, name_of: Callable[[int], str]) -> bool:
    """Return True if one of the rollouts is greedy. Raises DataError."""
    tokens: list[Tokens] = []
    floats: dict[str, list[Floats]] = {}
    greedy = closer = False  # closer: something must be checked one by one
    for number, rollout in enumerate(rollouts):
        if type(rollout) is not Rollout or not _has_its_types(rollout):
            _refuse_types(rollout, name_of(number))
        if not LEAST_TEMPERATURE <= rollout.temperature <= MOST_TEMPERATURE:
            check_temperature(f"{name_of(number)}.temperature", rollout.temperature)
            greedy = True
        if not rollout.sft and rollout.trained.tobytes() != rollout.sampled.tobytes():
            _check_trained(rollout, name_of(number))
        if rollout.kept is not None:
            _check_kept(rollout, vocabulary, name_of(number))
        if rollout.turns is not None:
            _check_turns(rollout.turns, name_of(number))
        tokens.append(rollout.tokens)
        closer |= rollout.teacher is not None
        if (column := rollout.logprobs) is not None:
            floats.setdefault("logprobs", []).append(column)
        if (column := rollout.ref_logprobs) is not None:
            floats.setdefault("ref_logprobs", []).append(column)
        if (column := rollout.advantages) is not None:
            floats.setdefault("advantages", []).append(column)
    if not tokens:
        return False
    ids = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
    closer |= bool(np.maximum.reduce(ids.view(np.uint32)) >= (vocabulary or ID_BOUND))
    for name, columns in floats.items():
        closer |= not _is_within(columns[0] if len(columns) == 1 else np.concatenate(columns), *_BOUNDS[name])
    if closer:
        for number, rollout in enumerate(rollouts):
            check_token_columns(columns_of(rollout), vocabulary, _ColumnNames(name_of(number)))
    return greedy


def _has_its_types(rollout: Rollout) -> bool:
    """True if the rollout has the expected dtypes. A dtype object that numpy built differently counts as unknown, so that the
    columns are checked one by one."""
    tokens, logprobs, reference, advantages = rollout.tokens, rollout.logprobs, rollout.ref_logprobs, rollout.advantages
    return (
        type(tokens) is np.ndarray
        and tokens.dtype is _INT
        and tokens.ndim == 1
        and tokens.size > 0
        and type(rollout.sampled) is np.ndarray
        and rollout.sampled.dtype is _BOOL
        and type(rollout.trained) is np.ndarray
        and rollout.trained.dtype is _BOOL
        and type(rollout.policy_version) is np.ndarray
        and rollout.policy_version.dtype is _INT
        and (logprobs is None or (type(logprobs) is np.ndarray and logprobs.dtype is _FLOAT))
        and (reference is None or (type(reference) is np.ndarray and reference.dtype is _FLOAT))
        and (advantages is None or (type(advantages) is np.ndarray and advantages.dtype is _FLOAT))
        and type(rollout.temperature) in (float, int)
        and rollout.teacher is None
        and rollout.kept is None
        and rollout.experts is None
        and rollout.turns is None
        and rollout.turn_order is None
        and type(rollout.truncated) is bool
        and type(rollout.sft) is bool
    )


def _refuse_types(rollout: Any, where: str) -> None:
    """Raises DataError for a wrong type, if there is one."""
    if not isinstance(rollout, Rollout):
        raise DataError(f"{where} is a {type(rollout).__name__}, not a Rollout")
    for name, dtype in _DTYPES.items():
        column = getattr(rollout, name)
        if column is None and name in _BOUNDS:
            continue
        if type(column) is not np.ndarray or column.dtype != dtype:
            raise DataError(f"{where}.{name} must be {dtype}, not {getattr(column, 'dtype', type(column).__name__)}")
    if rollout.tokens.ndim != 1 or not len(rollout.tokens):
        raise DataError(f"{where} has no tokens")
    check_temperature(f"{where}.temperature", rollout.temperature)
    if type(rollout.truncated) is not bool or type(rollout.sft) is not bool:
        raise DataError(
            f"{where}: truncated is {brief(rollout.truncated)} and sft {brief(rollout.sft)}, and a flag is a bool"
        )
    kept = rollout.kept
    if not (kept is None or (isinstance(kept, Kept) and kept.sizes.dtype == kept.token_ids.dtype == _INT)):
        raise DataError(f"{where}.kept must be a Kept of two columns of int32")
    experts = rollout.experts
    if experts is not None and not (
        isinstance(experts, RoutedExperts) and experts.known.dtype == _BOOL and experts.numbers.dtype in _EXPERTS
    ):
        raise DataError(f"{where}.experts must be RoutedExperts of a bool and a uint8 or uint16 column")
    if (teacher := rollout.teacher) is not None:
        if not isinstance(teacher, TopK):
            raise DataError(f"{where}.teacher is a {type(teacher).__name__}, not a TopK")
        columns = (teacher.offsets.dtype, teacher.token_ids.dtype, teacher.logprobs.dtype)
        if columns != _TEACHER:
            raise DataError(f"{where}.teacher must be int64, int32 and float32, not {', '.join(map(str, columns))}")


def _check_kept(rollout: Rollout, vocabulary: int, where: str) -> None:
    """Raises DataError for kept tokens that cannot be."""
    kept = rollout.kept
    if kept is None or not len(kept.token_ids):
        return
    if not rollout.truncated:
        raise DataError(f"{where}.kept names tokens, but truncated is False: set it to True, or send no kept tokens")
    if (most := kept.sizes.max()) > MOST_KEPT + MOST_TIES:
        at = int(kept.sizes.argmax())
        what = f"at most {MOST_KEPT} tokens are kept at a position, and {MOST_TIES} that are as likely as the last: set top_k"
        _refuse(f"{where}.kept.sizes[{at}]", int(most), what)
    if (unsampled := (kept.sizes > 0) & ~rollout.sampled).any():
        raise DataError(f"{where}.kept.sizes[{unsampled.argmax()}] is not 0, and that token was not sampled")
    highest = int(kept.token_ids.view(np.uint32).argmax())
    if not 0 <= kept.token_ids.item(highest) < (vocabulary or ID_BOUND):
        _refuse_token(f"{where}.kept.token_ids[{highest}]", kept.token_ids.item(highest), vocabulary)
    cut = np.flatnonzero(kept.sizes)
    starts = np.cumsum(kept.sizes[cut]) - kept.sizes[cut]
    own = kept.token_ids == np.repeat(rollout.tokens[cut], kept.sizes[cut])
    if not (found := np.logical_or.reduceat(own, starts)).all():
        at = int(cut[found.argmin()])
        raise DataError(
            f"{where}.tokens[{at}] is {rollout.tokens[at]}, which is not among the tokens that were kept at that position.",
            remedy="A token can only be sampled from those: look at the order of the kept tokens, and at their sizes.",
        )


def _check_turns(turns: TurnRewards, where: str) -> None:
    """Raises DataError for a turn reward that is too large. Places and types were checked when the rollout was made."""
    if not _is_within(turns.values, -LARGEST_REWARD, LARGEST_REWARD):
        wrong = int((~(np.abs(turns.values) <= LARGEST_REWARD)).argmax())
        limits = f"must be a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        _refuse(f"{where}.turns.values[{wrong}]", float(turns.values[wrong]), limits)


def _check_trained(rollout: Rollout, where: str) -> None:
    if (unsampled := rollout.trained & ~rollout.sampled).any():
        raise DataError(
            f"{where}.trained[{unsampled.argmax()}] is True, and that token was not sampled.",
            remedy="Only what the policy sampled can be trained; supervised data says so (sft).",
        )


def _is_within(values: NDArray[Any], low: float, high: float) -> bool:
    """True if all numbers are within the bounds; nan never is."""
    return not len(values) or bool(np.minimum.reduce(values) >= low and np.maximum.reduce(values) <= high)


def _check_teacher(columns: TokenColumns, vocabulary: int, named: Named) -> None:
    teacher = columns.teacher
    assert teacher is not None, "called only with a teacher"
    if not len(teacher.token_ids):
        return
    highest = int(teacher.token_ids.view(np.uint32).argmax())
    if int(teacher.token_ids.view(np.uint32)[highest]) >= (vocabulary or ID_BOUND):
        at = int(np.searchsorted(teacher.offsets, highest, "right")) - 1
        _refuse_token(named("teacher", at), int(teacher.token_ids[highest]), vocabulary)
    if _is_within(teacher.logprobs, LOWEST_LOGPROB, LOGPROB_ROUNDING):
        return
    wrong = ~((teacher.logprobs >= LOWEST_LOGPROB) & (teacher.logprobs <= LOGPROB_ROUNDING))
    wrong &= np.repeat(columns.trained, np.diff(teacher.offsets))
    if wrong.any():
        entry = int(wrong.argmax())
        at = int(np.searchsorted(teacher.offsets, entry, "right")) - 1
        _refuse(named("teacher", at), float(teacher.logprobs[entry]), f"a logprob is from {LOWEST_LOGPROB:g} to 0")


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, tuple) or not all(isinstance(message, Mapping) for message in messages):
        _refuse(name, messages, "must be a tuple of mappings")
    for number, message in enumerate(messages):
        _check_tree(f"{name}[{number}]", message)


def _check_tree(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        _refuse(name, value, "must be a mapping")
    _check_node(name, value, MAX_DEPTH)


def _check_node(name: str, value: Any, depth: int) -> None:
    """Check that text can be encoded and that nesting is at most `depth`. Other values are not restricted."""
    if isinstance(value, str):
        if not value.isascii():
            _check_text(name, value)
    elif isinstance(value, (Mapping, list, tuple)):
        if not depth:
            raise DataError(f"{name} is nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            for key in value:
                _check_text(f"a key of {name}", key)
            value = value.values()
        for entry in value:
            if isinstance(entry, (str, Mapping, list, tuple)):
                _check_node(name, entry, depth - 1)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        _refuse(name, value, "must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name} holds {value[error.start]!a}, half of a surrogate pair, which nothing can write down.",
                remedy="Send text that can be encoded as UTF-8.",
            ) from None


def _check_metric_text(what: str, name: Any) -> None:
    _check_text(f"the name of {what}", name)
    if not 0 < len(name) <= MOST_NAME:
        raise DataError(f"the name of {what} has {len(name)} characters, and 1 to {MOST_NAME} are taken: {name[:40]!r}")


def _is_number(value: Any, low: float, high: float) -> bool:
    """True for an int or float in these bounds, with any number of digits, but not for a bool."""
    return type(value) in (int, float) and low <= value <= high


@dataclass(frozen=True, slots=True)
class _ColumnNames:
    """The `Named` of one rollout's columns."""

    rollout: str

    def __call__(self, name: str, at: int) -> str:
        return f"{self.rollout}.{name}[{at}]"


def _rollout_name(episodes: Sequence[Episode], rollout: int) -> str:
    """Return the name of the rollout with this number, counted over all episodes."""
    for number, episode in enumerate(episodes):
        if rollout < len(episode.rollouts):
            return f"episodes[{number}].rollouts[{rollout}]"
        rollout -= len(episode.rollouts)
    raise IndexError(rollout)


def _refuse(name: str, value: Any, what: str) -> NoReturn:
    raise DataError(f"{name} is {brief(value)}: {what}")


def _refuse_token(name: str, token: int, vocabulary: int) -> NoReturn:
    raise DataError(
        f"{name}: token id {token} is outside the policy's vocabulary" + (f" of {vocabulary}" if vocabulary else ""),
        remedy="Give the worker the policy's own tokenizer.",
    )


def brief(value: Any) -> str:
    """Return a short form of an outside value for an error message, whatever its type and size."""
    if type(value) is int and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, (str, bytes)):
        return ascii(value[:40]) + ("..." if len(value) > 40 else "")
    return f"a {type(value).__name__}"
