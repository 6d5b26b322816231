"""The input and output of an agent's reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError
from atropos_core.types import Message, Score, Task

FIELDS = ("score", "correct", "parts", "metrics", "turns")


@dataclass(frozen=True)
class Case:
    """One episode, as the program left it. The program may have made everything in `work`: read it, but do not execute it."""

    task: Task
    messages: tuple[Message, ...]  # the conversation
    answer: str  # the policy's last message, or the program's standard output: the option `answer`
    exit_code: int | None  # None: a signal ended it
    limit: str  # the limit that it exceeded; empty if none
    work: Path  # a copy of its work directory, this case's own: regular files, and links that stay inside

    def record(self) -> dict[str, Any]:
        """The case as JSON."""
        return asdict(self) | {"work": str(self.work)}

    @classmethod
    def of_record(cls, fields: Mapping[str, Any]) -> Case:
        task = Task(**{**fields["task"], "messages": tuple(fields["task"]["messages"])})
        return cls(**{**fields, "task": task, "messages": tuple(fields["messages"]), "work": Path(fields["work"])})


def read_score(given: Any, who: str) -> Score:
    """Read a number, a Score, or a mapping with `score` and optionally `correct`, `parts`, `metrics`, and `turns`, a number for each
    trained call. Raises DataError for anything else."""
    if isinstance(given, Score):
        given = {name: getattr(given, "value" if name == "score" else name) for name in FIELDS}
    if isinstance(given, Mapping):
        if "score" not in given or (unknown := set(given) - set(FIELDS)):
            wrong = f"has {sorted(map(str, unknown))!r:.100}" if "score" in given else "has no score"
            raise DataError(f"{who} gave a mapping that {wrong}: it may have {', '.join(FIELDS)}.")
        correct, parts, metrics = given.get("correct"), given.get("parts") or {}, given.get("metrics") or {}
        if correct is not None and not isinstance(correct, bool):
            raise DataError(f"{who} gave {correct!r:.100} as `correct`: it must be true, false or null.")
        turns = _turns(given.get("turns"), who)
        return Score(_number(given["score"], who), correct, _numbers(parts, who), _numbers(metrics, who), turns=turns)
    value = _number(given, who)
    return Score(value, correct=given if isinstance(given, bool) else None)


def _number(value: Any, who: str) -> float:
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(plain, bool | int | float):
        raise DataError(f"{who} gave {value!r:.100}, which is not a number.")
    if not math.isfinite(plain):
        raise DataError(f"{who} gave {plain}, which is not a finite number.")
    return float(plain)


def _turns(values: Any, who: str) -> list[float] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise DataError(
            f"{who} gave {values!r:.100} as `turns`: it must be a list with one number for each trained call."
        )
    return [_number(value, who) for value in values]


def _numbers(values: Any, who: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise DataError(f"{who} gave {values!r:.100}, which is not a mapping of names to numbers.")
    return {str(name): _number(value, who) for name, value in values.items()}
