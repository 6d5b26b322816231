"""Grading: what a reply answers, strictly and leniently, and whether that equals the gold answer.

Strict: the content of the last `\\boxed{}`, or what follows the last `####`. Lenient: that, or else the last number in
the text. Plain numbers are compared here, exactly; any other expression is compared by math-verify, in a process of its
own under a deadline (sympy may take for ever).
"""

from __future__ import annotations

import re
from fractions import Fraction

from atropos_core.errors import DataError, DeadlineExceeded, RemoteError
from atropos_core.processes.function_worker import Worker

_PLAIN = re.compile(r"[-+]?\d+(?:\.\d*)?|[-+]?\.\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LAST_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?|-?\.\d+")
_BOXED = "\\boxed{"
LONGEST = 200  # characters of an answer; a longer one is no answer

WORKER = "atropos_env_gsm8k.verify:equal"


def strict_answer(text: str) -> str | None:
    """What the reply states as its answer, by either mark, whichever comes last."""
    boxed, hashed = text.rfind(_BOXED), text.rfind("####")
    if boxed > hashed:
        return _braced(text[boxed + len(_BOXED) :])
    if hashed >= 0:
        lines = text[hashed + 4 :].strip().splitlines()
        return lines[0].strip() if lines and lines[0].strip() else None
    return None


def lenient_answer(text: str) -> str | None:
    """The strict answer where it has a number in it, or else the last number of the text."""
    stated = strict_answer(text)
    if stated is not None and any(letter.isdigit() for letter in stated):
        return stated
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None


def plain_number(text: str) -> Fraction | None:
    """`$1,250.00` -> 1250; None for what is more than a number with its currency, unit sign or full stop."""
    bare = _THOUSANDS.sub("", text.strip().strip("$").rstrip(".%$ ").replace("\\$", "").replace("\\%", "").strip())
    return Fraction(bare) if len(bare) <= LONGEST and _PLAIN.fullmatch(bare) else None


def gold_number(answer: str, name: str) -> str:
    """The number after `####` of a gold answer. Raises DataError where there is none."""
    stated = strict_answer(answer)
    if stated is None or plain_number(stated) is None:
        raise DataError(f"gsm8k: the answer of problem {name} does not end in `#### number`: {answer[-60:]!r}")
    return stated


class Grader:
    """Compares stated answers with gold numbers."""

    def __init__(self, deadline_s: float) -> None:
        self._worker = Worker(WORKER)
        self._deadline_s = deadline_s
        self.timeouts = 0

    async def equals(self, stated: str | None, gold: str) -> bool:
        """Whether they are the same number. What cannot be compared in time is not."""
        if stated is None or len(stated) > LONGEST:
            return False
        if (number := plain_number(stated)) is not None:
            return number == plain_number(gold)
        if not any(letter.isdigit() for letter in stated):
            return False
        try:
            return bool(await self._worker.call(stated, gold, deadline_s=self._deadline_s))
        except DeadlineExceeded:
            self.timeouts += 1
            return False
        except RemoteError as error:
            raise DataError(f"math-verify could not compare {stated!r} with {gold!r}: {error}") from error

    async def close(self) -> None:
        await self._worker.close()


def _braced(text: str) -> str | None:
    """The text up to the brace that closes the one before it; None where it is never closed."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:at].strip() or None
    return None
