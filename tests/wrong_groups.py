"""Values that no group may hold, and what names them: the same table for every way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Draw, Episode, Failed, Rollout, ScoredGroup, Task, TopK

VOCABULARY = 100
LENGTH = 8
HUGE = 10**400
_F = np.float32


def rollout(**changes: Any) -> Rollout:
    """Half prompt, half reply."""
    sampled = np.arange(LENGTH) >= LENGTH // 2
    made = Rollout(
        np.arange(1, LENGTH + 1, dtype=np.int32), sampled, sampled, np.where(sampled, -0.5, 0).astype(_F),
        np.zeros(LENGTH, np.int32), 1.0,
    )  # fmt: skip
    return replace(made, **changes)


def group(draw: int = -1, environment: str = "words", **first: Any) -> ScoredGroup:
    """Two members; `first` changes the first one's rollout."""
    episodes = (Episode((rollout(**first),), 1.0), Episode((rollout(),), 0.0))
    return ScoredGroup(
        Draw(draw, environment, "train", 0, 0),
        Task("t", ()),
        episodes,
        np.array([1, 0], _F),
        parts={"exact": np.ones(2, _F)},
    )


def with_episode(made: ScoredGroup, **changes: Any) -> ScoredGroup:
    return replace(made, episodes=(replace(made.episodes[0], **changes), *made.episodes[1:]))


def column(value: float, at: int = LENGTH - 1, base: float = -0.5) -> np.ndarray[Any, Any]:
    """f32[T] with one value of its own, at a sampled token unless `at` says otherwise."""
    values = np.full(LENGTH, base, _F)
    with np.errstate(over="ignore"):
        values[at] = value
    return values


def teacher(logprob: float = -1.0, token: int = 5) -> TopK:
    return TopK(np.arange(LENGTH + 1), np.full(LENGTH, token, np.int32), column(logprob))


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"a": made}
    return made


def unchecked(record: Any, **changes: Any) -> Any:
    """With values that the record's own checks refuse."""
    made = object.__new__(type(record))
    for name, value in (vars(record) | changes).items():
        object.__setattr__(made, name, value)
    return made


def with_rollout(made: ScoredGroup, **changes: Any) -> ScoredGroup:
    """Unchecked."""
    first = unchecked(made.episodes[0].rollouts[0], **changes)
    return with_episode(made, rollouts=(first,))


Change = Callable[[ScoredGroup], ScoredGroup]


def on_rollout(**changes: Any) -> Change:
    return lambda made: with_rollout(made, **changes)


def on_episode(**changes: Any) -> Change:
    return lambda made: with_episode(made, **changes)


def on_group(**changes: Any) -> Change:
    return lambda made: unchecked(made, **changes)


# What each way in that knows such a field must refuse: how a right group becomes it, and what the refusal names.
VALUES: dict[str, tuple[Change, str]] = {
    "a positive logprob": (on_rollout(logprobs=column(0.25)), r"logprobs.*\[7\] is 0\.25: a logprob is at most 0"),
    "a logprob that says 1.0 where the token counts": (on_rollout(logprobs=column(1.0)), r"logprobs.*\[7\] is 1\.0"),
    "a logprob of -3e38": (
        on_rollout(logprobs=column(-3e38)),
        r"logprobs.*\[7\] is -3\S+e\+38: a logprob is at least -10000",
    ),
    "a reference's positive logprob": (on_rollout(ref_logprobs=column(2.0)), r"ref_logprobs.*\[7\] is 2\.0"),
    "a teacher's positive logprob": (on_rollout(teacher=teacher(3.0)), r"(teacher|distill_logprobs).*\[7\] is 3\.0"),
    "a teacher's token beyond the vocabulary": (on_rollout(teacher=teacher(token=VOCABULARY)), "100"),
    "an advantage of 3e38": (on_rollout(advantages=column(3e38)), r"advantages.*\[7\] is 3\S*e\+38"),
    "an advantage of 3e38 at a token that does not count": (
        on_rollout(advantages=column(3e38, 0)),
        r"advantages.*\[0\]",
    ),
    "a temperature of 1e308": (on_rollout(temperature=1e308), r"temperature.* is 1e\+308"),
    "a temperature of 1e-40": (on_rollout(temperature=1e-40), r"temperature.* is 1e-40"),
    "a temperature below 0": (on_rollout(temperature=-0.5), r"temperature.* is -0\.5"),
    "a temperature of 400 digits": (on_rollout(temperature=HUGE), "temperature|beyond 64 bits|number is infinity"),
    "a temperature that is a flag": (on_rollout(temperature=True), "temperature"),
    "greedy tokens that are trained": (on_rollout(temperature=0.0), "temperature is 0"),
    "a score of 1e30": (on_episode(score=1e30), r"score.* is 1e\+30"),
    "a score of 400 digits": (on_episode(score=HUGE), "score|beyond 64 bits|number is infinity"),
    "a score that is text": (on_episode(score="0.5"), "score"),
    "a token beyond the vocabulary": (on_rollout(tokens=np.full(LENGTH, VOCABULARY, np.int32)), "100"),
    "a token below 0": (on_rollout(tokens=np.full(LENGTH, -7, np.int32)), "-7"),
}

