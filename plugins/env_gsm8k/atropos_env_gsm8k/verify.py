"""math-verify's comparison. Runs in a worker process: its time-outs need the main thread's alarm signal."""

from __future__ import annotations

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

_WAYS = [LatexExtractionConfig(), ExprExtractionConfig()]


def equal(stated: str, gold: str) -> bool:
    """Whether the expression `stated` has the value of the number `gold`."""
    return bool(verify(parse(gold, extraction_config=_WAYS), parse(f"${stated.strip('$')}$", extraction_config=_WAYS)))
