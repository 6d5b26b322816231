"""The picture of a run, plot.png in its directory: rewards, held-out evaluations, and what health checks found.

Drawn by matplotlib, which is optional (`pip install 'atropos-core[plot]'`) and imported when something is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atropos_core import console
from atropos_core.console.terminal import put_escapes
from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.launch.terminal_pictures import escapes
from atropos_core.storage.atomic import unwritable
from atropos_core.storage.run_records import HealthChange, MetricTable, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "plot.png"
AUTO_AFTER_S = 30.0  # a picture takes about a second, which a short run shall not be longer by
WIDTH, HEIGHT, DPI = 8.0, 5.0, 100  # inches: 800 x 500 pixels
LONGEST = 100  # characters of a name: a damaged file may hold one of any length
NAMED = 4  # findings whose names are written; all are marked
INSTALL = "pip install 'atropos-core[plot]'"
LINES = ("-", "--", ":", "-.")  # of the first ten of several runs, the next ten and so on
REWARD, HELD_OUT, SUSPECT, ILL = "#2f5fd0", "#0b7a4b", "#c77700", "#c02626"


def is_possible() -> bool:
    """True if matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def where(directory: Path) -> str:
    """Return the path of a run's picture, or how to draw one."""
    if (directory / NAME).is_file():
        return str(directory / NAME)
    return f"`atropos plot {console.quoted(directory)}` draws one" + ("" if is_possible() else f", after {INSTALL}")


def show(path: Path) -> None:
    """Show it in the terminal if that can display pictures."""
    if shown := escapes(path.read_bytes(), os.environ):
        put_escapes(shown)


def draw_at_end(directory: Path, seconds: float, wanted: str) -> None:
    """Draw the picture if the run file's `plot` asks for it. Errors are only printed: a run that ended well must not fail."""
    if wanted == "never" or (wanted == "auto" and (seconds < AUTO_AFTER_S or not is_possible())):
        return
    try:
        draw(directory)
    except Exception as error:  # noqa: BLE001 - a library draws, and the run is over
        console.warn(f"{NAME} was not drawn: {error}")


def draw(directory: Path, out: Path | None = None) -> Path:
    """Draw the run in this directory, even while it runs, as a PNG of 800 x 500 pixels. Raises FitError if matplotlib is not
    installed, DataError if no step was recorded, and RunDirectoryError if the file cannot be written."""
    return _write(lambda: figure_of(directory), directory / NAME if out is None else out)


def draw_several(directories: Sequence[Path], out: Path | None) -> Path:
    """Draw several runs in one PNG. Raises ConfigError without `out`, and what `draw` raises."""
    if out is None:
        raise ConfigError(
            f"a picture of {len(directories)} runs belongs to none of their directories.",
            remedy="Say where: --out FILE",
        )
    return _write(lambda: figure_of_several(directories), out)


def _write(make: Callable[[], Figure], path: Path) -> Path:
    if not is_possible():
        raise FitError("a plot is drawn by matplotlib, which is not installed.", remedy=INSTALL)
    figure = make()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def figure_of(directory: Path) -> Figure:
    """Return the figure that `draw` writes. Raises DataError, and ImportError if matplotlib is not installed."""
    records = RunRecords(directory)
    metrics = _metrics(records)
    held_out = _held_out(metrics)
    figure, axes = _empty(2 if held_out else 1, int(metrics.steps[-1]))
    if held_out is not None:
        _draw_held_out(axes[1], *held_out)
    _draw_rewards(axes[0], metrics)
    _draw_health(axes, records.health())
    axes[0].set_title(_title(directory, records.config), fontsize=10, loc="left")
    return figure


