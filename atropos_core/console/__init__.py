"""Print lines, warnings, errors with their remedies, facts, tables and JSON.

`terminal` has the streams, `waits` the line of what is waited for. rich is imported when it prints something.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from atropos_core.console.terminal import is_plain, put, put_line, rich_console, write
from atropos_core.errors import AtroposError

if TYPE_CHECKING:
    from rich.table import Table

    from atropos_core.interfaces import Finding


def say(text: str = "") -> None:
    if is_plain(text):
        put_line(text)
    else:
        put(rich_console(), text, markup=False)


def warn(text: str) -> None:
    put(rich_console(stderr=True), f"[yellow]warning[/] {_safe(text)}")


def fail(error: AtroposError) -> None:
    """Print one of our own errors: its message, the remedy, and its notes."""
    lines = Exception.__str__(error).splitlines() or [type(error).__name__]
    console = rich_console(stderr=True)
    put(console, f"[bold red]{type(error).__name__}[/] {_safe(lines[0])}")
    for line in lines[1:]:
        put(console, line, markup=False)
    if error.remedy:
        put(console, f"[bold]What to do:[/] {_safe(error.remedy)}")
    for note in getattr(error, "__notes__", ()):  # last: a traceback may have many lines
        put(console, note, markup=False)


def broken(text: str) -> None:
    """Print one broken thing of a listing."""
    put(rich_console(), f"[bold red]broken[/]  {_safe(text)}")


def note(label: str, text: str, *, stderr: bool = False) -> None:
    put(rich_console(stderr=stderr), f"[yellow]{_safe(label)}[/]  {_safe(text)}")


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print aligned names and texts, one per line."""
    console = rich_console()
    for name, text in rows:
        put(console, f"  [cyan]{name:<10}[/] {_safe(text)}")


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

    write(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table. On a terminal it fits the width: long texts continue below, broken between words. Elsewhere no text is
    broken."""
    cells = [[str(cell) for cell in row] for row in rows]
    if is_plain(*columns, *(cell for row in cells for cell in row)):
        for line in _lines(columns, cells):
            put_line(line)
        return
    console = rich_console()
    if console.file.isatty():
        put(console, _fitted_table(columns, cells, console.width), soft_wrap=False)
        return
    for at, line in enumerate(_lines(columns, cells)):
        put(console, line, markup=False, style="bold" if at == 0 else None)


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


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the columns, a rule, and the rows, as wide as they are."""
    widths = [_width(column) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, ["─" * width for width in widths], *rows):
        for parts in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            filled = [part + " " * (width - _cells(part)) for part, width in zip(parts, widths, strict=True)]
            lines.append("  ".join(filled).rstrip())
    return lines


def _fitted_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table that is at most `width` wide. rich's own widths would break a name before a long text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    of_columns = list(zip(columns, *rows, strict=True))
    longest = [_width(column) for column in of_columns]
    words = [_width([word for cell in column for word in cell.split()]) for column in of_columns]
    for name, size in zip(columns, _fitted(longest, words, width - 2 * (len(columns) - 1)), strict=True):
        table.add_column(Text(name), width=size, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _width(texts: Iterable[str]) -> int:
    return max((_cells(line) for text in texts for line in text.split("\n")), default=0)


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


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def quoted(path: object) -> str:
    """Quote a path for a shell, so that a leading dash does not make it an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
