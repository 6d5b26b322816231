"""Draws what the ensemble's soak measured: python tools/make_ensemble_plot.py [RESULT.json]

Reads benchmarks/results/soak_ensemble.json and writes plugins/reward_ensemble/accuracy.svg: held-out accuracy by step, the
mean over the seeds as a line and the range of the seeds as a band.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/soak_ensemble.json"
PLOT = ROOT / "plugins/reward_ensemble/accuracy.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 52, 150, 34, 42
ARMS = {  # name in the result: label, colour
    "gameable": ("gameable, alone", "#c0392b"),
    "grader": ("one honest grader", "#7f8c8d"),
    "median": ("ensemble: median", "#1f618d"),
    "exclude": ("ensemble: shut out", "#1e8449"),
}


def drawn(result: dict[str, Any]) -> str:
    steps = result["steps"]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(percent: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * percent / 100

    seeds = max(len(runs) for runs in result["runs"].values())
    commit = result["machine"]["commit"][:10]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Held-out accuracy, %: {seeds} seeds, mean and range (commit {commit})</text>',
    ]
    for percent in range(0, 101, 20):
        parts.append(f'<path d="M{LEFT} {y(percent):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}</text>')
    for step in range(0, steps + 1, max(1, steps // 5)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(steps / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    labels: list[tuple[float, str, str]] = []
    for arm, (label, colour) in ARMS.items():
        if not (runs := result["runs"].get(arm)):
            continue
        at = sorted({int(step) for run in runs for step in run["accuracy"]})
        values = [[run["accuracy"][str(step)] for run in runs if str(step) in run["accuracy"]] for step in at]
        band = [f"{x(step):.1f},{y(max(found)):.1f}" for step, found in zip(at, values, strict=True)]
        band += [f"{x(step):.1f},{y(min(found)):.1f}" for step, found in reversed(list(zip(at, values, strict=True)))]
        line = [f"{x(step):.1f},{y(statistics.mean(found)):.1f}" for step, found in zip(at, values, strict=True)]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        labels.append((y(statistics.mean(values[-1])), f"{label} {statistics.mean(values[-1]):.0f}", colour))
    last = -100.0
    for place, label, colour in sorted(labels):
        last = max(place, last + 15)  # labels of lines that end together stand below each other
        parts.append(f'<text x="{WIDTH - RIGHT + 6}" y="{last + 4:.1f}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT
    PLOT.write_text(drawn(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
