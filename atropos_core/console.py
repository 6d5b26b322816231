"""All printing. rich is imported when there is something to show."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from shutil import get_terminal_size
from threading import RLock, Thread
from time import perf_counter, sleep
from typing import IO, TYPE_CHECKING, Any, TypeVar

from atropos_core.errors import AtroposError

if TYPE_CHECKING:
    from rich.console import Console

    from atropos_core.interfaces import Finding

T = TypeVar("T")

WAIT_S = 1.0  # shorter waits are not shown
WAIT_TICK_S = 0.25
LINE_EVERY_S = 5.0  # between progress lines if the output is not a terminal
_BAR = 24
_GAP = 2  # between the columns of a table


def out() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, emoji=False)


def say(text: str = "") -> None:
    if _is_plain(text):
        _write_line(text)
    else:
        _put(out(), text, markup=False)


def warn(text: str) -> None:
    _put(_err(), f"[yellow]warning[/] {_safe(text)}")


def fail(error: AtroposError) -> None:
    """Print one of our own errors: its message, the remedy, and its notes."""
    lines = Exception.__str__(error).splitlines() or [type(error).__name__]
    console = _err()
    _put(console, f"[bold red]{type(error).__name__}[/] {_safe(lines[0])}")
    for line in lines[1:]:
        _put(console, line, markup=False)
    if error.remedy:
        _put(console, f"[bold]What to do:[/] {_safe(error.remedy)}")
    for note in getattr(error, "__notes__", ()):  # last: a traceback may have many lines
        _put(console, note, markup=False)


def broken(text: str) -> None:
    """Print one broken thing of a listing."""
    _put(out(), f"[bold red]broken[/]  {_safe(text)}")


def note(label: str, text: str) -> None:
    _put(out(), f"[yellow]{_safe(label)}[/]  {_safe(text)}")


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print aligned names and texts, one per line."""
    console = out()
    for name, text in rows:
        _put(console, f"  [cyan]{name:<10}[/] {_safe(text)}")


def document(value: Any) -> None:
    """Print facts as one JSON document on standard output. Numbers that are not finite become null."""
    import json
    import math

    def finite(one: Any) -> Any:
        if isinstance(one, float) and not math.isfinite(one):
            return None
        if isinstance(one, Mapping):
            return {str(key): finite(entry) for key, entry in one.items()}
        return [finite(entry) for entry in one] if isinstance(one, (list, tuple)) else one

    _write(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str) + "\n")


