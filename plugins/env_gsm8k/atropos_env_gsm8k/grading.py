"""Grading: what a reply answers, strictly and leniently, and whether that equals the gold answer.

Strict: the content of the last `\\boxed{}`, or what follows the last `####`. Lenient: that, or else the last number in
the text. A stated answer that has one number in it is compared here (`atropos_core.builtin.numbers`). Any other expression is
compared by math-verify, in its own process under a deadline (sympy may take for ever).
"""

from __future__ import annotations

from atropos_core.builtin.numbers import answer_value, is_same, last_value, only_value, stated_answer
from atropos_core.errors import DataError, DeadlineExceeded, RemoteError
from atropos_env_kit.function_worker import Worker

LONGEST = 200  # characters of an answer; anything longer is not an answer

WORKER = "atropos_env_gsm8k.verify:equal"


def lenient_answer(text: str) -> str | None:
    """The stated answer if it has a number in it, or else the last number of the text."""
    stated = stated_answer(text)
    if stated is not None and any(letter.isdigit() for letter in stated):
        return stated
    value = last_value(text)
    return None if value is None else str(value)


def gold_number(answer: str, name: str) -> str:
    """The number after `####` of a gold answer. Raises DataError if there is none."""
    stated = stated_answer(answer)
    if stated is None or only_value(stated) is None:
        raise DataError(f"gsm8k: the answer of problem {name} does not end in `#### number`: {answer[-60:]!r}")
    return stated


class Grader:
    """Compares stated answers with gold numbers."""

    def __init__(self, deadline_s: float) -> None:
        self._worker = Worker(WORKER)
        self._deadline_s = deadline_s
        self.timeouts = 0

    async def equals(self, stated: str | None, gold: str) -> bool:
        """True if they are the same number. False if they cannot be compared in time."""
        if stated is None or len(stated) > LONGEST:
            return False
        if (number := only_value(stated)) is not None:
            return is_same(number, answer_value(gold))
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
