"""The environment `dataset`: rows of files and of the hub, how replies are scored, and errors for rows that cannot be used."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.config.run_file import anchored
from atropos_core.errors import ConfigError, DataError
from atropos_core.plugins.manager import load_plugins
from atropos_core.rollouts.replies import message_of
from atropos_core.types import Score, Task
from atropos_env_dataset.config import DatasetOptions
from atropos_env_dataset.environment import Dataset
from atropos_testing.replies import ORACLE
from atropos_testing.scripted import ScriptedPolicy
from tests.tricky_answers import NOT_ONE_NUMBER, NUMBERS

LABEL = "environment.mine"
TASK = Task("1", ({"role": "user", "content": "?"},), "the answer is 1,250.50")


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(first: int, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} + 7?", "answer": n + 7} for n in range(first, first + count)]


def dataset(**options: Any) -> Dataset:
    return Dataset(DatasetOptions(**options), LABEL)


async def value(reply: str, task: Task = TASK, **options: Any) -> Score:
    made = dataset(tasks="rows.jsonl", **options)
    try:
        return await made.score(task, {"role": "assistant", "content": reply})
    finally:
        await made.close()


def test_what_follows_the_colon_is_the_file():
    provider = load_plugins().registry.find("environment", "dataset:train.jsonl").provider
    assert provider.options().tasks == Path("train.jsonl").resolve()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "rows come from one of tasks = .* and hub = "),
        ({"tasks": "a", "hub": "b"}, "rows come from one of"),
        ({"tasks": "a", "test_split": "test"}, "test_split has no effect with tasks: it is for hub"),
        ({"hub": "a", "test_tasks": "b"}, "test_tasks has no effect with hub, whose own is test_split"),
        ({"tasks": "a", "test_tasks": "b", "held_out": 0.2}, "held_out has no effect with test_tasks"),
        ({"tasks": "a", "held_out": 1.0}, "less than 1"),
        (
            {"tasks": "a", "score": "nummeric"},
            "score must be one of numeric, exact, math, or a function such as ./grade.py:score",
        ),
        ({"tasks": "a", "score": "exact", "pattern": "("}, "not a regular expression: missing \\)"),
        ({"tasks": "a", "score": "math", "pattern": "x"}, 'pattern has no effect with score = "math"'),
        ({"tasks": "a", "math_deadline_s": 1.0}, 'math_deadline_s has no effect with score = "numeric"'),
        ({"tasks": "a", "answer": ""}, 'answer = "" says that there is none'),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        DatasetOptions(**options)


async def test_a_tenth_is_the_test_split_by_a_hash_of_the_prompts(tmp_path):
    rows = [{"prompt": f"{n // 2} + 7?", "answer": n} for n in range(2000)]  # each prompt twice
    made = dataset(tasks=lines(tmp_path / "rows.jsonl", *rows))
    await made.open()
    train, test = ({task.messages for task in map(_hashable, made.tasks(split))} for split in ("train", "test"))
    assert not train & test
    assert 150 < len(made.tasks("test")) < 250
    assert len(made.tasks("train")) + len(made.tasks("test")) == 2000
    wider = dataset(tasks=tmp_path / "rows.jsonl", held_out=0.3)
    assert {task.id for task in made.tasks("test")} < {task.id for task in wider.tasks("test")}
    assert not dataset(tasks=tmp_path / "rows.jsonl", held_out=0.0).tasks("test")


def _hashable(task: Task) -> Task:
    return Task(task.id, tuple(json.dumps(message) for message in task.messages))  # type: ignore[arg-type]


async def test_a_file_of_its_own_is_the_test_split_and_columns_are_named(tmp_path):
    chat = [{"role": "user", "content": "5 + 7?"}]
    train = lines(
        tmp_path / "train.jsonl", {"id": "five", "q": chat, "reward_model": {"ground_truth": "12"}, "level": 3}
    )
    test = lines(tmp_path / "test.jsonl", {"q": "6 + 7?", "reward_model": {"ground_truth": "13"}, "level": 3})
    made = dataset(tasks=train, test_tasks=test, prompt="q", answer="reward_model.ground_truth", instruction="Add.")
    await made.open()
    system = {"role": "system", "content": "Add."}
    assert made.tasks("train")[0].messages == (system, chat[0])
    assert made.tasks("train")[0].id == "five"
    [held_out] = made.tasks("test")
    assert (held_out.id, held_out.answer, held_out.data["level"]) == ("1", "13", 3)
    assert made.source() == str(train)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"question": "a", "gold": "1"}], {}, "line 1 has no column 'prompt'. It has 'question', 'gold'.*mine.prompt=question"),
        ([{"prompt": "a", "gold": "1"}], {}, "line 1 has no column 'answer'.*Its other columns: 'gold'.*environment.mine.answer=gold"),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "data_source": "s", "reward_model": {"style": "rule", "ground_truth": "1"}}],
            {},
            "Its other columns: 'data_source', 'reward_model.style', 'reward_model.ground_truth'.*answer=reward_model.ground_truth",
        ),
        (
            [*sums(1, 2), {"prompt": None, "answer": "1"}],
            {},
            "line 3: prompt is null or NaN, which is not a value.\n  Write its prompt, or leave the row out.",
        ),
        ([{"messages": None, "answer": "1"}], {}, "line 1: messages is null or NaN"),
        ([*sums(1, 2), {"prompt": "a", "answer": None}], {}, "line 3: answer is null or NaN, which is not a value.*Write its answer"),
        ([*sums(1, 2), {"prompt": "a", "answer": float("nan")}], {}, "line 3: answer is null or NaN"),
        ([{"input": {"ask": "a"}, "answer": "1"}], {}, "It has 'input.ask', 'answer'.*mine.prompt=COLUMN"),
        ([{"prompt": "a", "answer": "yes"}], {"held_out": 0.5}, 'line 1: the answer has no number in it: .yes.*score = "exact"'),
        ([{"prompt": "a", "answer": [1]}], {}, "line 1: answer must be text or a number"),
        (sums(1, 3), {"held_out": 0.001}, "held_out = 0.001 of 3 rows leaves none for the test split"),
        (sums(1, 1), {"held_out": 0.999}, "held_out = 0.999 of 1 rows leaves none for the train split"),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}], "answer": "1"}],
            {},
            "rows.jsonl, line 1: the prompt ends with a reply of the assistant",
        ),
    ],
)  # fmt: skip
async def test_rows_that_cannot_be_trained_on_are_named(tmp_path, rows, options, says):
    padding = [] if "leaves none" in says else sums(100, 100)
    file = lines(tmp_path / "rows.jsonl", *rows, *padding)
    with pytest.raises(DataError, match=f"(?s){says}"):
        await dataset(tasks=file, **options).open()


async def test_tools_of_a_row_are_shown_to_the_policy(tmp_path):
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    rows = [{"prompt": "5 + 7?", "answer": 12, "tools": json.dumps([add])}, {"prompt": "5 + 8?", "answer": 13}]
    made = dataset(tasks=lines(tmp_path / "rows.jsonl", *rows), held_out=0.0)
    shown = []

    class Shown(ScriptedPolicy):
        async def render(self, messages, *, tools=None, after=None):
            shown.append(tools)
            return await super().render(messages, tools=tools, after=after)

    for task in made.tasks("train"):
        assert (await made.rollout(task, Shown(ORACLE, task), seed=0)).correct
    assert shown == [[add], None]


async def test_rows_with_long_prompts_are_left_out_by_their_tokens_and_keep_their_numbers(tmp_path, capsys):
    file = lines(tmp_path / "rows.jsonl", *({"prompt": "a" * n, "answer": n} for n in range(1, 41)))
    made = Dataset(DatasetOptions(tasks=file, held_out=0.0, max_prompt_tokens=22), LABEL, TOY_MODEL)
    await made.open()
    assert [task.id for task in made.tasks("train")] == [str(n) for n in range(1, 21)], (
        "a token a letter, and two around them"
    )
    assert "20 of 40 rows have more than 22 tokens" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DataError, match="the prompts of all 40 rows have more than 2 tokens"):
        await Dataset(DatasetOptions(tasks=file, held_out=0.0, max_prompt_tokens=2), LABEL, TOY_MODEL).open()


@pytest.mark.parametrize(
    ("reply", "options", "expected"),
    [
        ("so it is $1,250.50", {}, 1.0),
        ("1250.5000001", {}, 1.0),
        ("1250.5 and then 3", {}, 0.0),
        ("nothing", {}, 0.0),
        ("", {}, 0.0),
        (" the answer is 1,250.50\n", {"score": "exact"}, 1.0),
        ("The answer is 1,250.50", {"score": "exact"}, 0.0),
        ("A: 1. Or A: the answer is 1,250.50", {"score": "exact", "pattern": "A: (.*?)$"}, 0.0),
        ("A: 1. Or\nA: the answer is 1,250.50", {"score": "exact", "pattern": r"A: ([^\n]*)"}, 1.0),
        ("<a>1250.5</a> 3", {"pattern": "<a>.*?</a>"}, 1.0),
        ("1250.5", {"pattern": "<a>.*?</a>"}, 0.0),
    ],
)
async def test_a_reply_is_compared_with_the_answer(reply, options, expected):
    scored = await value(reply, **options)
    assert (scored.value, scored.correct) == (expected, bool(expected))
    assert ("answered" in scored.metrics) == ("pattern" in options)


async def test_expressions_are_compared_by_math_verify():
    pytest.importorskip("math_verify")
    half = Task("1", TASK.messages, "$\\frac{1}{2}$")
    made = dataset(tasks="rows.jsonl", score="math")
    try:
        assert (await made.score(half, {"role": "assistant", "content": "It is $\\boxed{0.5}$."})).value == 1.0
        assert (await made.score(half, {"role": "assistant", "content": "It is $\\boxed{0.25}$."})).value == 0.0
        with pytest.raises(DataError, match="the answer of task 1 is not an expression that math-verify can read: ''"):
            await made.score(Task("1", (), ""), {"role": "assistant", "content": "1"})
    finally:
        await made.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "the process has ended"


RAW_LATEX = [  # an answer as verl's files of MATH have it, replies that are right, and replies that are wrong
    ("2^{10}", [r"\boxed{1024}", "1024", "2^{10}"], [r"\boxed{2}", "10", r"\boxed{10}"]),
    (
        r"2\sqrt{3}",
        [r"\boxed{\sqrt{12}}", r"The answer is $2\sqrt{3}$.", r"So it is 2\sqrt{3}."],
        [r"\boxed{2}", "3", r"\boxed{3}"],
    ),
    (r"3\pi", [r"\boxed{3\pi}"], [r"\boxed{3}", "3"]),
    (r"5\frac{1}{2}", [r"\boxed{5.5}", r"\boxed{\frac{11}{2}}", r"\boxed{5½}"], [r"\boxed{\frac{1}{2}}", "2"]),
    (r"x \leq 3", [r"\boxed{x \le 3}", r"\boxed{3 \geq x}"], [r"\boxed{3}", r"\boxed{x < 3}"]),
    ("y = 2x + 1", [r"\boxed{y = 1 + 2x}", "y = 2x + 1"], [r"\boxed{1}", "1", r"\boxed{y = 2x - 1}"]),
    (r"(-\infty, 3]", [r"\boxed{(-\infty,3]}"], [r"\boxed{3}", r"\boxed{(-\infty,3)}"]),
    (r"\{1, 2\}", [r"\boxed{\{2, 1\}}"], [r"\boxed{2}", r"\boxed{1.2}"]),
    ("(1,2)", [r"\boxed{(1, 2)}", "(1,2)"], [r"\boxed{(2,1)}", r"\boxed{2}"]),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"], [r"\boxed{2}"]),
    (r"\text{(B)}", [r"\boxed{B}", r"\boxed{(B)}", r"\boxed{\text{B}}"], [r"\boxed{C}"]),
    ("no solution", [r"\boxed{\text{No solution}}", "no solution"], [r"\boxed{0}", r"\boxed{\text{one solution}}"]),
    (r"12\text{ cm}", [r"\boxed{12}", "12 cm"], [r"\boxed{1}"]),
    (r"\$18.90", [r"\boxed{18.9}"], [r"\boxed{18}"]),
    (r"10\%", [r"\boxed{10\%}", r"\boxed{0.1}"], [r"\boxed{0.01}"]),
    (r"0.\overline{3}", [r"\boxed{\frac{1}{3}}", r"\boxed{0.\overline{3}}"], [r"\boxed{0.3}", "0"]),
    (r"\boxed{72}", ["72"], ["2"]),
    ("$x + 1$", [r"\boxed{1 + x}"], ["1"]),
    ("48 / 2 = 24, so\n#### 24", [r"\boxed{24}", "24"], [r"\boxed{2}"]),
    ("3 n", [r"\boxed{3n}", "$3n$"], ["3", r"\boxed{3}"]),
    ("$f(x)=2 x$", [r"\boxed{f(x)=2x}"], [r"\boxed{f(x)=3x}", "2"]),
    (r"k \geqslant 2", [r"\boxed{k \geq 2}", r"The final answer is $k \geqslant 2$."], [r"\boxed{2}", "2"]),
    ("7 (bottle caps)", [r"\boxed{7}", "7 caps"], [r"\boxed{8}"]),
    ("3", ["3", r"\boxed{3\text{ cm}}", r"It is $3$ L."], ["3ω", r"\boxed{3t}", "It is 3t.", "It is $3t$.", r"\boxed{3_2}", "3𝑥"]),
    ("2.5", [r"\boxed{2.5\text{ m}}", r"\boxed{2.5 m/s^2}", r"$2.5~\mathrm{km/h}$"], ["2.5t", r"\boxed{2.5ab}", r"\boxed{2.5 million}"]),
    ("5 g", [r"\boxed{5g}"], [r"\boxed{5}", "5"]),
    (r"5\text{ g}", [r"\boxed{5}", "5 g", "5g", r"\boxed{5\,\mathrm{g}}"], [r"\boxed{5t}"]),
    ("3t", [r"\boxed{3t}"], ["3", r"\boxed{3}", r"\boxed{3s}"]),
    ("x + 2t", [r"\boxed{2t + x}"], [r"\boxed{x + 2}"]),
    ("11_2", [r"\boxed{11_2}", r"\boxed{11_{2}}", r"\boxed{3_{10}}", r"\boxed{11}"], [r"\boxed{11_3}", r"\boxed{2}"]),
    ("x = 5", [r"\boxed{5}", r"\boxed{x = 5}"], [r"\boxed{y = 5}", r"\boxed{x = 6}"]),
    (r"\emptyset", [r"\boxed{\varnothing}", "∅", r"\boxed{\{\}}"], [r"\boxed{0}", r"\boxed{\{0\}}"]),
    (r"\binom{5}{2}", [r"\boxed{\binom52}", r"\boxed{10}", r"\dbinom{5}{2}", r"\boxed{{5 \choose 2}}"], ["52", r"\boxed{\binom51}"]),
    ("10", [r"\boxed{\binom52}"], [r"\boxed{\binom51}"]),
    (r"\pi", ["π", r"\boxed{π}", "The answer is π."], ["3.14", r"\boxed{2π}"]),
    (r"2\sqrt{3}", ["2√3", r"\boxed{√12}"], ["√3"]),
    (r"\text{Mrs. Hilt}", [r"\boxed{Mrs. Hilt}", "Mrs. Hilt", r"$\text{mrs. Hilt}$"], [r"\boxed{Mr. Hilt}", "Hilt"]),
    (r"\dfrac{3}{4}", [r"\boxed{\tfrac34}", "0.75"], [r"\boxed{\frac43}"]),
    (r"90^\circ", [r"\boxed{90}", "90°", r"\boxed{90^{\circ}}", "90 degrees"], ["9", r"\boxed{900}"]),
    ("[1,2]", [r"\boxed{x \in [1,2]}"], [r"\boxed{x \in (1,2)}", r"\boxed{[1,3]}"]),
    (r"x \in [1,2]", [r"\boxed{[1,2]}"], [r"\boxed{[1,2)}"]),
    (r"(-\infty,1)\cup(2,3]", [r"\boxed{(2,3] ∪ (-∞,1)}"], [r"\boxed{(-\infty,1)\cup(2,3)}"]),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}"],
        [r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}"],
    ),
    (
        r"\frac{9 \pm \sqrt{5}}{2}",
        [r"\boxed{\frac{9 \pm \sqrt{5}}{2}}", r"\boxed{\frac{9-\sqrt5}{2}, \frac{9+\sqrt5}{2}}", r"x = \frac{9 \pm \sqrt{5}}{2}"],
        [r"\boxed{\frac{9+\sqrt5}{2}}", r"\boxed{\frac{9 \pm \sqrt{6}}{2}}"],
    ),
    ("1e-05", [r"\boxed{0.00001}", "1e-5"], ["-5", r"\boxed{0}", "0.00002"]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), RAW_LATEX)
def test_an_answer_in_raw_latex_is_read_whole(answer, right, wrong):
    pytest.importorskip("math_verify")
    from atropos_env_dataset.math_answers import equal

    assert [equal(answer, reply) for reply in right] == [True] * len(right)
    assert [equal(answer, reply) for reply in wrong] == [False] * len(wrong)
    assert equal(answer, answer), "a reply that is the answer as it stands"


@pytest.mark.parametrize(
    "reply", ["0.\\overline{%s}" % ("9" * 5000), "1e999999999", "9" * 9000, "\\boxed{1/0}", "\x00\ud800"]
)
def test_a_reply_that_no_number_holds_is_wrong_and_no_error(reply):
    pytest.importorskip("math_verify")
    from atropos_env_dataset.math_answers import equal

    assert equal("7", reply) is False


def test_numbers_are_compared_by_math_verify_as_by_the_other_graders():
    pytest.importorskip("math_verify")
    from atropos_env_dataset.math_answers import equal

    assert [(a, b, equal(a, b[:10_000])) for a, b, _ in NUMBERS] == NUMBERS


async def test_answers_that_math_verify_cannot_read_are_refused_by_row(tmp_path):
    pytest.importorskip("math_verify")
    from atropos_env_dataset.math_answers import equal

    refused = {
        "2024-05-03": "is a date",
        "June 20": "has words in it",
        "The answer is 5": "has words in it",
        "\\frac{1}{": "is not an expression",
        "1/0": "is not an expression",
        "???": "is not an expression",
        "nan": "is a missing value",
        " ": "is not an expression",
    }
    assert [str(equal(answer, None)).startswith(says) for answer, says in refused.items()] == [True] * len(refused)
    rows = [{"id": f"odd {n}", "prompt": "?", "answer": answer} for n, answer in enumerate(refused)]
    endless = {"id": "endless", "prompt": "?", "answer": "9^{9^{9}}"}
    file = lines(tmp_path / "rows.jsonl", *sums(0, 5), {"prompt": "?", "answer": "2^{10}"}, *rows, endless)
    made = dataset(tasks=file, score="math", held_out=0.0, math_deadline_s=3.0)
    with pytest.raises(
        DataError, match="(?s)rows.jsonl: 9 of 15 rows have.*line 7: the answer is a date.*line 15: the answer takes"
    ) as raised:
        await made.open()
    await made.close()
    assert "in LaTeX" in raised.value.remedy


@pytest.mark.parametrize("answer", NOT_ONE_NUMBER)
async def test_an_answer_that_is_not_one_number_is_refused_by_row(tmp_path, answer):
    file = lines(tmp_path / "rows.jsonl", *sums(0, 5), *({"id": n, "prompt": "?", "answer": answer} for n in "ab"))
    with pytest.raises(
        DataError, match="(?s)2 of 7 rows.*line 6: the answer (has|is) .*line 7: the answer (has|is)"
    ) as raised:
        await dataset(tasks=file, held_out=0.0).open()
    assert 'score = "math"' in raised.value.remedy


async def test_two_rows_with_one_prompt_and_two_answers_are_one_warning_that_names_both_lines(tmp_path, capsys):
    same = [{"prompt": "1 + 1?", "answer": answer} for answer in ("2", "#### 2.0", "3", "4")]
    await dataset(tasks=lines(tmp_path / "rows.jsonl", *sums(0, 5), *same), held_out=0.0).open()
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("have the same prompt") == 1
    assert "rows.jsonl: line 6 ('2') and line 8 ('3') have the same prompt and different answers" in said
    assert "So have 1 more rows." in said


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"answer": "2"}, {"answer": " 2.0"}], {}),
        ([{"answer": "a"}, {"answer": "a "}], {"score": "exact"}),
        ([{"answer": "x + 1"}, {"answer": "1 + x"}], {"score": "math"}),
        ([{"answer": "2", "system": "Count."}, {"answer": "3", "system": "Add one."}], {}),
        ([{"answer": "2", "tests": 1}, {"answer": "3", "tests": 2}], {"score": "own.py:score"}),
    ],
)
async def test_rows_that_agree_or_differ_in_more_than_their_answer_give_no_warning(tmp_path, capsys, rows, options):
    (tmp_path / "own.py").write_text("def score(task, reply):\n    return 0.0\n")
    options = {name: f"{tmp_path}/own.py:score" if ":" in value else value for name, value in options.items()}
    file = lines(tmp_path / "rows.jsonl", *({"prompt": "1 + 1?", **row} for row in rows))
    await dataset(tasks=file, held_out=0.0, **options).open()
    assert "same prompt" not in capsys.readouterr().err


async def test_unreadable_rows_are_listed_and_left_out_if_that_is_asked_for(tmp_path, capsys):
    odd = [{"id": f"odd {n}", "prompt": f"{n}?", "answer": "3 or 4"} for n in range(30)]
    file = lines(tmp_path / "rows.jsonl", *sums(0, 50), *odd)
    with pytest.raises(
        DataError, match=r"(?s)30 of 80 rows.*line 70: the answer has more than one number in it: '3 or 4'.*and 10 more"
    ) as raised:
        await dataset(tasks=file, held_out=0.0).open()
    assert "line 71" not in str(raised.value)
    assert "leave_out_unreadable = true" in raised.value.remedy
    made = dataset(tasks=file, held_out=0.0, leave_out_unreadable=True)
    await made.open()
    assert [task.answer for task in made.tasks("train")] == [str(n + 7) for n in range(50)]
    assert "30 of 80 rows have an answer that the score cannot read" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DataError, match="30 of 30 rows"):
        await dataset(tasks=lines(file, *odd), held_out=0.0, leave_out_unreadable=True).open()


@pytest.mark.parametrize(
    ("written", "text", "right", "wrong"),
    [
        ("0.00001", "0.00001", "1e-5", "It is -5"),
        ("1e-7", "0.0000001", "0.0000001", "0"),
        ("1e17", "100000000000000000", "100000000000000000", "17"),
        ("-0.5", "-0.5", "−½", "5"),
        ("5.0", "5.0", "5", "0"),
        ("18446744073709551617", "18446744073709551617", "18446744073709551617", "18446744073709551616"),
    ],
)
async def test_a_number_of_a_file_is_compared_as_a_number(tmp_path, written, text, right, wrong):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "?", "answer": {written}}}\n')
    made = dataset(tasks=tmp_path / "rows.jsonl", held_out=0.0)
    await made.open()
    [task] = made.tasks("train")
    assert task.answer == text
    assert (await made.score(task, {"role": "assistant", "content": right})).value == 1.0
    assert (await made.score(task, {"role": "assistant", "content": wrong})).value == 0.0


async def test_what_is_not_compared_in_time_is_wrong_and_counted():
    pytest.importorskip("math_verify")
    scored = await value("1", score="math", math_deadline_s=0.001)  # the first comparison takes longer
    assert (scored.value, scored.metrics) == (0.0, {"math_timeouts": 1.0})


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_function_of_ones_own_scores(tmp_path, kind):
    (tmp_path / "grade.py").write_text(
        "from atropos_core import Score\n\n"
        f"{kind} score(task, reply):\n    return Score(0.25, correct=task.data['level'] == len(reply['content']))\n\n"
        f"{kind} plain(task, reply):\n    return 0.5\n"
    )
    file = lines(tmp_path / "rows.jsonl", *({"prompt": f"{n}?", "level": n} for n in range(100)))
    made = dataset(tasks=file, score=f"{tmp_path}/grade.py:score")
    await made.open()
    task = next(task for task in made.tasks("train") if task.data["level"] == 5)
    assert task.answer is None
    assert await made.score(task, {"role": "assistant", "content": "12345"}) == Score(0.25, correct=True)
    plain = dataset(tasks=file, score=f"{tmp_path}/grade.py:plain", answer="")
    assert await plain.score(task, {"role": "assistant", "content": ""}) == Score(0.5)


TRL = """
import re


