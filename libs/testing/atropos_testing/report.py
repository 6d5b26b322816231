"""The result of a contract check: findings by name, and the error with which a test fails."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from atropos_core.errors import AtroposError, ConfigError
from atropos_core.guards.exits import file_and_line
from atropos_core.interfaces import Finding

SHOWN = 3  # problems of one check that are spelt out
RAISED = (Exception, SystemExit, KeyboardInterrupt)  # by a component: no Ctrl-C among them, which cancels the check


class ContractBroken(AssertionError):
    """A component breaks its contract. The message lists every broken check with its remedy."""


class Report:
    """Findings in the order in which they are made. `names` are all checks; those in `skip` become notes."""

    def __init__(self, names: Sequence[str], skip: Iterable[str] = ()) -> None:
        self.findings: list[Finding] = []
        self.skip = frozenset(skip)
        for name in sorted(self.skip - set(names)):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(names)}."
            raise ConfigError(f"there is no check named {name!r} to skip. {hint}")

    def check(self, name: str, problems: Sequence[str], *, good: str, remedy: str) -> bool:
        """Add one finding: fine, with the text `good`, or broken, with the first of `problems`. Return True if it is fine."""
        if name in self.skip:
            self.findings.append(Finding(name, None, f"skipped; {_few(problems) if problems else good}"))
            return True
        if problems:
            self.findings.append(Finding(name, False, _few(problems), remedy))
        else:
            self.findings.append(Finding(name, True, good))
        return not problems

    def note(self, name: str, detail: str, remedy: str = "") -> None:
        self.findings.append(Finding(name, None, detail, remedy))


def expect_all_ok(label: str, findings: Sequence[Finding]) -> None:
    """Raise ContractBroken if a finding is not ok."""
    broken = [finding for finding in findings if finding.ok is False]
    if broken:
        lines = [f"{label} breaks {len(broken)} of {len(findings)} checks:"]
        for finding in broken:
            lines.append(f"  {finding.subject}: {finding.detail}")
            if finding.remedy:
                lines.append(f"      what to do: {finding.remedy}")
        raise ContractBroken("\n".join(lines))


def brief(text: str, most: int = 80) -> str:
    """Return `text` on one line, cut in the middle if it is long, with control characters escaped."""
    plain = repr(text)
    return plain if len(plain) <= most else f"{plain[: most // 2]} ... {plain[-most // 4 :]} ({len(text)} characters)"


def of_error(error: BaseException) -> str:
    """Return class, first line of the message, and the line of the component's code that raised the error."""
    if isinstance(error, AtroposError):  # which says itself where and what
        return f"{type(error).__name__}: {Exception.__str__(error)} {error.remedy or ''}".strip()
    message = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {message[:200]}{file_and_line(error.__traceback__)}"


def _few(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more
