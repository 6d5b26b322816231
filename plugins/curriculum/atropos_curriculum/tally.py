"""The events of a step, as sums, and the metrics made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from atropos_core.types import Metrics


class Tally:
    """Sums since the last `take`. They are saved, so a resumed run reports the whole step."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(sums or {})

    def drawn(self, environments: Sequence[str], expected: Sequence[float]) -> None:
        self._add(drawn=len(environments), expected=sum(expected))
        self._add(**{f"of/{name}": count for name, count in Counter(environments).items()})

    def settled(self, expected: float, success: float, *, flat: bool, clipped: bool) -> None:
        self._add(settled=1, success=success, surprise=abs(success - expected), flat=flat, clipped=clipped)

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def take(self) -> Metrics:
        """Means over the draws of the step, and over those that were settled with rollouts. Starts the next step."""
        sums, self.sums = self.sums, {}
        metrics = {"drawn": sums.get("drawn", 0.0)}
        if drawn := sums.get("drawn"):
            metrics["drawn_success"] = sums["expected"] / drawn
            metrics |= {f"share/{name[3:]}": sum_ / drawn for name, sum_ in sums.items() if name.startswith("of/")}
        if settled := sums.get("settled"):
            metrics |= {
                "settled_success": sums["success"] / settled,
                "surprise": sums["surprise"] / settled,
                "flat": sums["flat"] / settled,
                "clipped": sums["clipped"] / settled,
            }
        return metrics
