"""math-verify's comparison. Runs in a worker process: its time-outs need the main thread's alarm signal."""

from __future__ import annotations

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from atropos_core.builtin.numbers import written_out

_WAYS = [LatexExtractionConfig(), ExprExtractionConfig()]


def equal(stated: str, gold: str) -> bool:
    """Whether the expression `stated` has the value of the number `gold`."""
    expression = f"${written_out(stated).strip('$')}$"
    return bool(verify(parse(written_out(gold), extraction_config=_WAYS), parse(expression, extraction_config=_WAYS)))