def escapes(text: str) -> None:
    """Write the escape codes of a picture, only to a terminal."""
    if sys.stdout.isatty():
        _LINE.close()
        _write(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table. On a terminal it fits the width: long texts continue below, broken between words. Elsewhere no text is
    broken."""
    cells = [[str(cell) for cell in row] for row in rows]
    if _is_plain(*columns, *(cell for row in cells for cell in row)):
        for line in _table(columns, cells, None):
            _write_line(line)
        return
    console = out()
    shown = _table(columns, cells, console.width if console.file.isatty() else None)
    for at, line in enumerate(shown):
        _put(console, line, markup=False, style="bold" if at == 0 else None)


def overview(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and descriptions under a title. On a terminal a long text continues below its own beginning."""
    longest = max((len(name) for name, _ in rows), default=0)
    if _is_plain(title, *(text for row in rows for text in row)):
        for line in ("", title, *(f"  {name:<{longest}}  {text}" for name, text in rows)):
            _write_line(line)
        return
    console = out()
    _put(console, f"\n[bold]{_safe(title)}[/]")
    for name, text in rows:
        for line in _broken(text, max(console.width - longest - 2 * _GAP, 1)):
            _put(console, f"  [cyan]{_safe(name.ljust(longest))}[/]  {_safe(line)}")
            name = ""


def findings_document(found: Iterable[Finding], **facts: Any) -> None:
    """Print a report as one JSON document; `ok` is null for what is neither good nor bad."""
    checks = [
        {"check": one.subject, "ok": one.ok, "found": one.detail, "remedy": one.remedy if not one.ok else ""}
        for one in found
    ]
    document({**facts, "ok": all(one["ok"] is not False for one in checks), "checks": checks})


def findings(found: Iterable[Finding]) -> None:
    """Print a report: problems come with their remedies."""
    words = {True: "ok", False: "BROKEN", None: "note"}
    rows = [
        (one.subject, words[one.ok], one.detail + (f"\n-> {one.remedy}" if one.remedy and not one.ok else ""))
        for one in found
    ]
    table(("check", "", "found"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return lines: the names of the columns, a rule, and the rows. `width` None: no limit."""
    filled = [columns, *rows]
    longest = [max(_cells(line) for row in filled for line in row[at].split("\n")) for at in range(len(columns))]
    words = [max(_cells(word) for row in filled for word in (row[at].split() or [""])) for at in range(len(columns))]
    widths = longest if width is None else _fitted(longest, words, width - _GAP * (len(columns) - 1))
    lines = []
    for row_at, row in enumerate(filled):
        if row_at == 1:
            lines.append((" " * _GAP).join("─" * size for size in widths))
        broken = [_broken(cell, size) for cell, size in zip(row, widths, strict=True)]
        for at in range(max(map(len, broken))):
            parts = [cell[at] if at < len(cell) else "" for cell in broken]
            sized = [part + " " * (size - _cells(part)) for part, size in zip(parts, widths, strict=True)]
            lines.append((" " * _GAP).join(sized).rstrip())
    return lines


def _fitted(longest: Sequence[int], words: Sequence[int], width: int) -> list[int]:
    """Return column widths that add up to `width`. The widest columns shrink first, down to their longest word; if that is not
    enough, words of the longest texts are broken."""
    widths = list(longest)
    while sum(widths) > width and max(widths) > 1:
        spare = [at for at in range(len(widths)) if widths[at] > words[at]] or [
            max((at for at in range(len(widths)) if widths[at] > 1), key=longest.__getitem__)
        ]
        widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def _cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _chopped(text: str, width: int) -> list[str]:
    from rich.cells import chop_cells

    return chop_cells(text, width)


def _broken(cell: str, width: int) -> list[str]:
    """Split the text into lines of at most `width`."""
    lines = []
    for line in cell.split("\n"):
        if _cells(line) <= width:
            lines.append(line)
            continue
        begun = ""
        for word in line.split(" "):
            joined = f"{begun} {word}" if begun else word
            if _cells(joined) > width and begun:
                lines.append(begun)
                joined = word
            *whole, begun = _chopped(joined, width) if _cells(joined) > width else [joined]
            lines += whole
        lines.append(begun)
    return lines


class _LiveLine:
    """The line of a terminal that changes. Anything else that Python prints starts on a new line."""

    def __init__(self) -> None:
        self.lock = RLock()  # for everything that is printed: the line of waits is printed by a thread
        self._on: IO[str] | None = None  # the stream with an open line
        self._stays = False
        self._unended = False  # True if other code last printed text without an end of line
        self._writes: dict[int, Callable[[str], int]] = {}  # of the streams themselves, by id

    def show(self, line: str, file: IO[str], *, stays: bool) -> None:
        """Show the line. `stays`: keep it when something else is printed, instead of removing it."""
        with self.lock:
            self._watch_streams()
            if self._on is not None and (self._on is not file or self._stays != stays):
                self.close()
            begin = "\n" if self._unended else "\r\x1b[2K"
            if self._unended:
                for other in (sys.stdout, sys.stderr):  # Python keeps a line until it ends
                    with suppress(OSError):
                        other.flush()
            self._unended = False
            self._write(file, f"{begin}{line}")
            self._on, self._stays = file, stays

    def close(self) -> None:
        with self.lock:
            if self._on is not None:
                file, self._on = self._on, None
                self._write(file, "\n" if self._stays else "\r\x1b[2K")

    def forget(self) -> None:
        self._on = None

    def close_what_goes(self) -> None:
        """Close the line unless it stays."""
        with self.lock:
            if not self._stays:
                self.close()

    def _write(self, file: IO[str], text: str) -> None:
        try:
            self._writes.get(id(file), file.write)(text)
            file.flush()
        except OSError as error:
            _go_on_without(file, error)

    def _watch_streams(self) -> None:
        """Let warnings, logging, print() and tracebacks of any code close the line, from the first one on. The streams' own `write`
        is replaced, because a logging handler keeps the stream that it was made with."""
        for file in (sys.stdout, sys.stderr):
            if id(file) in self._writes or not file.isatty():
                continue
            self._writes[id(file)] = write = file.write

            def written(text: str, write: Callable[[str], int] = write) -> int:
                with self.lock:
                    if text:
                        self.close()
                        self._unended = not text.endswith("\n")
                    return write(text)

            file.write = written  # type: ignore[method-assign]


_LINE = _LiveLine()  # a terminal has one
_LOST: list[OSError] = []  # what became of standard output


@dataclass(eq=False)
class Wait:
    """Something that is waited for. `done`: which of its parts are finished, if it has parts."""

    what: str
    began: float = field(default_factory=perf_counter)
    done: str = ""
    said: bool = False
    after_s: float | None = None  # how long it may take before it is shown; None: WAIT_S

    def text(self, now: float) -> str:
        return f"{self.what}, {self.done or f'{now - self.began:.0f} s'}"


class _Waits:
    """The current waits, shown by a thread, because the waiting code may be busy, for example importing."""

    def __init__(self) -> None:
        self._waits: list[Wait] = []
        self._thread: Thread | None = None
        self._survives_fork = False
        self.pass_on: Callable[[int, str | None], object] | None = None

    def add(self, wait: Wait) -> None:
        if self.pass_on is not None:
            self.pass_on(id(wait), wait.what)
        with _LINE.lock:
            self._waits.append(wait)
            if not self._survives_fork:
                self._survives_fork = True
                os.register_at_fork(after_in_child=_forget_threads)
            if self._thread is None:
                self._thread = Thread(target=self._say, name="atropos-waits", daemon=True)
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        if self.pass_on is not None:
            self.pass_on(id(wait), None)
        with _LINE.lock:
            if wait in self._waits:  # not in a fork
                self._waits.remove(wait)
            if not self._waits:
                _LINE.close_what_goes()

    def texts(self) -> list[str]:
        return [wait.text(perf_counter()) for wait in self._waits]

    def _say(self) -> None:
        while True:
            sleep(WAIT_TICK_S)
            with _LINE.lock:
                if not self._waits:
                    self._thread = None
                    return
                now = perf_counter()
                noticed = [
                    wait
                    for wait in self._waits
                    if now - wait.began >= (WAIT_S if wait.after_s is None else wait.after_s)
                ]
                if noticed and sys.stderr.isatty():
                    line = f"waiting for {'; '.join(wait.text(now) for wait in noticed)}"
                    _LINE.show(_cut(line, get_terminal_size().columns - 1), sys.stderr, stays=False)
                    continue
                for wait in noticed:
                    if not wait.said:
                        wait.said = True
                        _err().print(f"waiting for {wait.what}", markup=False)

    def forget(self) -> None:
        self._waits, self._thread = [], None


_WAITS = _Waits()


def _forget_threads() -> None:
    """After a fork: the thread does not exist here, and may have held the lock."""
    _LINE.lock = RLock()
    _LINE.forget()
    _WAITS.forget()


@contextmanager
def waiting(what: str, *, said: bool = False, after_s: float | None = None) -> Iterator[Wait]:
    """Show on standard error what is waited for, after `after_s` (by default one second). A terminal shows it in its last line, with its
    duration; elsewhere one line is printed, unless it was `said` already. `what` continues "waiting for"."""
    wait = begin_wait(what, said=said, after_s=after_s)
    try:
        yield wait
    finally:
        end_wait(wait)


def begin_wait(what: str, *, said: bool = False, after_s: float | None = None) -> Wait:
    """Begin a wait like `waiting`, for one that ends in other code."""
    wait = Wait(what, said=said, after_s=after_s)
    _WAITS.add(wait)
    return wait


def end_wait(wait: Wait) -> None:
    _WAITS.remove(wait)


def waited_for() -> list[str]:
    """Return what is waited for now, and since when."""
    with _LINE.lock:
        return _WAITS.texts()


def pass_waits_on(to: Callable[[int, str | None], object]) -> None:
    """Pass waits to the process that waits for this one: `to` gets a number and what is waited for, then None at its end."""
    _WAITS.pass_on = to


async def waited(what: str, work: Awaitable[T], *, after_s: float | None = None) -> T:
    """Return the result of `work`, which is shown as waited for (see `waiting`)."""
    with waiting(what, after_s=after_s):
        return await work


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: max(columns - 1, 0)]}…"


def quoted(path: object) -> str:
    """Quote a path for a shell, so that a leading dash does not make it an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


class StepProgress:
    """Progress of a run: a live line on a terminal, otherwise a line every few seconds and at the ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = perf_counter()
        self._first_step: int | None = None
        self._shown = 0.0
        self._cell = _NotebookLine() if out().is_jupyter else None
        self._live = sys.stdout.isatty() or self._cell is not None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        evaluated = held_out(metrics)
        if step == 0:
            if evaluated:
                say(f"before training: {evaluated}")
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
            _LINE.show(line, sys.stdout, stays=True)
        else:
            _write(f"{line}\n")

    def close(self) -> None:
        _LINE.close()

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


def held_out(metrics: Mapping[str, float]) -> str:
    """Describe the result of an evaluation; empty if there was none."""
    if "eval/accuracy" in metrics:
        figure = f"accuracy {metrics['eval/accuracy']:.1%}"
    elif "eval/reward" in metrics:
        figure = f"reward {metrics['eval/reward']:.3f}"
    else:
        return ""
    problems = metrics["eval/problems"]
    cut = metrics.get("eval/cut_off_lowest", 0)
    said = f", {cut:.0%} of the replies were cut off at max_tokens and earned least" if cut > 0.5 else ""
    return f"held-out {figure} on {problems:.0f} problem{'s' * (problems != 1)}{_failed(metrics)}{said}"


def _failed(metrics: Mapping[str, float]) -> str:
    """Describe the failed rollouts of an evaluation, which may not be the policy's fault."""
    failed = metrics.get("eval/failed", 0)
    counted = f" and count{'s' * (failed == 1)} as wrong" if "eval/accuracy" in metrics else ""
    return f", {failed:.0f} rollout{'s' * (failed != 1)} failed{counted}" if failed else ""


def held_out_change(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Compare two evaluations: over all problems, by further graders, and by environment if there are several. Compares accuracy,
    or the reward if scores have no `correct`. Empty if one of the two is missing."""
    name = next((one for one in ("eval/accuracy", "eval/reward") if one in before and one in after), None)
    if name is None:
        return []
    problems = f"{after['eval/problems']:.0f} problems{_failed(after)}"
    if name == "eval/accuracy":
        points = 100 * (after[name] - before[name])
        lines = [f"held-out accuracy {before[name]:.1%} -> {after[name]:.1%} ({points:+.1f} points, {problems})"]
    else:
        gain = after[name] - before[name]
        lines = [f"held-out reward {before[name]:.3f} -> {after[name]:.3f} ({gain:+.3f}, {problems})"]
    kinds = ("eval/accuracy_", "eval/pass@")
    for one in (one for one in after if one.startswith(kinds) and one in before):
        shown = one.removeprefix("eval/").removeprefix("accuracy_")
        lines.append(f"  {shown}: {before[one]:.1%} -> {after[one]:.1%}")
    environments = [one.split("/")[1] for one in after if one.startswith("eval/") and one.endswith("/reward")]
    for environment in (one for one in environments if f"eval/{one}/reward" in before):
        accuracy, reward = f"eval/{environment}/accuracy", f"eval/{environment}/reward"
        if accuracy in before and accuracy in after:
            lines.append(f"  {environment}: accuracy {before[accuracy]:.1%} -> {after[accuracy]:.1%}")
        else:
            lines.append(f"  {environment}: reward {before[reward]:.3f} -> {after[reward]:.3f}")
    return lines


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _is_plain(*texts: str) -> bool:
    """True if rich would print these texts unchanged. Importing it takes a sixth of the time of `atropos plugins`."""
    if sys.stdout.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"):
        return False
    notebook = "IPython" in sys.modules  # where rich shows HTML
    return not notebook and all(line.isprintable() for text in texts for line in text.split("\n"))


def _write_line(text: str) -> None:
    _LINE.close()
    _write(f"{text}\n")


def _put(console: Console, *what: Any, **how: Any) -> None:
    _LINE.close()
    try:
        try:
            console.print(*what, **how)
        except UnicodeEncodeError:
            _escape_what_has_no_bytes(console.file)
            console.print(*what, **how)
    except (OSError, SystemExit) as error:  # rich raises the latter for a pipe without a reader
        _go_on_without(console.file, error)


def _write(text: str) -> None:
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            _escape_what_has_no_bytes(sys.stdout)
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _go_on_without(sys.stdout, error)


def refuse_lost_output() -> None:
    """Raises AtroposError if something printed could not be written, except when the reader has gone (as `head` does). Called at
    the end of commands whose only result is their output."""
    if _LOST:
        raise AtroposError(
            f"what this command printed could not be written to standard output: {_LOST[0].strerror}.",
            remedy="Make room there, or write it elsewhere, and type it again.",
        )


def _escape_what_has_no_bytes(file: IO[str]) -> None:
    """From now on, escape characters that the terminal's encoding lacks, and half surrogate pairs, as Python does on standard
    error. The failed write wrote nothing."""
    if reconfigure := getattr(file, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def reader_gone(error: OSError, descriptor: int) -> bool:
    """True if this write error means that the reader has gone: a closed pipe or a closed terminal. EIO from a disk is a disk
    error."""
    on_a_disk = stat.S_ISREG(os.fstat(descriptor).st_mode)
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and not on_a_disk)


def _go_on_without(file: IO[str], error: BaseException) -> None:
    """After the terminal or pipe has gone, or the disk is full, discard further output so that the run continues."""
    with suppress(OSError, ValueError):
        if isinstance(error, OSError) and file.fileno() == 1 and not reader_gone(error, 1):
            _LOST.append(error)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def _err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(text)
