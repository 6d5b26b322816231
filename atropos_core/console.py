"""The only file that prints. rich is imported when there is something to show."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from atropos_core.errors import AtroposError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from atropos_core.interfaces import Finding

LINE_EVERY_S = 5.0  # between progress lines where there is no terminal
_BAR = 24


def out() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, emoji=False)


def say(text: str = "") -> None:
    _put(out(), text, markup=False)


def warn(text: str) -> None:
    _put(_err(), f"[yellow]warning[/] {_safe(text)}")


def fail(error: AtroposError) -> None:
    """An error that we raised on purpose: its message, and what to do."""
    lines = Exception.__str__(error).splitlines() or [type(error).__name__]
    console = _err()
    _put(console, f"[bold red]{type(error).__name__}[/] {_safe(lines[0])}")
    for line in [*lines[1:], *getattr(error, "__notes__", ())]:
        _put(console, line, markup=False)
    if error.remedy:
        _put(console, f"[bold]What to do:[/] {_safe(error.remedy)}")


def broken(text: str) -> None:
    """One broken thing in a listing."""
    _put(out(), f"[bold red]broken[/]  {_safe(text)}")


def note(label: str, text: str) -> None:
    _put(out(), f"[yellow]{_safe(label)}[/]  {_safe(text)}")


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Aligned name and text, one a line."""
    console = out()
    for name, text in rows:
        _put(console, f"  [cyan]{name:<10}[/] {_safe(text)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    _put(out(), _table(columns, rows, title))


def findings(found: Iterable[Finding]) -> None:
    """A report: what is wrong comes with what to do."""
    words = {True: "ok", False: "BROKEN", None: "note"}
    rows = [
        (one.subject, words[one.ok], one.detail + (f"\n-> {one.remedy}" if one.remedy and not one.ok else ""))
        for one in found
    ]
    table(("check", "", "found"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


class StepProgress:
    """Progress of a run: a live line on a terminal, otherwise a line every few seconds and at the ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = perf_counter()
        self._first_step: int | None = None
        self._shown = 0.0
        self._accuracy: float | None = None
        self._live = sys.stdout.isatty()
        self._open_line = False

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        if "eval/accuracy" in metrics:
            self._accuracy = metrics["eval/accuracy"]
        if step == 0:
            if self._accuracy is not None:
                say(
                    f"before training: held-out accuracy {self._accuracy:.1%} on {metrics['eval/problems']:.0f} problems"
                )
            self._started, self._first_step = perf_counter(), 0
            return
        now = perf_counter()
        if self._first_step is None:
            self._first_step, self._started = step - 1, now - metrics["time/step_s"]
        due = self._live or now - self._shown >= LINE_EVERY_S or step == self._steps
        if not due:
            return
        self._shown = now
        line = self._line(step, metrics, (now - self._started) / (step - self._first_step))
        if self._live:
            _write(f"\r\x1b[2K{line}")
            self._open_line = True
        else:
            _write(f"{line}\n")

    def close(self) -> None:
        if self._open_line:
            _write("\n")
            self._open_line = False

    def _line(self, step: int, metrics: Mapping[str, float], step_s: float) -> str:
        filled = round(_BAR * step / max(self._steps, 1))
        bar = f"{'━' * filled}{'╌' * (_BAR - filled)} " if self._live else ""
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}", f"reward {metrics['reward/mean']:.3f}"]
        if "accuracy" in metrics:
            parts.append(f"accuracy {metrics['accuracy']:.1%}")
        parts.append(f"{metrics['tokens/s']:,.0f} tokens/s")
        if metrics.get("groups/failed") or metrics.get("rollouts/failed"):
            parts.append(f"{metrics.get('rollouts/failed', 0):.0f} rollouts failed")
        parts.append(f"{_time((self._steps - step) * step_s)} left")
        return bar + "  ".join(parts)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _put(console: Console, *what: Any, **how: Any) -> None:
    try:
        console.print(*what, **how)
    except (OSError, SystemExit):  # the latter is rich's answer to a pipe that nobody reads
        _read_by_nobody(console.file)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        _read_by_nobody(sys.stdout)


def _read_by_nobody(file: IO[str]) -> None:
    """The terminal or pipe has gone: what is printed from here on goes nowhere, and the run goes on."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def _err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(text)
