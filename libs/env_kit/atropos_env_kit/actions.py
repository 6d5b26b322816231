"""Find the action in a reply, for environments that are stepped.

A pattern is searched in a child process, with a deadline: one that backtracks on some reply would hold Python's lock, and block every
other rollout.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

from atropos_core.errors import DataError, DeadlineExceeded
from atropos_env_kit.function_worker import Worker

if TYPE_CHECKING:
    from atropos_env_kit.stepping import SteppingOptions

PATTERN_DEADLINE_S = 10.0


class ActionReader:
    """Reads the actions of one environment. Its process starts with the first reply in which a pattern is searched."""

    def __init__(self, options: SteppingOptions, *, deadline_s: float = PATTERN_DEADLINE_S) -> None:
        self.options = options
        self._deadline_s = deadline_s
        self._worker = Worker("atropos_env_kit.actions:last_match")

    async def action_of(self, reply: str) -> str | None:
        """Return the action, without the template, or None if the reply has none. Raises DataError if the search does not end."""
        if self.options.action == "reply":
            return reply
        if self.options.action == "boxed":
            return last_boxed(reply)
        text = reply.encode(errors="replace").decode()  # half a surrogate pair cannot be encoded, and never matches
        try:
            found: str | None = await self._worker.call(self.options.pattern, text, deadline_s=self._deadline_s)
        except DeadlineExceeded as error:
            raise DataError(
                f"pattern {self.options.pattern!r} was looked for in a reply of {len(reply):,} characters for more than "
                f"{self._deadline_s:g} s: it backtracks.",
                remedy="Write it without repeats inside repeats, such as (a+)+.",
            ) from error
        return found

    async def close(self) -> None:
        await self._worker.close()


def last_match(pattern: str, reply: str) -> str | None:
    """Return the first group of the last match, or all of it if there is no group; None without a match."""
    for match in deque(re.finditer(pattern, reply), maxlen=1):
        return match[1 if match.re.groups else 0]
    return None


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} that is closed."""
    end = len(text)
    while (begin := text.rfind("\\boxed{", 0, end)) >= 0:
        inside, depth = begin + len("\\boxed{"), 1
        for at in range(inside, len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if not depth:
                return text[inside:at]
        end = begin
    return None
