"""The base of all checks: count wrong steps in a row, remember what was usual, and describe it in one sentence."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from atropos_core.config import health_options as options
from atropos_core.config.run_file import RunConfig

State = Literal["ok", "suspect", "ill"]
LEVELS: Mapping[State, float] = {"ok": 0.0, "suspect": 1.0, "ill": 2.0}
Numbers = Mapping[str, float]
O = TypeVar("O", bound=options.Check)

USUAL_STEPS = 20  # that what is usual looks back on
LEAST_STEPS = 3  # before which nothing is usual


@dataclass(frozen=True)
class Settings:
    """Options of a run that findings name; 0 if unknown."""

    max_tokens: int = 0
    evaluation_max_tokens: int = 0  # as max_tokens if 0
    context_tokens: int = 0  # of the model, for prompt and reply together

    @classmethod
    def of(cls, config: RunConfig, context_tokens: int) -> Settings:
        return cls(config.sampling.max_tokens, config.evaluation.max_tokens or 0, context_tokens)


@dataclass(frozen=True)
class Change:
    """A change of a check's state."""

    step: int
    check: str
    state: State
    since: int  # the first step that looked wrong, or right again
    says: str
    remedy: str
    blames: str = ""  # a reward that is gamed, if the check knows one

    def row(self) -> dict[str, Any]:
        """Return the row for health.jsonl."""
        row = {"step": self.step, "check": self.check, "state": self.state, "since": self.since, "says": self.says,
               "do": self.remedy}  # fmt: skip
        return row | ({"blames": self.blames} if self.blames else {})

    @property
    def when(self) -> str:
        return when(self.since)


def when(step: int) -> str:
    """Return since when, in words."""
    return f"since step {step}" if step else "in the evaluation before step 1"


class Usual:
    """The median of the last twenty steps that looked right."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if len(self.values) >= LEAST_STEPS else None

    def add(self, value: float) -> None:
        self.values = [*self.values[1 - USUAL_STEPS :], value]


class Check(ABC, Generic[O]):
    """One check. A subclass says what looks wrong with the numbers of one step. A step without the numbers that it needs is
    skipped."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    remedy: ClassVar[str]
    explained_by: ClassVar[
        tuple[str, ...]
    ] = ()  # checks that name the cause: while one is not ok, this one does not look
    first_replies: ClassVar[int] = (
        0  # so many in the evaluation before step 1 are enough to judge by; 0: it is not looked at
    )

    def __init__(self, settings: O, run: Settings | None = None) -> None:
        self.options = settings
        self.run = run or Settings()
        self.state: State = "ok"
        self.since = 0
        self.says = self.remedy_now = ""
        self.looked = False  # at any step, in this process
        self.wrong_steps = self.right_steps = 0  # in a row
        self.usual = Usual()
        self.usual_too = Usual()  # of a second number
        self.kept: dict[str, float] = {}  # of earlier steps, by name

    @abstractmethod
    def wrong(self, seen: Numbers) -> str | None:
        """Describe what looks wrong in this step, as a clause after the check's name; None if all looks right."""

    def do(self, seen: Numbers) -> str:
        """Return the remedy, with the numbers of this run."""
        return self.remedy

    def learn(self, seen: Numbers) -> None:
        """Called for a step that looked right, to update what is usual."""

    def applies(self, seen: Numbers) -> bool:
        """True if this step has the numbers that the check needs."""
        return all(name in seen for name in self.needs)

    def look(self, step: int, seen: Numbers) -> Change | None:
        """Return the change of state that this step causes, if any. Step 0 is the evaluation before step 1."""
        if not self.applies(seen) or (step == 0 and not 0 < self.first_replies <= seen.get("rollouts/count", 0.0)):
            return None
        self.looked = True
        says = self.wrong(seen)
        if says is None:
            self.right_steps += 1
            if self.state == "ill" and self.right_steps < self.options.steps:
                return None
            if step > 0:
                self.learn(seen)
            return self._now(step, "ok", step - self.right_steps + 1, "as it should be again")
        self.right_steps = 0
        self.wrong_steps += 1
        since = self.since if self.state != "ok" else step
        ill = step == 0 or self.wrong_steps >= self.options.steps or self.state == "ill"
        return self._now(step, "ill" if ill else "suspect", since, says, self.do(seen))

    def _now(self, step: int, state: State, since: int, says: str, remedy: str = "") -> Change | None:
        before, self.state = self.state, state
        self.says, self.remedy_now = says, remedy
        if state == "ok":
            self.wrong_steps = 0
        if before == state:
            return None
        self.since = since
        return Change(step, self.name, state, since, says, remedy)

    def save(self) -> dict[str, Any]:
        return {
            "state": self.state, "since": self.since, "says": self.says, "wrong_steps": self.wrong_steps,
            "right_steps": self.right_steps, "remedy": self.remedy_now, "kept": dict(self.kept),
            "usual": [list(self.usual.values), list(self.usual_too.values)],
        }  # fmt: skip

    def load(self, saved: Mapping[str, Any]) -> None:
        self.state, self.since, self.says = saved["state"], int(saved["since"]), saved["says"]
        self.wrong_steps, self.right_steps = int(saved["wrong_steps"]), int(saved["right_steps"])
        self.remedy_now = saved.get("remedy", "")
        self.kept = {name: float(value) for name, value in saved.get("kept", {}).items()}
        self.usual.values, self.usual_too.values = ([float(v) for v in values] for values in saved["usual"])