def correct(completions, answer, **kwargs):
    last = [re.findall("[0-9]+", one[0]["content"])[-1:] for one in completions]
    return [float(one == [str(right)]) for one, right in zip(last, answer, strict=True)]


def length(prompts, completions, level, **kwargs):
    return [float(len(prompt) + len(text) + of) for prompt, text, of in zip(prompts, completions, level, strict=True)]


def none(completions, **kwargs):
    return [None for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.endswith(ground_truth)
    return {"score": 1.0 if right else -extra_info["cost"], "acc": right} if data_source == "sums" else 0.5
"""


@pytest.mark.parametrize(
    ("function", "row", "expected"),
    [
        ("correct", {"prompt": [{"role": "user", "content": "5 + 7?"}], "answer": 12}, Score(1.0)),
        ("correct", {"prompt": [{"role": "user", "content": "5 + 7?"}], "answer": 13}, Score(0.0)),
        ("length", {"prompt": "5 + 7?", "level": 100}, Score(100.0 + 6 + 8)),
        (
            "compute_score",
            {"prompt": "?", "data_source": "sums", "reward_model": {"ground_truth": "12"}, "extra_info": {"cost": 2}},
            Score(1.0, correct=True),
        ),
        (
            "compute_score",
            {"prompt": "?", "data_source": "sums", "reward_model": {"ground_truth": "13"}, "extra_info": {"cost": 2}},
            Score(-2.0, correct=False),
        ),
        ("compute_score", {"prompt": "?", "data_source": "more", "answer": "12"}, Score(0.5)),
    ],
)
async def test_a_function_for_trl_or_verl_is_called_as_they_call_it(tmp_path, function, row, expected):
    (tmp_path / "theirs.py").write_text(TRL)
    file = lines(tmp_path / "rows.jsonl", *({"id": number, **row} for number in range(50)))
    made = dataset(tasks=file, score=f"{tmp_path}/theirs.py:{function}", held_out=0.0)
    await made.open()
    assert await made.score(made.tasks("train")[0], {"role": "assistant", "content": "it is 12"}) == expected


LOGGING = """
def in_kwargs(completions, **kwargs):
    kwargs["log_metric"]("length", 3)
    kwargs["log_metric"](name="length", value=5.0)
    kwargs["log_extra"]("answer", ["12"])
    return [1.0]


def named(completions, log_metric, log_extra=None, trainer_state=None, completion_ids=None):
    assert trainer_state is None and completion_ids is None
    log_metric("length", 4)
    log_extra(column="answer", values=["12"])
    return [1.0]


def state(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step)]


