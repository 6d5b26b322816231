"""math-verify's comparison. Runs in a worker process: its time-outs need the main thread's alarm signal."""

from __future__ import annotations

from math_verify import parse, verify


def equal(reply: str, answer: str) -> bool | None:
    """Whether the reply's last expression has the value of the answer's; None where the answer cannot be read."""
    gold = parse(answer) or parse(f"${answer}$")
    return bool(verify(gold, parse(reply))) if gold else None