def figure_of_several(directories: Sequence[Path]) -> Figure:
    """Return the figure that `draw_several` writes: of each run the mean reward, and the held-out evaluations. Raises as `figure_of`."""
    every = [_metrics(RunRecords(directory)) for directory in directories]
    held_out = [_held_out(metrics) for metrics in every]
    names = [directory.resolve().name for directory in directories]
    names = names if len({*names}) == len(names) else [str(directory) for directory in directories]
    # some runs may have an accuracy, and others not
    kinds = list(dict.fromkeys(found[0] for found in held_out if found))
    figure, axes = _empty(1 + len(kinds), max(int(metrics.steps[-1]) for metrics in every))
    axes[0].set_ylabel("mean reward of a step")
    for below, kind in zip(axes[1:], kinds, strict=True):
        below.set_ylabel(f"held-out {kind}")
    for number, (name, metrics, found) in enumerate(zip(names, every, held_out, strict=True)):
        style: dict[str, Any] = {
            "color": f"C{number % 10}",
            "linestyle": LINES[number // 10 % len(LINES)],
            "linewidth": 1.4,
        }
        mean = metrics.columns.get("reward/mean", np.full(len(metrics.steps), np.nan))
        there = np.isfinite(mean) & (metrics.steps > 0)
        marker = "o" if there.sum() == 1 else None
        axes[0].plot(metrics.steps[there], mean[there], marker=marker, label=_plain(name), **style)
        if found is not None:
            axes[1 + kinds.index(found[0])].plot(*found[1:], marker="o", markersize=4, clip_on=False, **style)
    axes[0].legend(loc="best", fontsize=8, frameon=False)
    return figure


def _metrics(records: RunRecords) -> MetricTable:
    metrics = records.metrics()
    if not len(metrics.steps):
        raise DataError(
            f"{records.directory} has no metrics to draw.",
            remedy="They are recorded by the sink `jsonl`, step by step.",
        )
    return metrics


def _empty(count: int, last_step: int) -> tuple[Figure, list[Axes]]:
    """Return a figure, and `count` axes in it, one above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": (3, *[2] * (count - 1))}
    axes = list(figure.subplots(count, 1, sharex=True, squeeze=False, gridspec_kw=heights)[:, 0])
    axes[-1].set_xlabel("step")
    for one in axes:
        one.grid(color="#e5e5e5", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.set_xlim(left=0, right=max(last_step, 1))
    return figure, axes


def _held_out(metrics: MetricTable) -> tuple[str, np.ndarray, np.ndarray] | None:
    """Return name, steps [n] and values [n] of the evaluations: accuracy, or the reward if nothing is right or wrong."""
    for name in ("eval/accuracy", "eval/reward"):
        values = metrics.columns.get(name)
        if values is not None and (there := np.isfinite(values)).any():
            return name.removeprefix("eval/"), metrics.steps[there], values[there]
    return None


def _draw_rewards(axes: Axes, metrics: MetricTable) -> None:
    axes.set_ylabel("reward")
    mean = metrics.columns.get("reward/mean")
    if mean is None or not (there := np.isfinite(mean) & (metrics.steps > 0)).any():
        return
    steps, mean = metrics.steps[there], mean[there]
    axes.plot(steps, mean, color=REWARD, linewidth=1.6, marker="o" if len(steps) == 1 else None, label="mean of a step")
    spread = metrics.columns.get("reward/std")
    if spread is not None:
        spread = np.nan_to_num(spread[there])
        axes.fill_between(
            steps, mean - spread, mean + spread, color=REWARD, alpha=0.15, linewidth=0, label="± standard deviation"
        )
    axes.legend(loc="best", fontsize=8, frameon=False)


def _draw_held_out(axes: Axes, name: str, steps: np.ndarray, values: np.ndarray) -> None:
    percent = name == "accuracy"
    axes.set_ylabel(f"held-out {name}")
    axes.plot(steps, values, color=HELD_OUT, linewidth=1.2, marker="o", markersize=5, clip_on=False)
    for at in dict.fromkeys((0, len(steps) - 1)):  # before and after
        axes.annotate(
            f"{values[at]:.1%}" if percent else f"{values[at]:.3g}", (steps[at], values[at]), textcoords="offset points",
            xytext=(6 if at == 0 else -6, 8), ha="left" if at == 0 else "right", fontsize=9, color=HELD_OUT,
        )  # fmt: skip
    axes.margins(y=0.3)


def _draw_health(axes: Sequence[Axes], changes: Sequence[HealthChange]) -> None:
    """Draw a line at each step at which a check became suspect or ill, and name the first few."""
    found = [change for change in changes if change.state in ("suspect", "ill")]
    for number, change in enumerate(found):
        color = ILL if change.state == "ill" else SUSPECT
        for one in axes:
            one.axvline(change.step, color=color, linewidth=1.0, linestyle="-" if change.state == "ill" else ":")
        if number < NAMED:
            axes[0].annotate(
                f" {change.check:.{LONGEST}}: {change.state}", (change.step, 1 - 0.08 * number),
                xycoords=("data", "axes fraction"), fontsize=8, color=color, va="top", annotation_clip=False,
            )  # fmt: skip
    if len(found) > NAMED:
        axes[0].annotate(
            f"{len(found) - NAMED} more findings: atropos doctor", (1, -0.02), xycoords="axes fraction", fontsize=7,
            color=SUSPECT, ha="right", va="top",
        )  # fmt: skip


def _title(directory: Path, config: Mapping[str, Any]) -> str:
    text = f"{directory.resolve().name}   {', '.join(config.get('environment', {}))} · {Path(str(config.get('model', ''))).name}"
    return _plain(text)


def _plain(name: str) -> str:
    """Return a name of which a dollar sign begins no formula."""
    return name[:LONGEST].replace("$", r"\$")