def guarded(completions, **kwargs):
    return [1.0 if getattr(kwargs.get("trainer_state"), "global_step", 0) > 9 else 0.5]


def ids(completions, **kwargs):
    return [float(len(ids)) for ids in kwargs["completion_ids"]]


def first(completions, **kwargs):
    return [float(kwargs["completion_ids"][0][0])]


def unfinished(completions, log_metric):
    log_metric("length", float("nan"))
    return [1.0]
"""


@pytest.mark.parametrize("function", ["in_kwargs", "named"])
async def test_a_function_for_trl_logs_metrics_and_its_extra_columns_are_said_to_be_lost_once(
    tmp_path, capsys, function
):
    (tmp_path / "logs.py").write_text(LOGGING)
    file = lines(tmp_path / "rows.jsonl", *sums(0, 9))
    made = dataset(tasks=file, score=f"{tmp_path}/logs.py:{function}", held_out=0.0)
    await made.open()
    for task in made.tasks("train")[:2]:
        scored = await made.score(task, {"role": "assistant", "content": "4"})
        assert scored == Score(1.0, metrics={"length": 4.0})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("logs the column 'answer' with log_extra, and columns are not recorded") == 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("state", "uses trainer_state, which only TRL's trainer has"),
        ("guarded", "uses trainer_state, which only TRL's trainer has"),
        ("ids", "uses completion_ids, which only TRL's trainer has"),
        ("first", "uses completion_ids, which only TRL's trainer has"),
        ("unfinished", "logged nan as metric 'length'"),
    ],
)
async def test_a_use_of_what_only_trls_trainer_has_is_named(tmp_path, function, says):
    (tmp_path / "logs.py").write_text(LOGGING)
    with pytest.raises(DataError, match=f"logs.py:{function} {says}"):
        await value("4", score=f"{tmp_path}/logs.py:{function}")


def test_what_only_trls_trainer_can_give_a_function_is_named(tmp_path):
    (tmp_path / "theirs.py").write_text("def f(completions, completion_ids):\n    return [0.0]\n")
    file = lines(tmp_path / "rows.jsonl", *sums(0, 9))
    with pytest.raises(ConfigError, match="theirs.py:f' takes completion_ids, which only TRL's trainer has"):
        dataset(tasks=file, score=f"{tmp_path}/theirs.py:f", held_out=0.0)


FORMS = """
from functools import partial