# What the records themselves say where a way in makes them before anything else is looked at.
_NO_ROLLOUT, _NO_GROUP = "a number in 'logprobs' that is not finite", r"rewards \[.*nan.*\] are not all finite"

# Of an episode, where the old protocol has no such field.
EPISODES: dict[str, tuple[Change, str]] = {
    "trained and not sampled": (on_rollout(trained=np.ones(LENGTH, np.bool_)), r"trained\[0\] is True"),
    "a metric of 400 digits": (on_episode(metrics={"turns": HUGE}), r"metrics\['turns'\] is a whole number of 1329 bits"),
    "a metric of 1e300": (on_episode(metrics={"turns": 1e300}), r"metrics\['turns'\] is 1e\+300"),
    "a metric named reward/mean": (on_episode(metrics={"reward/mean": 1.0}), "'reward/mean', which is a name of the run's own"),
    "a metric named reward": (on_episode(metrics={"reward": 1.0}), "'reward'"),
    "a metric without a name": (on_episode(metrics={"": 1.0}), "the name of a metric"),
    "half of a surrogate pair in a message": (on_episode(messages=({"role": "user", "content": "\ud800"},)), "surrogate"),
    "messages nested deep": (on_episode(messages=({"role": "user", "content": [nested(70)]},)), "nested more than 64 deep"),
    "a finish that is a number": (on_episode(finish=3), "finish is 3"),
    "a logprob that is no number": (on_rollout(logprobs=column(np.nan)), rf"logprobs\[7\] is nan|{_NO_ROLLOUT}"),
    "a logprob that is no number where nothing counts": (
        on_rollout(logprobs=column(np.nan, 0)), rf"logprobs\[0\] is nan|{_NO_ROLLOUT}"
    ),
    "an advantage that is no number": (on_rollout(advantages=column(np.nan)), r"advantages\[7\] is nan"),
    "a turn reward of 1e10": (on_rollout(turns=turn_rewards([6, 8], [1.0, 1e10])), r"turns\.values\[1\] is 10000000000\.0"),
}  # fmt: skip

# Of a whole group.
GROUPS: dict[str, tuple[Change, str]] = {
    "a reward that is no number": (on_group(rewards=np.array([1, np.nan], _F)), rf"rewards\[1\] is nan|{_NO_GROUP}"),
    "a part that is no number": (on_group(parts={"exact": np.array([np.nan, 0], _F)}), r"parts\['exact'\]\[0\] is nan"),
    "a group's advantage that is no number": (on_group(advantages=np.array([np.nan, 0], _F)), r"advantages\[0\] is nan"),
    "an infinite reward": (on_group(rewards=np.array([np.inf, 0], _F)), r"rewards"),
    "a reward of 3e38": (on_group(rewards=np.array([0, 3e38], _F)), r"rewards\[1\] is 3\S*e\+38"),
    "a part of 3e38": (on_group(parts={"exact": np.array([3e38, 0], _F)}), r"parts\['exact'\]\[0\]"),
    "a part named mean": (on_group(parts={"mean": np.ones(2, _F)}), "'mean'.*reward/mean is a metric of the run's own"),
    "a group's advantage of 3e38": (on_group(advantages=np.array([3e38, 0], _F)), r"advantages\[0\]"),
    "half of a surrogate pair in a task": (on_group(task=Task("a\udfff", ())), "surrogate"),
    "a task's id of 501 characters": (on_group(task=Task("t" * 501, ())), "task.id has 501 characters"),
    "a draw of 400 digits": (on_group(draw=Draw(HUGE, "words", "train", 0, 0)), "draw.id is a whole number of 1329 bits"),
    "a failure that is a number": (on_group(failed=(Failed(3),)), "failed.cause is 3"),  # type: ignore[arg-type]
}  # fmt: skip

# What an environment in this process may compute with, and no client may send.
SENT: dict[str, tuple[Change, str]] = {
    "a part that is a flag": (on_episode(parts={"exact": True}), r"parts\['exact'\] is True"),
    "a correct of 1": (on_episode(correct=1), "correct is 1"),
}  # fmt: skip
NATIVE = EPISODES | GROUPS | SENT

# What no way in may refuse.
RIGHT: dict[str, Change] = {
    "as it is": lambda made: made,
    "a logprob that rounding put above 0": on_rollout(logprobs=column(6e-5)),
    "a logprob of the masked prompt": on_rollout(logprobs=column(1.0, 0)),
    "a logprob of -9999": on_rollout(logprobs=column(-9999.0)),
    "a minus zero": on_rollout(logprobs=column(-0.0), advantages=column(-0.0)),
    "large advantages": on_rollout(advantages=column(1e6)),
    "greedy tokens that teach nothing": on_rollout(temperature=0.0, advantages=np.zeros(LENGTH, _F)),
    "supervised data": on_rollout(sft=True, temperature=0.0),
    "a teacher's words": on_rollout(teacher=teacher()),
    "a whole score": on_episode(score=3),
}
