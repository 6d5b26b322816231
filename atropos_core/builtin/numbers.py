r"""The reader of numbers in text, which all graders share.

One number is a sign (hyphen, U+2212, en dash), digits of any script, and a decimal point. It may have thousands groups (`1,234`, `1 234`,
`1'234`, `1_234`, `1{,}234`), an exponent (`1e-5`, `1.5 \times 10^{3}`), a currency or a unit. Fractions (`3/4`, `\frac{3}{4}`, `½`),
mixed numbers (`3 1/2`) and repeating decimals (`0.\overline{36}`) are numbers too. Digits in a word (`H2O`, `x_1`, `cm^2`) are part of the
word. What is not one number: digits side by side (`1,2`, `3-5`, `3:45`, `2024-05-03`, `1.2.3`), a number that is multiplied (`2^{10}`,
`2\sqrt{3}`, `3\pi`, `5x`, `5 n`, `4ab`, `2 million`), and an operand (the 7 of `10^9 + 7` and of `x + 7`).
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

LONGEST = 300  # characters of a number, with its exponent written out: a longer one is not read
MILLIONTH = Fraction(1, 10**6)

_REPLACED = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u2796\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\ufeff", ""),
    **dict.fromkeys("\u2044\u2215", "/"),
    "\u2019": "'",
    "\u066b": ".",  # the Arabic decimal mark, and below the thousands mark
    **dict.fromkeys("\u060c\u066c", ","),
}
_RAISED = re.compile("[\u207a\u207b]?[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u2079\u207f\u02b0-\u02b8\u1d43-\u1d5b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_STACKED = re.compile("(?:(\\d) ?)?([\u00b2\u00b3\u00b9\u2070\u2074-\u2079]{1,9}[\u2044\u2215/][\u2080-\u2089]{1,9})")
_VULGAR = re.compile("(?:(\\d) ?)?([\u00bc-\u00be\u2150-\u215e\u2189])")

# These rewrite plain text, so that a number has one form: 1234567.8 or 3/4.
_GROUPS = re.compile(r"(?<![\w.,'])[1-9]\d{0,2}(,|\{,\}|,\\!|\\[, !]|['_ ~])\d{3}(?:\1\d{3})*+(?!\d)")
_PART = r"(?:\{ ?([-+]?\d+(?:\.\d+)?) ?\}|(\d))"
_LATEX_FRACTION = re.compile(rf"(?:(\w) ?)?\\[dtc]?frac ?{_PART} ?{_PART}")
_TIMES_TEN = re.compile(
    r"(?<![\w.])(?:(\d++(?:\.\d++)?) ?(?:\\times|\\cdot|[x×·*]) ?)?10(?:\^|\*\*)(?:\{([-+]?\d++)\}|([-+]?\d++))(?!\w)"
)
_REPEATING = re.compile(r"(?<![\w.])(\d{1,99})\.(\d{0,99})\\(?:overline|bar) ?(?:\{ ?(\d{1,99}) ?\}|(\d))")
_EXPONENT = re.compile(r"(?<![\w.])(\d++(?:\.\d++)?|\.\d++)[eE]([-+]?\d++)(?![\d^])()")
_MIXED = re.compile(r"(?<![\w.,])(\d++) (\d++) ?/ ?(\d++)(?![\w/.,]*\d)")
_UNIT_POWER = re.compile(
    r"(?<=\d)( ?(?:[cdkmn]?m|ft|in|yd|mi)|[ ~]*\\(?:text|mathrm|mbox)\{[^{}]*\})(?:\^?\{[23]\}|\^?[23])(?!\w)"
)

SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen")
UNIT_LETTERS = "mghslLdAVWNJCF"
SHORT_UNITS = (
    "mm cm dm km mi in ft yd sq cu mg kg lb lbs oz ml mL cl dl dL kl gal qt pt pts hr hrs min sec ms ns yr yrs wk mo day am"
    " pm mph kph kmh rpm fps Hz kHz MHz GHz kB KB MB GB TB Pa kPa atm bar mol eV keV MeV kJ kW kWh mW MW mA mV kV kN nm Nm deg"
    " rad USD EUR GBP AUD CAD INR RMB JPY CNY CHF SEK Rs yen won st nd rd th a an x and or yo pct men egg eggs pcs pc"
).split()
_TOKEN = re.compile(
    r"""
    (?P<root>(?:
        (?:\\|(?<![a-zA-Z]))(?:sqrt|pm|mp|ln|log|exp|sin|cos|tan|[dt]?binom|choose)(?![a-zA-Z])
      | [√∛∜±∓] | \}\{ | [)\]}]\^
    )(?:_\w|\[\d+\])?[ {(]*)?
    (?P<sign>(?<![^\W_])(?<![)\]}%-])[-+]|(?<==)-\ ?|(?<==\ )-\ ?)?
    (?:\\?[$€£¥₹₩]\ ?(?P<later_sign>-?))?
    (?P<body>
        (?:\d++\ \d++\ ?/\ ?\d++|\d++|(?<![\w.])\.\d++)
        (?:(?:[-.,:/'_~^]{1,3}\{?[-+]?|\*\*[-+]?|\ ?/\ ?|[a-zA-Z]++[-+]?)\d++)*+
    )
    (?P<variable>
        (?!\ [aI]\ [a-zA-Z]{2})\ ?[a-zA-Z](?<![LETTERS])(?!\.?[a-zA-Z]|')  # 5x, 5 x; not "5 a day"
      | \.?\\(?:overline|bar|dot)(?![a-zA-Z]) | /\ ?[a-zA-Z](?<![LETTERS])(?![a-zA-Z])
      | (?!(?:SHORT)(?![a-zA-Z]))[a-zA-Z]{2,3}(?![a-zA-Z])  # 4ab; not 4cm
      | [ ~]*(?:\\(?:text|mathrm|mbox)\{\ ?)?(?i:SCALES)(?![a-zA-Z])
      | \ ?[百千万萬亿億兆]
      | !(?=\ ?(?:[-+/^}$]|\*\ ?[\d(\\a-z]|\\[a-z)\]]))                        # 6!/2, \boxed{6!}; not "it is 6!"
      | (?:\ ?[+×·]|\ ?\\(?:times|cdot|div)(?![a-zA-Z])|\*)\ ?(?=[a-zA-Z](?![a-zA-Z])|\\[a-zA-Z]|[(√])
      | \^\{?(?!\{|\\|(?:st|nd|rd|th)\b)
      | (?=\ ?(?:[α-λν-ωΔΣΦΠ√∞]|\\(?:
            sqrt|infty|sin|cos|tan|ln|log|exp|vec|hat|hbar|ell|(?:var)?(?:epsilon|theta|pi|rho|sigma|phi)
          | alpha|beta|gamma|delta|zeta|eta|iota|kappa|lambda|nu|xi|tau|chi|psi|omega
        )(?![a-zA-Z])))
    )?
  | (?P<command>
        \\(?!(?:boxed|[a-z]*box|text[a-z]*|math[a-z]*|emph|underline|bf|rm|begin|end)\b)
        [a-zA-Z]+(?:\[[^\[\]]*+\])?(?:\ ?\{(?:[^{}]|\{[^{}]*+\})*+\})++
    )
  | \\[a-zA-Z]++
  | [a-zA-Z]++(?:\d\w*+(?:\.\d++)*+|[_^](?:\{[^{}\s]*+\}|-?\w++))*+          # a word
    """.replace("SHORT", "|".join(SHORT_UNITS))
    .replace("SCALES", "|".join(SCALES))
    .replace("LETTERS", UNIT_LETTERS),
    re.VERBOSE,
)
_OPERATION = re.compile(  # before an operand. A dash after a word is not one
    r"(?:(?:[\d)}π∞]|\\(?:pi|infty|theta|alpha|beta|lambda)|(?<![^\W\d_])(?![aI]\b)[^\W\d_])!? ?"
    r"(?:[-+*/^×·÷]|\*\*|\\(?:times|cdot|div|pm|mp)(?![a-z]))|\d ?x) ?\(?$"
)
_DECIMAL = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_FRACTION = re.compile(r"(\d+) ?/ ?([-+]?)(\d+)")

_DRESS = re.compile(r"</?\w+>|\*\*|__|\^\{?(?:\\circ|st|nd|rd|th)\b")
_EXPRESSION = re.compile(
    r"[<>≤≥≠±∓∞√π!^|]|[-+*] ?[a-zA-Z]\b|\b[a-zA-Z] ?[-+*]|\\(?:pi|infty|leq?|geq?|[lg]eqslant|neq?|lt|gt|pm|mp|cup|cap|in|sqrt)(?![a-zA-Z])"
)


class Number(NamedTuple):
    """Digits in a text. `value` is None if they are not one number."""

    text: str
    value: Fraction | None


def numbers(text: str) -> list[Number]:
    """All numbers of a text, in their order. The time is linear in the text's length."""
    return [_number(found) for found in _TOKEN.finditer(_rewritten(text)) if _has_digits(found)]


def last_value(text: str) -> Fraction | None:
    """The last number of a text. None if it has none, or if its last digits are not one number."""
    found = numbers(text)
    return found[-1].value if found else None


def last_number(text: str) -> int | float | None:
    """The last number of a text: an int if it is whole, else a float. None if there is none, or if the last digits are not one number."""
    value = last_value(text)
    return None if value is None else value.numerator if value.denominator == 1 else float(value)


def answer_value(answer: str) -> Fraction:
    """Return the one number that an answer gives: in what it states (`stated_answer`), or else in all of it. Raises ValueError, which says
    what the answer has instead."""
    stated = stated_answer(answer)
    text = _rewritten(answer if stated is None else stated)
    found = numbers(text)
    if not found:
        raise ValueError("has no number in it")
    if len(found) > 1:
        raise ValueError("has more than one number in it")
    [(written, value)] = found
    if value is None or _EXPRESSION.search(_DRESS.sub("", text).replace(written, "", 1)):
        raise ValueError("is not one number")
    return value


def only_value(text: str) -> Fraction | None:
    """The number of a text that has one number and no other mathematics, else None."""
    try:
        return answer_value(text)
    except ValueError:
        return None


def stated_answer(text: str) -> str | None:
    r"""Return the answer that a text marks: the rest of the line after its last `####`, or the content of its last `\boxed{}`. The later
    of the two counts."""
    boxed, hashed = text.rfind(_BOXED), text.rfind("####")
    if boxed > hashed:
        return _braced(text[boxed + len(_BOXED) :])
    if hashed >= 0:
        lines = text[hashed + 4 :].strip().splitlines()
        return lines[0].strip() if lines and lines[0].strip() else None
    return None


def is_same(number: Fraction | None, wanted: Fraction, tolerance: float | None = None) -> bool:
    """Compare a reply's number with the answer's. Without a tolerance, a whole answer is compared exactly and another within a millionth of
    itself. A tolerance is relative to the answer, or absolute if that is below 1."""
    if number is None or number == wanted:
        return number is not None
    if tolerance is None:
        return wanted.denominator > 1 and abs(number - wanted) <= abs(wanted) * MILLIONTH
    return abs(number - wanted) <= Fraction(tolerance) * max(Fraction(1), abs(wanted))


def plain(text: str) -> str:
    """The text with ASCII for digits of any script, dashes, spaces and fractions: `−½` is `-1/2`. A raised 2 is `^{2}`, as in LaTeX."""
    if text.isascii():
        return text
    text = _STACKED.sub(lambda found: _after(found[1], unicodedata.normalize("NFKC", found[2])), text)
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = _VULGAR.sub(lambda found: _after(found[1], unicodedata.normalize("NFKC", found[2])), text)
    return "".join(map(_ascii, text))


def written_out(text: str) -> str:
    """The plain text with `1,234` as 1234, `1e-5` and `1 \\times 10^{-5}` as 0.00001, and `3 1/2` as 7/2, `0.\\overline{3}` as 3/9."""
    text = _GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), plain(text))
    text = _REPEATING.sub(_repeated, text)
    return _MIXED.sub(_improper, _EXPONENT.sub(_positional, _TIMES_TEN.sub(_positional, text)))


_BOXED = "\\boxed{"


def _ascii(character: str) -> str:
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if "\uff01" <= character <= "\uff5e":  # full width
        return chr(ord(character) - 0xFEE0)
    if "\U0001d400" <= character <= "\U0001d7ff":  # letters of mathematics
        return unicodedata.normalize("NFKC", character)
    return _REPLACED.get(character, character)


def _after(before: str | None, fraction: str) -> str:
    return f"{before} {fraction}" if before else fraction


def _rewritten(text: str) -> str:
    text = _LATEX_FRACTION.sub(_slashed, written_out(text))
    return _MIXED.sub(_improper, _UNIT_POWER.sub(r"\1", text))


def _slashed(found: re.Match[str]) -> str:
    over, under = found[2] or found[3], found[4] or found[5]
    is_product = found[1] and not (over + under).isdigit()  # not a mixed number
    return f"{found[1]}*{over}/{under}" if is_product else _after(found[1], f"{over}/{under}")


def _positional(found: re.Match[str]) -> str:
    digits, exponent = found[1] or "1", found[2] or found[3]
    if len(found[0]) > LONGEST or abs(int(exponent)) > LONGEST:
        return found[0]
    written = f"{Decimal(f'{digits}e{exponent}'):f}"
    return written if len(written) <= LONGEST else found[0]


def _repeated(found: re.Match[str]) -> str:
    whole, once, again = found[1], found[2], found[3] or found[4]
    under = 10 ** len(once) * (10 ** len(again) - 1)
    return f"{int(whole + once + again) - int(whole + once)}/{under}"


def _improper(found: re.Match[str]) -> str:
    if len(found[0]) > LONGEST or not int(found[2]) < int(found[3]):
        return found[0]
    whole, over, under = map(int, found.groups())
    return f"{whole * under + over}/{under}"


def _has_digits(found: re.Match[str]) -> bool:
    return found["body"] is not None or any(map(str.isdigit, found["command"] or ""))


def _number(found: re.Match[str]) -> Number:
    body = found["body"]
    begins = max(found.end("sign"), found.start())
    is_operand = _OPERATION.search(found.string, max(begins - 24, 0), begins)
    is_part = found["root"] or found["variable"] is not None or is_operand
    value = None if body is None or is_part or len(body) > LONGEST else _value(body)
    negative = (found["sign"] or "").startswith("-") != bool(found["later_sign"])
    return Number(found[0], -value if value is not None and negative else value)


def _value(body: str) -> Fraction | None:
    if _DECIMAL.fullmatch(body):
        return Fraction(body)
    if fraction := _FRACTION.fullmatch(body):
        over, sign, under = fraction.groups()
        return Fraction(int(over), int(sign + under)) if int(under) else None
    return None


def _braced(text: str) -> str | None:
    """The text up to the brace that closes the one before it; None if it is never closed."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:at].strip() or None
    return None