def unnamed(**kwargs):
    return [1.0]


def undecorated(*args, **kwargs):
    return [1.0]


unknown = max


def one(task):
    return 1.0


def short(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth)


def turns(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["num_turns"] == 2 and extra_info["rollout_reward_scores"] == {})


def lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]


def lengths(completion_ids, **kwargs):
    return [0.0]


def bare(completions, answer):
    return (float(one == right) for one, right in zip(completions, answer, strict=True))


def raw(completions, **kwargs):
    return b"1"


def scaled(completions, scale, **kwargs):
    return [scale]


twice = partial(scaled, scale=2.0)


def changes(prompts, completions, answer, **kwargs):
    found = prompts[0][0]["content"] == "?" and answer[0] == [4]
    prompts[0][0]["content"] = "!"
    answer[0].pop()
    return [float(found)]
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("unnamed", "cannot be called, since too many positional arguments"),
        ("undecorated", "it names no parameter.*functools.wraps"),
        ("unknown", "does not say which parameters it has"),
        ("one", "cannot be called"),
        ("lengths", "takes completion_ids, which only TRL's trainer has"),
    ],
)
def test_a_function_of_a_form_that_is_not_known_is_refused(tmp_path, function, says):
    (tmp_path / "forms.py").write_text(FORMS)
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        dataset(tasks="rows.jsonl", score=f"{tmp_path}/forms.py:{function}")


