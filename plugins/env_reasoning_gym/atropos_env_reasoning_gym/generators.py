"""Code that runs in the process that has reasoning-gym: make tasks and score answers.

The tasks of some data sets depend on Python's hash seed. Some take seconds to make a task, or forever to score a hostile answer.
So that process has a fixed hash seed and deadlines, and is ended when a deadline passes.
"""

from __future__ import annotations

import json
import math
import time
from functools import cache
from typing import Any

CHUNK_S = 1.0  # time to make tasks in one call
_entries: dict[tuple[str, int], dict[str, Any]] = {}


def call(method: str, *arguments: Any) -> Any:
    """Call one of the functions below by name; the worker process starts with this."""
    methods: dict[str, Any] = {"names": names, "make": make, "score": score}
    return methods[method](*arguments)


def names() -> list[str]:
    """Every data set except composites of several: use our mixture for those."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def make(source: str, first: int, at_most: int) -> list[tuple[str, str | None]]:
    """Questions and answers of the tasks from `first` on: at least one, and as many as fit in `CHUNK_S`. An empty list if the
    data set has no more."""
    made: list[tuple[str, str | None]] = []
    began = time.monotonic()
    while len(made) < at_most and (not made or time.monotonic() - began < CHUNK_S):
        try:
            found = _entry(source, first + len(made))
        except IndexError:
            break
        answer = found["answer"]
        made.append((str(found["question"]), None if answer is None else str(answer)))
    return made


def score(source: str, index: int, answer: str | None) -> tuple[float, str]:
    """The score from 0 to 1 by the data set's own scorer, and the error that it raised (empty if none): many raise on answers
    that they cannot read."""
    try:
        value = float(_dataset(source).score_answer(answer, _entry(source, index)))
    except Exception as error:  # noqa: BLE001 - the plugin boundary: a data set's code
        return 0.0, f"{type(error).__name__}: {error}"
    return (value, "") if math.isfinite(value) else (0.0, f"a score of {value}")


def _entry(source: str, index: int) -> dict[str, Any]:
    if (source, index) not in _entries:
        _entries[source, index] = _dataset(source)[index]
    return _entries[source, index]


@cache
def _dataset(source: str) -> Any:
    """`source` is JSON: name, parameters, level, seed, size. Raises ValueError in one line if it cannot be made from these."""
    import reasoning_gym
    from reasoning_gym.factory import create_curriculum, has_curriculum

    wanted = json.loads(source)
    name, given = wanted["name"], {**wanted["parameters"], "seed": wanted["seed"], "size": wanted["size"]}
    if wanted["level"] is not None:
        if not has_curriculum(name):
            raise ValueError(f"{name} has no levels")
        curriculum = create_curriculum(name)
        for attribute in curriculum.attributes.values():
            curriculum.set_attr_level(attribute.name, min(wanted["level"], len(attribute.levels) - 1))
        given = {**vars(curriculum.generate_configuration()), **given}
    try:
        return reasoning_gym.create_dataset(name, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(str(error) or f"{name} refuses {wanted['parameters']}") from error
