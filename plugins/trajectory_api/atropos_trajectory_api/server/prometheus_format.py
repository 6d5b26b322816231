"""The text format that Prometheus reads (version 0.0.4).

Not by `prometheus_client`: what is counted here is counted already, with bounds on its labels, and a summary of that library has no
quantiles. What would be left for it is a dozen lines of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, str], float]


class Exposition:
    """One answer to one scrape. A family without a sample is left out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, help_: str, samples: Iterable[Sample]) -> None:
        self._family(name, "gauge", help_, [line(name, labels, value) for labels, value in samples])

    def counter(self, name: str, help_: str, samples: Iterable[Sample]) -> None:
        self._family(name, "counter", help_, [line(name, labels, value) for labels, value in samples])

    def summary(
        self,
        name: str,
        help_: str,
        series: Iterable[tuple[Mapping[str, str], Mapping[float, float | None], float, int]],
    ) -> None:
        """Of each series: labels, value by quantile (None: nothing in the window), sum and count."""
        lines = []
        for labels, quantiles, total, count in series:
            for share, value in quantiles.items():
                lines.append(line(name, {**labels, "quantile": str(share)}, math.nan if value is None else value))
            lines += [line(f"{name}_sum", labels, total), line(f"{name}_count", labels, count)]
        self._family(name, "summary", help_, lines)

    def histogram(self, name: str, help_: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """`counts` has one more entry than `bounds`: what was above the last."""
        lines, below = [], 0
        for bound, count in zip((*bounds, math.inf), counts, strict=True):
            below += count
            lines.append(line(f"{name}_bucket", {"le": number(bound)}, below))
        lines += [line(f"{name}_sum", {}, total), line(f"{name}_count", {}, below)]
        self._family(name, "histogram", help_, lines)

    def text(self) -> str:
        return "".join(f"{one}\n" for one in self._lines)

    def _family(self, name: str, kind: str, help_: str, lines: list[str]) -> None:
        if lines:
            self._lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *lines]


def line(name: str, labels: Mapping[str, str], value: float) -> str:
    if not labels:
        return f"{name} {number(value)}"
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {number(value)}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
