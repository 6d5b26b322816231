"""math-verify's comparison. Runs in a worker process: its time-outs need the main thread's alarm signal."""

from __future__ import annotations

from dataclasses import replace

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from atropos_core.builtin.numbers import written_out

# Without the library's units, which read `3t` as 3. A number with a unit is not compared here.
_WAYS = [LatexExtractionConfig(normalization_config=replace(LatexExtractionConfig().normalization_config, units=False))]


def equal(stated: str, gold: str) -> bool:
    """True if the expression `stated` has the value of the number `gold`."""
    made, wanted = (f"\\boxed{{{written_out(text).strip('$')}}}" for text in (stated, gold))
    return bool(verify(parse(wanted, extraction_config=_WAYS), parse(made, extraction_config=_WAYS)))
