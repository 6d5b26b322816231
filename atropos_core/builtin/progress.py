"""The sink that shows a run's progress: a live line on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from atropos_core.console import say
from atropos_core.console.terminal import LINE, rich_console, write
from atropos_core.interfaces import Sink
from atropos_core.rollouts.evaluation_text import held_out
from atropos_core.types import Metrics, ScoredGroup

LINE_EVERY_S = 5.0  # between lines if the output is not a terminal
_BAR = 24


class ConsoleSink(Sink):
    """Shows progress: a live bar on a terminal, elsewhere a line now and then."""

    def __init__(self, steps: int, warmup_steps: int = 0) -> None:
        self._steps = warmup_steps + steps
        self._progress: StepProgress | None = None

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        if self._progress is None:
            self._progress = StepProgress(self._steps)
        self._progress.show(step, metrics)

    async def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None


class StepProgress:
    """Progress of a run: a live line on a terminal, otherwise a line every few seconds and at the ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = perf_counter()
        self._first_step: int | None = None
        self._shown = 0.0
        self._cell = _NotebookLine() if rich_console().is_jupyter else None
        self._live = sys.stdout.isatty() or self._cell is not None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        evaluated = held_out(metrics)
        if step == 0:
            if evaluated:
                say(f"before training: {evaluated}")
            if "warmup/held_out_loss" in metrics:
                say(f"before the warm start: held-out loss {metrics['warmup/held_out_loss']:.3f}")
            self._started, self._first_step = perf_counter(), 0
            return
        now = perf_counter()
        if self._first_step is None:
            self._first_step, self._started = step - 1, now - metrics["time/step_s"]
        if evaluated and step < self._steps:  # the last one is in what a run says at its end
            say(f"after step {step}: {evaluated}")
        due = self._live or now - self._shown >= LINE_EVERY_S or step == self._steps
        if not due:
            return
        self._shown = now
        line = self._line(step, metrics, (now - self._started) / (step - self._first_step))
        if self._cell is not None:
            self._cell.show(line)
        elif self._live:
            LINE.show(line, sys.stdout, stays=True)
        else:
            write(f"{line}\n")

    def close(self) -> None:
        LINE.close()

    def _line(self, step: int, metrics: Mapping[str, float], step_s: float) -> str:
        filled = round(_BAR * step / max(self._steps, 1))
        bar = f"{'━' * filled}{'╌' * (_BAR - filled)} " if self._live else ""
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        if "warmup/loss" in metrics:
            parts.append(f"warm start  loss {metrics['warmup/loss']:.3f}")
            if "warmup/held_out_loss" in metrics:
                parts.append(f"held-out loss {metrics['warmup/held_out_loss']:.3f}")
        else:
            parts.append(f"reward {metrics['reward/mean']:.3f}")
        if "accuracy" in metrics:
            parts.append(f"accuracy {metrics['accuracy']:.1%}")
        parts.append(f"{metrics['tokens/s']:,.0f} tokens/s")
        if metrics.get("groups/failed") or metrics.get("rollouts/failed"):
            parts.append(f"{metrics.get('rollouts/failed', 0):.0f} rollouts failed")
        parts.append(f"{_time((self._steps - step) * step_s)} left")
        return bar + "  ".join(parts)


class _NotebookLine:
    """One line below a notebook cell, which changes."""

    def __init__(self) -> None:
        self._shown: Any = None  # an IPython.display.DisplayHandle, which has no types

    def show(self, line: str) -> None:
        from IPython.display import display

        text = {"text/plain": line}
        if self._shown is None:
            self._shown = display(text, raw=True, display_id=True)
        else:
            self._shown.update(text, raw=True)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
