"""A check, and what it found: every figure with its bound, also those of a check that fails."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atropos_core.types import Floats

if TYPE_CHECKING:
    from tests.gpu.pair import Setting

Group = Literal["vllm", "ipc", "training", "runs"]


@dataclass(frozen=True)
class Check:
    """`run` raises nothing for a figure out of bounds: Report.settle does."""

    name: str
    run: Callable[[Setting, Report], Awaitable[None]]
    deadline_s: float
    group: Group


class CheckFailed(AssertionError):
    """Figures of a check are beyond their bounds."""


class Report:
    """The figures of one check, printed as they are found."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []
        self._say = say

    def note(self, what: str, value: Any, unit: str = "") -> None:
        self._enter(what, value, unit, "")

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self._enter(what, value, unit, f"at most {bound:g}", value <= bound)

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self._enter(what, value, unit, f"at least {bound:g}", value >= bound)

    def within(self, what: str, value: float, low: float, high: float) -> None:
        self._enter(what, value, "", f"from {low:g} to {high:g}", low <= value <= high)

    def holds(self, what: str, claim: bool, found: str = "") -> None:
        self._enter(what, found or claim, "", "must hold", claim)

    def settle(self) -> None:
        """Raise CheckFailed for what was out of bounds."""
        if self.failed:
            raise CheckFailed("; ".join(self.failed))

    def _enter(self, what: str, value: Any, unit: str, bound: str, good: bool = True) -> None:
        self.figures[f"{what} [{unit}]" if unit else what] = value
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        line = f"{what}: {shown} {unit}".rstrip() + (f" ({bound})" if bound else "")
        self._say(f"  {'' if good else 'FAILED '}{line}")
        if not good:
            self.failed.append(line)


def most(difference: Floats) -> float:
    """The largest in size. What is not a number is beyond every bound."""
    found = float(np.abs(difference).max())
    return math.inf if math.isnan(found) else found


def gap(ones: Sequence[Floats], others: Sequence[Floats]) -> float:
    return max(most(one - other) for one, other in zip(ones, others, strict=True))
