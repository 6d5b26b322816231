"""The reader of numbers, by the tables that all graders are held to."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.builtin.numbers import answer_value, is_same, last_number, last_value, only_value, plain, written_out
from tests.tricky_answers import NOT_ONE_NUMBER, NUMBERS

REAL = Path(__file__).parents[4] / "shared/data/gsm8k"


def test_replies_of_the_table_are_right_or_wrong():
    read = [(answer, reply, is_same(last_value(reply), answer_value(answer))) for answer, reply, _ in NUMBERS]
    assert read == NUMBERS


@pytest.mark.parametrize("answer", NOT_ONE_NUMBER)
def test_an_answer_that_is_not_one_number_is_refused(answer):
    with pytest.raises(ValueError, match="^(has no number in it|has more than one number in it|is not one number)$"):
        answer_value(answer)
    assert only_value(answer) is None


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("the answer is 1,250.50", 1250.5), ("5 + 3 = 8\n#### 8", 8), ("x = 7", 7), ("so \\boxed{7} for 2 apples", 7),
        ("<answer>7</answer>", 7), ("#### 7\nno: \\boxed{8}", 8), ("$5", 5), ("5^{th}", 5), ("[5]", 5), ("5 m/s", 5),
        ("25 cm^2", 25),
    ],
)  # fmt: skip
def test_an_answer_is_what_it_states_or_else_its_only_number(answer, value):
    assert answer_value(answer) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("see H2O, CO_2 and 25 cm^2", 25), ("x_1 = 3 with v1.2", 3), ("GPT-4", 4), ("10-2=8", 8), ("it is—5", 5),
        ("(-3)", -3), ("\\left(5\\right)", 5), ("5 - 3", None), ("5'10\"", None), ("sqrt(2)", None),
        ("\\frac{\\pi}{2}", None), ("2^n", None), ("\\log_2 8", None), ("5!", 5), ("3..5", None),
        ("9" * 300, int("9" * 300)), ("9" * 301, None), ("1e298", 10**298), ("1e-290", 1e-290), ("0,123", None),
        ("1.234.567", None), ("100 200 300", 100200300),
    ],
)  # fmt: skip
def test_the_last_digits_of_a_text_are_one_number_or_none(text, number):
    assert last_number(text) == number
    assert type(last_number(text)) is type(number)


def test_every_answer_of_gsm8k_is_one_number_and_its_own_last_one():
    if not (REAL / "train.jsonl").exists():
        pytest.skip(f"the GSM8K files are not at {REAL}")
    rows = [json.loads(line) for split in ("train", "test") for line in (REAL / f"{split}.jsonl").open()]
    answers = [row["answer"] for row in rows]
    assert len(answers) == 8792
    stated = [answer.rpartition("####")[2].strip().replace(",", "") for answer in answers]
    assert [str(answer_value(answer)) for answer in answers] == stated
    assert [str(last_value(answer)) for answer in answers] == stated


def test_plain_text_is_ascii_as_latex_has_it():
    assert (
        plain("−½ − 3½ ＋ x² · 10⁻³, H₂O: １２ 𝟗\u202f٣ and é")
        == "-1/2 - 3 1/2 + x^{2} · 10^{-3}, H_{2}O: 12 9 3 and é"
    )
    assert written_out("1,234 is 1.5e-3 or 2 \\times 10^{4} or 3 1/2") == "1234 is 0.0015 or 20000 or 7/2"


@pytest.mark.parametrize(
    "part",
    [
        "9", "1 ", "1/", "1,", "1,234", "\\sqrt{", "x^{", "{", "$-", "a", "\\frac{1}", "1e", "-", "²", "\\a{a}",
        "\\a{a", "x_", "1.5 x ", "\\boxed{", "####", "\\sqrt[", "1 1/", "10^", "e-", "</a>",
    ],
)  # fmt: skip
def test_reading_takes_a_time_that_is_linear_in_the_length(part):
    began = time.process_time()
    text = part * (50_000 // len(part))
    last_value(text)
    only_value(text)
    assert time.process_time() - began < 5, "up to 0.3 s; a quadratic reader takes minutes"


FORMS = ("{}", "{} cm", "\\boxed{{{}}}", "#### {}", "**{}**", "x = {}", "It is {}.", "${}$")
SCRIPTS = ("0123456789", "٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗")


@given(
    st.integers(0, 10**12), st.integers(1, 999), st.sampled_from(["", "-", "−", "–", "＋"]), st.sampled_from(FORMS),
    st.sampled_from(SCRIPTS), st.integers(0, 6), st.integers(-6, 6),
)  # fmt: skip
def test_a_number_has_one_value_in_every_writing(whole, under, sign, form, script, places, exponent):
    negative = sign in ("-", "−", "–")
    writings = {
        f"{whole}": Fraction(whole),
        f"{whole:,}": Fraction(whole),
        f"{whole:_}": Fraction(whole),
        f"{whole}.{whole % 10**places:0{places or 1}d}": whole + Fraction(whole % 10**places, 10 ** (places or 1)),
        f"{whole}e{exponent}": whole * Fraction(10) ** exponent,
        f"{whole} \\times 10^{{{exponent}}}": whole * Fraction(10) ** exponent,
        f"{whole}/{under}": Fraction(whole, under),
        f"\\frac{{{whole}}}{{{under}}}": Fraction(whole, under),
        f"\\dfrac{{{whole}}}{{-{under}}}": -Fraction(whole, under),
    }
    for written, value in writings.items():
        text = form.format(sign + written.translate(str.maketrans(SCRIPTS[0], script)))
        wanted = -value if negative else value
        assert (last_value(text), answer_value(text)) == (wanted, wanted), text
