r"""math-verify's comparison. Runs in a worker process, whose end is the time-out: the library's own needs the main thread's alarm signal,
and does not interrupt a long power.

An answer of a file is LaTeX as it stands (`2^{10}`), LaTeX between `$` or in `\boxed{}`, or plain text. math-verify's `parse` looks for
the answer in a text, and finds 2 in `2^{10}`, so that raw LaTeX is put in a box first, as verl does.

Units are removed here and not by math-verify, which takes `t`, `s`, `c` and `ab` for units and reads `3t` as 3. A unit is `\text{}` or a
word after a number. A single letter is a variable, but for the letter of a usual unit (`5 L`) in a reply to an answer that is a number.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from atropos_core.builtin.numbers import (
    SCALES,
    SHORT_UNITS,
    UNIT_LETTERS,
    last_value,
    numbers,
    only_value,
    stated_answer,
    written_out,
)  # fmt: skip

DECIMALS = 6  # of a number that is not whole; of one below 1, significant digits
_LATEX = [
    LatexExtractionConfig(normalization_config=replace(LatexExtractionConfig().normalization_config, units=False))
]
_ANYWHERE = [*_LATEX, ExprExtractionConfig()]
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[/.-]\d\d?[/.-]\d{2,4}")
_MARKS = r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\(([^$]+?)\\\)|\\\[([^$]+?)\\\]"
_MARKED = re.compile(_MARKS)
_ALL_MARKED = re.compile(rf"(?:{_MARKS})\.?")
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MISSING = re.compile(r"[-+]?(?:nan|inf|infinity|none|null|n/?a)", re.IGNORECASE)  # as Python and pandas write no value
_WORDS = re.compile(r"(?=.*[a-zA-Z]{4})[a-zA-Z' .-]+")
_WITH_UNIT = re.compile(r"[-+$€£\d.,]+\s*(?:[a-zA-Z ]+|\([a-zA-Z' -]+\))")
_LETTER = re.compile(r"\d ?[a-zA-Z](?![a-zA-Z])")
_TEXT = r"\\(?:text(?:rm|bf|it|normal|sf)?|math(?:rm|bf|it|sf)|operatorname|[mfh]box)\s*(?=\{)"
_COMMAND = re.compile(r"\\(?:text|math|operatorname|[mfh]box|begin|end)[a-z]*\s*\{[^{}]*\}|\\[a-zA-Z]+")
_LETTERS = re.compile(r"[a-zA-Z' .-]{1,40}")
_SENTENCE = re.compile(
    r"[^\x00-\x7f]|(?<![a-zA-Z])(?!(?:and|or|sqrt|sin|cos|tan|log|ln|max|min)(?![a-zA-Z]))(?=[A-Z]*[a-z])[a-zA-Z]{2,}"
)
_RAW = re.compile(r"(?<!\S)(?=[^\s$]*[\\^])(?:[^\s$]*\\[a-zA-Z]+ )*[^\s$]*[^\s$.,;:!?]")
_PROSE = re.compile(r"[a-zA-Z]{4,}|[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")
_UNIT = re.compile(
    r"(?P<value>(?:[-+\d.,*/^{}() ~$€£¥]|\\(?:(?:[dtc]?frac|sqrt|pi|cdot|times|left|right)(?![a-zA-Z])|[,;:! $]))++)"
    rf"(?P<unit>(?:{_TEXT}|[a-zA-Z])(?:{_TEXT}|[a-zA-Z/·.^ ~{{}}()'\d-]|\\(?:cdot(?![a-zA-Z])|[,;:! ]))*+)"
)
_POWER = re.compile(r"\^ ?(?:\{ ?-?\d ?\}|\d)")
_BASE = re.compile(r"(-?[\da-zA-Z]+)_(?:\{(\d\d?)\}|(\d))")
_GREEK = {
    letter: f"\\{name} "
    for letter in "αβγδεζηθικλνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
    for name in [unicodedata.name(letter).rsplit()[-1].replace("LAMDA", "LAMBDA")]
    for name in [name.capitalize() if letter.isupper() else name.lower()]
}
_SYMBOLS = str.maketrans(
    _GREEK
    | {
        "∞": r"\infty ", "∅": r"\emptyset ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "±": r"\pm ", "∓": r"\mp ", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ", "°": r"^\circ ",
    }
)  # fmt: skip
_ROOT = re.compile(r"√ ?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|\{([^{}]*)\})")
_PART = r"(?:\{([^{}]*)\}|(\w))"
_BINOMIAL = re.compile(rf"\\[dt]?binom ?{_PART} ?{_PART}|\{{([^{{}}]*)\\choose([^{{}}]*)\}}")


def equal(answer: str, reply: str | None) -> bool | str:
    """Compare the value of the reply's last expression with the answer's. Without a reply, try whether the answer can be compared with
    anything. Returns text if it cannot: the reason."""
    gold, rounding = _gold(answer)
    if isinstance(gold, str):
        return gold
    if reply is None:
        _same(gold, parse(_boxed("0"), _LATEX, parsing_timeout=None), rounding)  # returns if the answer can be computed
        return True
    if reply.strip() == answer.strip():
        return True
    own, said = _inner(_latex(answer)) or answer, _inner(_latex(reply)) or reply
    if (words := _words(own)) is not None and words == _words(said):
        return True
    if (based := _BASE.fullmatch(said.strip())) is not None:
        return _in_base(based) == (_in_base(of) if (of := _BASE.fullmatch(own.strip())) else only_value(own))
    is_number = not getattr(gold[0], "free_symbols", True)
    return _same(gold, _found(_latex(reply), is_number), rounding)


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
    inner = _inner(latex) or (None if _MARKED.search(latex) else latex)
    found = parse(number or (latex if inner is None else _boxed(_read(inner))), _LATEX, parsing_timeout=None)
    if not found or isinstance(found[0], str) or not _same(found[:1], found[:1], rounding):
        return "is not an expression that math-verify can read", 0
    is_marked = _words(inner or "") is not None or _MARKED.search(latex)
    if not is_marked and any(isinstance(one, str) and _PROSE.search(_COMMAND.sub(" ", one)) for one in found):
        return "has words in it, which read as products of letters", 0
    return found, rounding


def _found(reply: str, is_number: bool) -> list[Any]:
    """The expressions that a reply may give. math-verify finds those in `$` and `\\boxed{}`, and numbers between words. Raw LaTeX is put in
    a box, as that of an answer, or between `$` if there are words around it. `is_number`: the answer is a number, so
    that a letter after the reply's number may be a unit."""
    inner = _inner(reply)
    is_bare = inner is None and "\\boxed{" not in reply and not _MARKED.search(reply)
    is_line = "\n" not in reply and not _SENTENCE.search(_COMMAND.sub(" ", reply))
    if is_bare and (is_line or _LETTERS.fullmatch(reply)):
        inner = reply
    if is_number and (number := _whole(reply if inner is None else inner, units=True)):
        return list(parse(number, _LATEX, parsing_timeout=None))
    if inner is not None:
        return list(parse(_boxed(_read(inner, is_number)), _LATEX, parsing_timeout=None))
    if "\\boxed{" in reply:
        reply = _BOX.sub(lambda box: _boxed(_read(box[1], is_number)), reply)
        return list(parse(reply, _LATEX, parsing_timeout=None))
    *_, last = [None, *_MARKED.finditer(reply)]
    if last is None:
        reply = _RAW.sub(r"$\g<0>$", reply).rstrip(". \n")
        *_, last = [None, *_MARKED.finditer(reply)]
    after = reply[last.end() if last else 0 :]
    if numbers(after) and last_value(after) is None:
        return []  # math-verify would find 3 in "it is 3x"
    reply = _MARKED.sub(lambda of: f"${_read(_content(of), is_number)}$", reply)
    return list(parse(reply, _ANYWHERE, parsing_timeout=None))


