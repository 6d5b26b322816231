"""Decide whether a busy process is still working or has hung, from how long it has been silent.

A call may take a minute or an hour, so the limit is learned from earlier calls.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 2.5  # between two looks at what owes an answer, or an eighth of how long one is waited for

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Patience:
    """How long to wait for a process that has calls to answer: `[watch]` of the run file."""

    say_s: float = (
        20.0  # seconds of silence before a line names process and call; half of that if the process is stopped
    )
    least_s: float = 120.0  # seconds of silence before it is given up
    times: float = 10.0  # and this multiple of its usual call


DEFAULT_PATIENCE = Patience()


class Owed:
    """The calls that a process has not answered yet, by number. Times are of the event loop's clock. If a call reaches its own
    deadline, its silence counts on for the next call."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[str, float]] = {}  # kind, since
        self._usual: dict[
            str, float
        ] = {}  # longest call of each kind: those of an evaluation take longer than those of a step
        self._silent_s = 0.0  # before `_since`
        self._since: float | None = None  # start of the present silence, with calls pending
        self._excused: Collection[str] = ()
        self._last = ""

    def begin(self, number: int, kind: str, now: float) -> None:
        if self._since is None:
            self._since, self._last = now, kind
        self._pending[number] = (kind, now)

    def excuse(self, kinds: Collection[str], now: float) -> None:
        """Do not count calls of these kinds: they wait for their caller. Called at every look."""
        self._excused = kinds
        if not self._due():
            self.end_silence(now)

    def _due(self) -> list[tuple[str, float]]:
        return [entry for entry in self._pending.values() if entry[0] not in self._excused]

    @property
    def last(self) -> str:
        """Return the kind of the call that is, or was, pending longest."""
        return min(self._due(), key=lambda entry: entry[1], default=(self._last,))[0]

    def answered(self, number: int, now: float) -> None:
        if (entry := self._pending.pop(number, None)) is not None:
            self._usual[entry[0]] = max(now - entry[1], self._usual.get(entry[0], 0.0))

    def given_up(self, number: int, now: float, *, late: bool) -> None:
        """Remove a call. `late`: it reached its deadline; False: the caller no longer wants the answer."""
        if self._pending.pop(number, None) is None or self._pending or self._since is None:
            return
        self._silent_s = self._silent_s + now - self._since if late else 0.0
        self._since = None

    def end_silence(self, now: float) -> None:
        """End the silence: something arrived, so the process works."""
        self._silent_s, self._since = 0.0, None
        if self._pending:
            self._since, self._last = now, min(self._pending.values(), key=lambda entry: entry[1])[0]

    def silent_s(self, now: float) -> float:
        return 0.0 if self._since is None else self._silent_s + now - self._since

    def usual_s(self) -> float | None:
        """Return the longest earlier call of the pending kinds; None if one of them was never answered."""
        kinds = {kind for kind, _ in self._due()}
        if not kinds <= self._usual.keys():
            return None
        return max((self._usual[kind] for kind in kinds), default=None)

    def bound_s(self, patience: Patience) -> float | None:
        """Return the limit of silence; None if such a call was never answered, so that only its own deadline counts."""
        usual = self.usual_s()
        return None if usual is None else max(patience.least_s, patience.times * usual)


@dataclass(frozen=True)
class Seen:
    """A process and all its descendants at one moment."""

    stopped: tuple[tuple[int, str], ...]  # number and name of each that a signal or a debugger has stopped
    cpu_s: float
    is_elsewhere: bool = False  # on another machine, where neither is known

    def says(self, before: Seen | None, seconds: float) -> str:
        if self.is_elsewhere:
            return "it is on another machine, and cannot be looked at from here"
        if self.stopped:
            named = ", ".join(f"{name} (pid {pid})" for pid, name in self.stopped)
            return f"{named} is stopped; to continue it: kill -CONT {' '.join(str(pid) for pid, _ in self.stopped)}"
        if before is None or seconds <= 0:
            return "it runs"
        share = (self.cpu_s - before.cpu_s) / seconds
        return f"it is busy (CPU at {share:.0%})" if share > 0.05 else "it uses no CPU time: it is waiting or hanging"


def look_at(pid: int) -> Seen | None:
    """Look at a process; None if it has ended, or this kernel does not show processes."""
    found = _table()
    if pid not in found:
        return None
    children: dict[int, list[int]] = {}
    for number, (parent, *_) in found.items():
        children.setdefault(parent, []).append(number)
    stopped, cpu_s, left = [], 0.0, [pid]
    while left:
        number = left.pop()
        _, state, name, spent_s = found[number]
        cpu_s += spent_s
        if state in "Tt":
            stopped.append((number, _role(number) or name))
        left += children.get(number, [])
    return Seen(tuple(sorted(stopped)), cpu_s)


def _role(pid: int) -> str:
    """Return the role of one of our processes, which is its last argument; empty for others."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    hosted = any(argument.startswith("atropos_") for argument in arguments[1:3])  # python -m MODULE DESCRIPTOR ROLE
    return arguments[-1] if hosted and len(arguments) == 5 else ""


def _table() -> dict[int, tuple[int, str, str, float]]:
    """Return parent, state, name and seconds of CPU time of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text(errors="replace").rpartition(")")
        except OSError:  # it has just ended
            continue
        number, _, name = head.partition(" (")
        fields = rest.split()
        found[int(number)] = int(fields[1]), fields[0], name, (int(fields[11]) + int(fields[12])) / _TICKS
    return found