@pytest.mark.parametrize(
    ("function", "expected"), [("short", 1.0), ("turns", 1.0), ("lists", 1.0), ("bare", 1.0), ("twice", 2.0)]
)
async def test_a_function_is_given_what_it_names(tmp_path, function, expected):
    (tmp_path / "forms.py").write_text(FORMS)
    task = Task("1", ({"role": "user", "content": "?"},), "4", {"prompt": "?", "answer": "4"})
    assert (await value("4", task, score=f"{tmp_path}/forms.py:{function}")).value == expected


async def test_a_byte_is_not_a_score(tmp_path):
    (tmp_path / "forms.py").write_text(FORMS)
    with pytest.raises(DataError, match="raw gave b'1' for task 1, which is not a score"):
        await value("4", score=f"{tmp_path}/forms.py:raw")


async def test_a_function_that_changes_what_it_is_given_leaves_the_row_as_it_is(tmp_path):
    (tmp_path / "forms.py").write_text(FORMS)
    chat = ({"role": "user", "content": "?"},)
    task = Task("1", chat, None, {"prompt": list(chat), "answer": [4]})
    made = dataset(tasks="rows.jsonl", score=f"{tmp_path}/forms.py:changes")
    for _ in range(2):
        assert (await made.score(task, {"role": "assistant", "content": "4"})).value == 1.0


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("bare", {"answer": ""}, "line 1 has no column 'answer', which .*forms.py:bare takes"),
        ("short", {}, "line 1 has no answer, which .*forms.py:short takes as ground_truth.*'gold'"),
        ("short", {"answer": ""}, ""),
        ("short", {"answer": "gold"}, ""),
        ("twice", {}, ""),
    ],
)
async def test_rows_without_what_a_function_takes_are_refused_before_a_run(tmp_path, function, options, says):
    (tmp_path / "forms.py").write_text(FORMS)
    file = lines(tmp_path / "rows.jsonl", *({"prompt": f"{n}?", "gold": "4"} for n in range(9)))
    made = dataset(tasks=file, score=f"{tmp_path}/forms.py:{function}", held_out=0.0, **options)
    if says:
        with pytest.raises(DataError, match=f"(?s){says}"):
            await made.open()
    else:
        await made.open()