def _inner(text: str) -> str | None:
    """The content of the only box of a text, or of the marks that are around all of it."""
    if text.count("\\boxed{") == 1:
        return stated_answer(text.replace("####", ""))
    found = _ALL_MARKED.fullmatch(text.strip())
    return None if found is None or "\\boxed{" in text else _content(found)


def _content(marked: re.Match[str]) -> str:
    return str(next(filter(None, marked.groups())))


def _read(latex: str, units: bool = False) -> str:
    """The expression without its unit, and both values of one that has one sign `\\pm`."""
    latex = _without_unit(" ".join(latex.split()).rstrip(" ."), units)
    if len(re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", latex)) == 1 and not re.search(r"[,;]|\\cup", latex):
        value = re.sub(r"^[a-zA-Z] ?=", "", latex)
        return ", ".join(re.sub(r"\\(?:pm|mp)(?![a-zA-Z])", sign, value) for sign in "+-")
    return latex


def _without_unit(latex: str, units: bool) -> str:
    found = _UNIT.fullmatch(latex)
    if found is None or not re.search(r"\d|\\pi", found["value"]):
        return latex
    unit = found["unit"]
    in_text = re.match(_TEXT, unit) is not None
    words = re.findall("[a-zA-Z]+", re.sub(rf"{_TEXT}|\\cdot", " ", unit))
    value = found["value"].rstrip(" ({~\\,;:!")
    is_unit = all(
        word in SHORT_UNITS if 1 < len(word) < 4 else word in UNIT_LETTERS and (in_text or units) if len(word) == 1
        else word.lower() not in (*SCALES, "percent", "percentage")
        for word in words
    )  # fmt: skip
    is_whole = value.count("(") == value.count(")") and value.count("{") == value.count("}")
    return value if is_unit and is_whole and value and not re.search(r"\d", _POWER.sub("", unit)) else latex


def _words(text: str) -> str | None:
    """A text of words only, in one writing: `\\text{Mrs. Hilt}` is `mrs. hilt`. None if it has anything else in it."""
    text = re.sub(_TEXT, " ", text.strip())
    text = re.sub(r"[{}]|\\[ ,;!]", " ", text).strip(" .()")
    is_words = re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ .'-])*", text) and re.search(r"[^\W\d_]{2}", text)
    return " ".join(text.casefold().split()) if is_words else None


def _in_base(number: re.Match[str]) -> int | None:
    """`11_2` is 3."""
    try:
        return int(number[1], int(number[2] or number[3]))
    except ValueError:
        return None


def _whole(text: str, units: bool = False) -> str | None:
    """The whole number that a text is, with its currency, unit or marks, in a box. Per cent are left to
    math-verify, and a letter after a number, which may be a variable."""
    value = None if "%" in text or (not units and _LETTER.search(text)) else only_value(text)
    return None if value is None or value.denominator > 1 else _boxed(str(value))


def _boxed(latex: str) -> str:
    text = latex.strip()
    return f"\\boxed{{\\text{{{text}}}}}" if _WORDS.fullmatch(text) else f"\\boxed{{{text}}}"


def _same(gold: list[Any], found: list[Any], rounding: int) -> bool:
    relations = [one[0] for one in (gold, found) if one and getattr(one[0], "is_Relational", False)]
    if len(relations) == 2 and relations[0].free_symbols != relations[1].free_symbols:
        return False  # math-verify takes y = 5 for x = 5
    return bool(verify(gold, found, float_rounding=rounding, timeout_seconds=None))


def _latex(text: str) -> str:
    r"""With the digits, signs and commands that math-verify knows: `−½` is `-1/2`, `√2` is `\sqrt{2}`, `\binom52` is `\binom{5}{2}`."""
    text = _ROOT.sub(lambda of: f"\\sqrt{{{of[1] or of[2] or of[3]}}}", written_out(text)).translate(_SYMBOLS)
    text = re.sub(r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset", text)
    text = re.sub(r"(?<=\d) ?\^ ?(?:\\circ|\{ ?\\circ ?\})(?= *(?:$|[$}]))|(?<=\d)\\degree(?![a-zA-Z])", "", text)
    return _BINOMIAL.sub(_choose, text)


def _choose(found: re.Match[str]) -> str:
    over, under = found[1] or found[2] or found[5], found[3] or found[4] or found[6]
    return f"\\binom{{{over.strip()}}}{{{under.strip()}}}"
