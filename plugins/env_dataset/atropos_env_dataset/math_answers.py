r"""math-verify's comparison. Runs in a worker process, whose end is the time-out: the library's own needs the main thread's alarm signal,
and does not interrupt a long power.

An answer of a file is LaTeX as it stands (`2^{10}`), LaTeX between `$` or in `\boxed{}`, or plain text. math-verify's `parse` looks for
the answer in a text, and finds 2 in `2^{10}`, so that raw LaTeX is put in a box first, as verl does.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from atropos_core.builtin.numbers import only_value, stated_answer, written_out

DECIMALS = 6  # of a number that is not whole; of one below 1, significant digits
_LATEX = [LatexExtractionConfig()]
_REPEATED = re.compile(r"(\d{1,99})\.(\d{0,99})\\overline\{(\d{1,99})\}")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[/.-]\d\d?[/.-]\d{2,4}")
_MARKED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[")
_MISSING = re.compile(r"[-+]?(?:nan|inf|infinity|none|null|n/?a)", re.IGNORECASE)  # as Python and pandas write no value
_WORDS = re.compile(r"(?=.*[a-zA-Z]{4})[a-zA-Z' .-]+")
_WITH_UNIT = re.compile(r"[-+$€£\d.,]+\s*(?:[a-zA-Z ]+|\([a-zA-Z' -]+\))")
_LETTER = re.compile(r"\d ?[a-zA-Z](?![a-zA-Z])")  # a variable, or a unit: math-verify decides
_COMMAND = re.compile(r"\\(?:text|math|operatorname|[mfh]box|begin|end)[a-z]*\s*\{[^{}]*\}|\\[a-zA-Z]+")
_LETTERS = re.compile(r"[a-zA-Z' .-]{1,40}")
_SENTENCE = re.compile(
    r"[^\x00-\x7f]|(?<![a-zA-Z])(?!(?:and|or|sqrt|sin|cos|tan|log|ln|max|min)(?![a-zA-Z]))(?=[A-Z]*[a-z])[a-zA-Z]{2,}"
)
_RAW = re.compile(r"(?<!\S)(?=[^\s$]*[\\^])(?:[^\s$]*\\[a-zA-Z]+ )*[^\s$]*[^\s$.,;:!?]")
_PROSE = re.compile(r"[a-zA-Z]{4,}|[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")


def equal(answer: str, reply: str | None) -> bool | str:
    """Compare the value of the reply's last expression with the answer's. Without a reply, try whether the answer can be compared with
    anything. Returns text if it cannot: the reason."""
    gold, rounding = _gold(answer)
    if isinstance(gold, str):
        return gold
    if reply is None:
        _same(gold, parse(_boxed("0"), _LATEX, parsing_timeout=None), rounding)  # returns if the answer can be computed
        return True
    return reply.strip() == answer.strip() or _same(gold, _found(_latex(reply)), rounding)


@lru_cache(maxsize=64)  # the replies to one task have the same answer
def _gold(answer: str) -> tuple[list[Any] | str, int]:
    """The expressions that an answer may be, or why it is none; and the decimals that they are compared to."""
    text = (stated_answer(answer) or answer).strip()
    if _DATE.fullmatch(text):
        return "is a date, which reads as a subtraction or a division", 0
    if _MISSING.fullmatch(text):
        return "is a missing value", 0
    value = only_value(text)
    rounding = DECIMALS
    while value and abs(value) < 1:
        value, rounding = value * 10, rounding + 1
    latex = _latex(text)
    is_prose = _PROSE.search(_COMMAND.sub(" ", text)) and not _WITH_UNIT.fullmatch(text)
    number = None if "=" in text or is_prose else _whole(text)
    found = parse(number or (latex if _MARKED.search(latex) else _boxed(latex)), _LATEX, parsing_timeout=None)
    if not found or isinstance(found[0], str) or not _same(found[:1], found[:1], rounding):
        return "is not an expression that math-verify can read", 0
    is_marked = _WORDS.fullmatch(text) or _MARKED.search(latex)
    if not is_marked and any(isinstance(one, str) and _PROSE.search(_COMMAND.sub(" ", one)) for one in found):
        return "has words in it, which read as products of letters", 0
    return found, rounding


def _found(reply: str) -> list[Any]:
    """The expressions that a reply may give. math-verify finds those in `$` and `\\boxed{}`, and numbers between words. Raw LaTeX is put in
    a box, as that of an answer, or between `$` if there are words around it."""
    boxes = reply.count("\\boxed{")
    stated = stated_answer(reply.replace("####", "")) if boxes == 1 else None
    if (number := _whole(reply if stated is None else stated)) and (stated or not _MARKED.search(reply)):
        reply = number
    elif not boxes and not _MARKED.search(reply):
        if _LETTERS.fullmatch(reply) or not ("\n" in reply or _SENTENCE.search(_COMMAND.sub(" ", reply))):
            reply = _boxed(reply)
        else:
            reply = _RAW.sub(r"$\g<0>$", reply).rstrip(". \n")
    return list(parse(reply, parsing_timeout=None))


def _whole(text: str) -> str | None:
    """The whole number that a text is, with its currency, unit or marks, in a box. Per cent are left to
    math-verify, and a letter after a number, which may be a variable."""
    value = None if "%" in text or _LETTER.search(text) else only_value(text)
    return None if value is None or value.denominator > 1 else _boxed(str(value))


def _boxed(latex: str) -> str:
    text = latex.strip()
    return f"\\boxed{{\\text{{{text}}}}}" if _WORDS.fullmatch(text) else f"\\boxed{{{text}}}"


def _same(gold: list[Any], found: list[Any], rounding: int) -> bool:
    return bool(verify(gold, found, float_rounding=rounding, timeout_seconds=None))


def _latex(text: str) -> str:
    r"""With the digits and signs that math-verify knows: `−½` as `-1/2`, and `0.\overline{3}` as a fraction."""
    return _REPEATED.sub(_fraction, written_out(text))


def _fraction(found: re.Match[str]) -> str:
    whole, once, again = found.groups()
    under = 10 ** len(once) * (10 ** len(again) - 1)
    return f"\\frac{{{int(whole + once + again) - int(whole + once)}}}{{{under}}}"