REASONED = "<think>\n2 and 2 is 4\n</think>\n4"
CALLED = 'I ask. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
WHOLE = r"""
import re


def seen(prompts, completions, q=None, **kwargs):
    want = [{"role": "assistant", "content": TEXT}]
    return [float(one == (TEXT if isinstance(prompt, str) else want)) for prompt, one in zip(prompts, completions)]


def thinks(completions, **kwargs):
    return [1.0 if re.match(r"^<think>.+?</think>\s*\S", one[0]["content"], re.DOTALL) else 0.0 for one in completions]


def column(completions, q, **kwargs):
    return [float(len(of)) for of in q]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == TEXT and extra_info.get("turns") is None)


def ours(task, reply):
    from atropos_core import whole_reply

    return float(whole_reply(reply) == TEXT)
"""


@pytest.mark.parametrize("text", ["4", REASONED, CALLED, "<think>that might be 4", "2 and 2\n</think>\n4", " 4\n"])
@pytest.mark.parametrize("prompt", ["2 + 2?", [{"role": "user", "content": "2 + 2?"}]])
async def test_functions_for_trl_and_verl_are_given_the_whole_reply(tmp_path, prompt, text):
    (tmp_path / "theirs.py").write_text(f"TEXT = {text!r}\n{WHOLE}")
    file = lines(tmp_path / "rows.jsonl", *({"q": prompt, "answer": "4", "id": n} for n in range(9)))
    for function in ("seen", "compute_score", "ours"):
        made = dataset(tasks=file, score=f"{tmp_path}/theirs.py:{function}", held_out=0.0, prompt="q")
        task = made.tasks("train")[0]
        assert (await made.score(task, message_of(text))).value == 1.0, function


