"""`atropos check`, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core.config.run_file import parse_flag
from atropos_core.errors import ConfigError
from atropos_core.types import Task
from atropos_testing.answers_in_prompts import check_leaks
from atropos_testing.replies import ADVERSARIAL, hedges, is_answer_by_chance, stands_in
from atropos_testing.report import Report
from atropos_testing.samples import make_task
from atropos_testing.scripted import END, Script, ScriptedPolicy, to_ids, to_text

CONTRACT = Path(__file__).parents[2] / "contract"
BROKEN = CONTRACT / "broken_environments.py"


def test_an_environment_in_a_file_that_keeps_its_contract_ends_with_0(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", f"{CONTRACT / 'good_environments.py'}:MultiTurn")
    assert ended.code == 0, ended.out
    assert "rollouts at once" in ended.out and "BROKEN" not in ended.out


def test_a_skipped_check_does_not_fail_the_command(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", f"{BROKEN}:DuplicateIds", "--skip", "unique ids")
    assert ended.code == 0 and "skipped; train[0] and train[150]" in ended.out


def test_a_broken_environment_ends_with_1_and_says_what_to_do(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", f"{BROKEN}:DuplicateIds")
    assert ended.code == 1
    assert "unique ids" in ended.out and "BROKEN" in ended.out
    assert "-> Give every task of a split a unique id." in ended.out
    assert "breaks 1 of" in ended.out


def test_options_go_to_the_component(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", "length", "--set", "limit_tokens=64")
    assert ended.code == 0, ended.err
    ended = atropos("check", "length", "--set", "limit_token=64")
    assert ended.code == 2 and "Did you mean 'limit_tokens'" in ended.err


def test_options_of_a_run_file_say_how_they_are_set_here(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", "calculator", "--set", "environment.calculator.turns=2")
    assert ended.code == 2 and "--set OPTION=VALUE, without environment.NAME" in ended.err, ended.err
    ended = atropos("check", "mine.toml")
    assert ended.code == 2 and "is a run file, and this command takes one component" in ended.err


def test_what_an_error_says_to_do_is_what_is_said(atropos: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    said = " ".join(atropos("check", "dataset:rows.jsonl").out.split())
    assert "Say which column has the prompt, as --set prompt=question." in said and "(rows.py" not in said, said


def test_a_score_that_returns_nothing_is_a_finding(atropos: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import atropos_core\n\nclass Mine(atropos_core.Environment):\n    def tasks(self, split):\n"
        "        return [atropos_core.Task(split, ({'role': 'user', 'content': split},), '1')]\n\n"
        "    async def score(self, task, reply):\n        pass\n\n\nclass Loose(Mine):\n"
        "    async def rollout(self, task, policy, *, seed):\n"
        "        talk = atropos_core.Conversation(policy, seed=seed)\n        await talk.reply(*task.messages)\n"
        "        return talk.episode(atropos_core.Score(None))\n"
    )
    for name, says in (("Mine", "Mine.score() gave None: it returns a number, or a Score"), ("Loose", "episodes")):
        ended = atropos("check", f"./mine.py:{name}")
        assert ended.code == 1 and says in " ".join(ended.out.split()) and "Traceback" not in ended.err, ended.err


def test_a_name_of_two_kinds_asks_which(atropos: Callable[..., Any]) -> None:
    assert atropos("check", "numeric").code == 0
    assert "'local' is of the kinds" in (asked := atropos("check", "local").err) and "--kind" in asked
    assert "Did you mean 'numeric'" in atropos("check", "numerik").err


def test_a_file_that_is_not_there_is_named(atropos: Callable[..., Any]) -> None:
    ended = atropos("check", "./nothing.py:X")
    assert ended.code == 2 and "there is no file" in ended.err


@pytest.mark.parametrize(
    ("answer", "text", "stands"),
    [
        ("5", "2 + 3 = 5", True),
        ("5", "it is 5.", True),
        ("5", "15 and 52 and 5.2 and 5,000 and x5", False),
        ("5", "-5", False),
        ("1,000", "worth $1,000 now", True),
        ("apple", "a pineapple", False),
        ("apple", "An Apple.", True),
        ("a+b", "is it a+b?", True),
        (" ", "a b", False),
    ],
)
def test_an_answer_stands_in_a_text_as_a_whole_word_or_number(answer: str, text: str, stands: bool) -> None:
    assert stands_in(answer, text) is stands


def leaks(tasks: list[Task]) -> bool:
    report = Report(("no leaks",))
    check_leaks(report, tasks)
    return any(finding.ok is False for finding in report.findings)


def asks(text: str, answer: object, number: int) -> Task:
    return Task(str(number), ({"role": "user", "content": text},), str(answer))


def test_questions_that_hold_their_answer_by_chance_or_by_nature_leak_nothing() -> None:
    assert not leaks([asks(f"{a} + {b} = ?", a + b, 10 * a + b) for a in range(10) for b in range(10)])
    assert not leaks([asks(f"For example: 1 + 1? Answer: 2\nNow {a} + 1?", a + 1, a) for a in range(50)])
    assert not leaks([asks("Is the sky blue? Answer: yes or no.", ("yes", "no")[a % 2], a) for a in range(50)])
    assert not leaks([asks(f"A) {a} B) {a + 1} C) {a + 2}\nWhich?", "ABC"[a % 3], a) for a in range(50)])
    assert not leaks([asks(f"Repeat the word w{a}x.", f"w{a}x", a) for a in range(50)])


@pytest.mark.parametrize(
    "give_away",
    [
        "answer: {}",
        "(Answer is {})",
        '{{"answer": "{}"}}',
        "The solution is {}.",
        "Hint: it is {}",
        "label={}",
        "\n{}\n",
        "x={}",
    ],
)
def test_a_prompt_that_says_its_answer_leaks_it(give_away: str) -> None:
    assert leaks([asks(f"{a} times {a}? " + give_away.format(a * a), a * a, a) for a in range(11, 60)])


def test_a_leak_in_one_task_of_ten_is_found() -> None:
    tasks = [asks(f"{a} times {a}? {'answer: ' + str(a * a) if a % 10 == 0 else ''}", a * a, a) for a in range(11, 111)]
    assert leaks(tasks)


def by_chance(answer: str) -> list[str]:
    return [one.name for one in ADVERSARIAL if is_answer_by_chance(answer, one.reply(make_task(answer), 0))]


@pytest.mark.parametrize(
    "answer", ["9", "9.0", "so\n#### 9", "3", "2", "½", "0.5", "\\frac{1}{2}", "8", "VIII", "答案", "É"]
)
def test_an_answer_that_a_hostile_reply_has_in_other_digits_is_there_by_chance(answer: str) -> None:
    assert "unicode" in by_chance(answer)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("400", ["infinity", "minus infinity"]),
        ("-400", ["infinity", "minus infinity"]),
        ("999999999", ["huge fraction"]),
        ("42", []),
        ("yes", []),
        ("NaN", ["not a number", "boxed not a number"]),
    ],
)
def test_an_answer_that_a_hostile_reply_has_as_part_of_a_number_is_there_by_chance(
    answer: str, names: list[str]
) -> None:
    assert by_chance(answer) == names


@pytest.mark.parametrize("answer", ["9", "0.5"])
def test_right_rows_are_not_called_broken_for_what_a_hostile_reply_says(
    atropos: Callable[..., Any], tmp_path: Path, answer: str
) -> None:
    rows = [json.dumps({"prompt": f"What is question {number}?", "answer": answer}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    said = atropos("check", "dataset:rows.jsonl")
    assert said.code == 0, said.out


def test_every_hedge_holds_the_answer_and_neither_begins_nor_ends_with_it() -> None:
    for answer, others in (("42", ["7", "9"]), ("yes", ["yes", "no"]), ("blue", ["red", "blue", "green"])):
        task = make_task(answer)
        for script in hedges(others):
            lines = script.reply(task, 0).splitlines()
            at = [index for index, line in enumerate(lines) if stands_in(answer, line)]
            assert at and 0 not in at and len(lines) - 1 not in at


def test_another_way_to_the_same_number_is_no_hedge() -> None:
    answer, others = "5 + 3 = 8\n#### 8", ["10 - 2 = 8\n#### 8", "4 + 5 = 9\n#### 9"]
    for script in hedges(others):
        reply = script.reply(make_task(answer), 0)
        assert answer in reply and others[1] in reply and others[0] not in reply


async def test_scripted_ids_carry_any_text_unchanged() -> None:
    text = "\x00 \ud800 🙂 ٣ " + "9" * 5000
    assert to_text(to_ids(text)) == text
    policy = ScriptedPolicy(Script("any", lambda task, seed: text), make_task())
    prompt = await policy.render(make_task().messages)
    [completion] = await policy.sample(prompt, seed=1)
    assert completion.tokens[-1] == END
    assert (await policy.parse(completion.tokens))["content"] == text
    more = await policy.render([{"role": "user", "content": "go on"}], after=completion.tokens)
    assert to_text(more) == "user go onassistant "


def test_a_flag_without_value_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_flag("limit_tokens")


def test_the_kind_of_what_stands_in_a_file_is_that_of_its_class(atropos: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "from atropos_core.builtin.rewards import LengthReward\nfrom atropos_core.interfaces import Transform\n"
        "class Keep(Transform):\n    async def __call__(self, groups):\n        return groups\n"
        "async def other(task, episodes):\n    return [0.0 for _ in episodes]\n"
    )
    assert "transform './parts.py:Keep' fulfills its contract" in atropos("check", "./parts.py:Keep").out
    ended = atropos("check", "./parts.py:other")
    assert ended.code == 2 and "does not say of which kind" in ended.err and "--kind reward" in ended.err
    assert "reward './parts.py:other' fulfills" in atropos("check", "./parts.py:other", "--kind", "reward").out