@pytest.mark.parametrize("cell", [True, False])
async def test_a_row_with_tools_gives_a_function_for_trl_the_calls_and_messages_in_a_cell_are_messages(tmp_path, cell):
    (tmp_path / "theirs.py").write_text(
        f"TEXT = {CALLED!r}\n\n\ndef f(prompts, completions, **kwargs):\n    [[one]], [prompt] = completions, prompts\n"
        "    return [float(one['content'] == TEXT and one['tool_calls'][0]['function']['name'] == 'add' and prompt[0]['role'] == 'user')]\n"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "2 + 2?"}]
    row = {"prompt": json.dumps(messages) if cell else messages, "tools": [tool]}
    file = lines(tmp_path / "rows.jsonl", *({**row, "id": n} for n in range(9)))
    made = dataset(tasks=file, score=f"{tmp_path}/theirs.py:f", held_out=0.0)
    assert (await made.score(made.tasks("train")[0], message_of(CALLED))).value == 1.0


async def test_a_reward_for_trl_finds_reasoning_and_the_column_that_the_prompt_is_of(tmp_path):
    (tmp_path / "theirs.py").write_text(WHOLE)
    file = lines(tmp_path / "rows.jsonl", *({"q": [{"role": "user", "content": "?"}], "id": n} for n in range(9)))
    for function, expected in (("thinks", 1.0), ("column", 1.0)):
        made = dataset(tasks=file, score=f"{tmp_path}/theirs.py:{function}", held_out=0.0, prompt="q")
        assert (await made.score(made.tasks("train")[0], message_of(REASONED))).value == expected


@pytest.mark.parametrize(
    ("text", "opening", "options", "expected"),
    [
        ("2 and 2 is 4\n</think>\n4", "<think>", {"score": "exact"}, 1.0),
        ("2 and 2 is 4\n</think>\n5", "<think>", {}, 0.0),
        ("2 and 2, that might be 4", "<think>", {}, 0.0),
        ("<think>\nFirst, 2 and 2, that might be 4", "", {}, 0.0),
        ("<think>\nFirst, 2 and 2, that might be 4", "", {"pattern": r"might be (\d)"}, 0.0),
        ("<think>5</think>4", "", {"score": "exact", "pattern": r"</think>\s*(.+)"}, 1.0),
        ("5</think>4", "<think>", {"score": "exact", "pattern": r"<think>.*</think>\s*(.+)"}, 1.0),
        ("<think>4", "", {"score": "exact", "pattern": r"</think>\s*(.+)"}, 0.0),
    ],
)
async def test_what_a_reply_thinks_is_not_compared_unless_a_pattern_looks_for_it(text, opening, options, expected):
    task = Task("1", ({"role": "user", "content": "2 + 2?"},), "4")
    made = dataset(tasks="rows.jsonl", **options)
    assert (await made.score(task, message_of(text, opening))).value == expected


GIVES = """
import math


class Two:
    'Of two elements: it raises what a tensor of torch does.'

    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    __bool__ = __float__


def trl(completions, **kwargs):
    return VALUE


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return VALUE


def ours(task, reply):
    return VALUE
"""


@pytest.mark.parametrize("function", ["trl", "compute_score", "ours"])
@pytest.mark.parametrize(
    "value",
    [
        "math.nan", "[math.nan]", "math.inf", "[-math.inf]", "None", "'1'", "['1']", "[1.0, 0.0]", "[]", "{}", "10**400",
        "{'score': math.nan}", "{'score': None}", "[[1.0]]", "b'1'", "[b'1']", "bytearray(b'1')", "[bytearray(b'1')]", "memoryview(b'1')",
        "[memoryview(b'1')]", "[Two()]", "{'score': Two()}", "{'score': 1.0, 'acc': Two()}",
    ],
)  # fmt: skip
async def test_what_is_no_score_is_named_with_its_function_and_its_row(tmp_path, function, value):
    (tmp_path / "theirs.py").write_text(GIVES.replace("VALUE", value))
    file = lines(tmp_path / "rows.jsonl", *({"id": f"row-{n}", "prompt": f"{n}?"} for n in range(9)))
    made = dataset(tasks=file, score=f"{tmp_path}/theirs.py:{function}", held_out=0.0)
    with pytest.raises(DataError, match=f"theirs.py:{function} gave .* for task row-3, which is not a score"):
        await made.score(made.tasks("train")[3], {"role": "assistant", "content": ""})


async def test_none_of_a_function_for_trl_abstains(tmp_path):
    (tmp_path / "theirs.py").write_text(TRL)
    made = dataset(tasks=lines(tmp_path / "rows.jsonl", *sums(0, 9)), score=f"{tmp_path}/theirs.py:none", held_out=0.0)
    scored = await made.score(made.tasks("train")[0], {"role": "assistant", "content": ""})
    assert (scored.value, scored.correct, scored.abstains) == (0.0, None, True)


async def test_several_scores_are_added_up_by_weight(tmp_path):
    (tmp_path / "theirs.py").write_text(TRL)
    file = lines(tmp_path / "rows.jsonl", *({"level": 100, **row} for row in sums(0, 9)))
    scores = ["numeric", *(f"{tmp_path}/theirs.py:{name}" for name in ("length", "none"))]
    made = dataset(tasks=file, score=scores, score_weights=[2.0, -0.01, 5.0], held_out=0.0)
    await made.open()
    scored = await made.score(made.tasks("train")[5], {"role": "assistant", "content": "it is 12"})
    length = 100.0 + len("5 + 7?") + len("it is 12")
    assert scored.value == pytest.approx(2.0 - 0.01 * length, abs=1e-12) and scored.correct is True
    assert scored.parts == {"numeric": 1.0, "length": length} and not scored.abstains
    assert scored.metrics == {"score/numeric": 1.0, "score/length": length}
    without = dataset(tasks=file, score=scores[1:], held_out=0.0)
    assert (await without.score(made.tasks("train")[5], {"role": "assistant", "content": "it is 12"})).value == length


async def test_several_scores_that_all_abstain_abstain(tmp_path):
    (tmp_path / "theirs.py").write_text(TRL + TRL.replace("def none", "def neither"))
    made = dataset(
        tasks=lines(tmp_path / "rows.jsonl", *sums(0, 9)),
        score=[f"{tmp_path}/theirs.py:none", f"{tmp_path}/theirs.py:neither"],
        held_out=0.0,
    )
    assert (await made.score(made.tasks("train")[0], {"role": "assistant", "content": ""})).abstains


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"score": []}, "a list of different scores"),
        ({"score": ["numeric", "numeric"]}, "a list of different scores"),
        ({"score": ["numeric", "exactly"]}, "not 'exactly'"),
        ({"score": ["numeric", "exact"], "score_weights": [1.0]}, "has 1 numbers for 2 scores"),
        ({"score": ["numeric", "exact"], "score_weights": [1.0, math.nan]}, "finite"),
        ({"score_weights": [2.0]}, "score_weights has no effect with score = .numeric."),
        ({"score": ["math", "a:b"], "pattern": "x"}, "pattern has no effect with score = ..math., .a:b.."),
        ({"score": ["a:b", "exact"], "answer": ""}, "compares with an answer"),
    ],
)
def test_what_cannot_be_added_up_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        DatasetOptions(tasks="rows.jsonl", **options)


def test_scores_of_one_name_are_refused(tmp_path):
    for file in ("one", "other"):
        (tmp_path / f"{file}.py").write_text(TRL)
    with pytest.raises(ConfigError, match="two scores are called 'length'"):
        dataset(tasks="rows.jsonl", score=[f"{tmp_path}/one.py:length", f"{tmp_path}/other.py:length"])


def test_a_run_file_finds_several_scores_in_its_folder(tmp_path):
    read = anchored({"environment": {"a": {"score": ["numeric", "./grade.py:short"]}}}, tmp_path)
    assert read["environment"]["a"]["score"] == ["numeric", f"{tmp_path.resolve()}/grade.py:short"]


def test_a_score_that_is_not_there_or_is_no_function_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no file .*grade.py"):
        dataset(tasks="rows.jsonl", score=f"{tmp_path}/grade.py:score")
    with pytest.raises(ConfigError, match="SCORES.* is not a function"):
        dataset(tasks="rows.jsonl", score="atropos_env_dataset.config:SCORES")


async def test_a_data_set_of_the_hub_is_read_by_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    lines(folder / "train.jsonl", *sums(0, 30))
    lines(folder / "test.jsonl", *sums(100, 5))
    made = dataset(hub=str(folder), test_split="test")
    await made.open()
    assert len(made.tasks("train")) == 30
    assert [task.answer for task in made.tasks("test")] == ["107", "108", "109", "110", "111"]
    assert made.source() == f"{folder} from the hub"
    with pytest.raises(DataError, match="the hub did not give .*sums, split dev"):
        await dataset(hub=str(folder), split="dev").open()
    with pytest.raises(DataError, match="the hub did not give .*sums, split train"):
        await dataset(hub=str(folder), subset="other").open()
