"""Warnings about prompts and rewards that contain special tokens of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atropos_core.builtin.config import FormatOptions
from atropos_core.launch.text_checks import warn_of_long_answers, warn_of_prompts, warn_of_rewards
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Task
from tests.families import write
from tests.unit.parts import Words


@pytest.fixture
def tokenizer(tmp_path) -> ChatTokenizer:
    return ChatTokenizer(write("qwen", tmp_path / "model", ("<answer>", "</answer>")))


class Asking(Words):
    def __init__(self, *prompts: str, answers: tuple[str | None, ...] = ()) -> None:
        super().__init__()
        self._prompts = prompts
        self._answers = answers or (None,) * len(prompts)

    def tasks(self, split: Any) -> list[Task]:
        both = enumerate(zip(self._prompts, self._answers, strict=True))
        return [Task(f"t{n}", ({"role": "user", "content": one},), answer) for n, (one, answer) in both]


def test_prompts_to_which_a_template_was_applied_are_named(tokenizer, capsys):
    warn_of_prompts("mine", Asking("2 + 2?", "<|im_start|>user\n2 + 2?<|im_end|>", "<|im_end|>"), tokenizer)
    said = " ".join(capsys.readouterr().err.split())
    assert "environment 'mine': 2 of the first 3 prompts have control tokens" in said
    assert "'<|im_start|>' in task 't1'" in said
    warn_of_prompts("mine", Asking("2 + 2?", "<think> in <tool_call> and <im_start>"), tokenizer)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "turn",
    [
        "<|start_header_id|>user",
        "<start_of_turn>user",
        "<s>[INST] 2 + 2? [/INST]",
        "<\uff5cUser\uff5c>2",
        "<|user|>",
        "<|start|>user",
    ],
)
def test_prompts_with_the_template_of_another_model_are_named(tokenizer, capsys, turn):
    warn_of_prompts("mine", Asking("2 + 2?", f"{turn}\n2 + 2?"), tokenizer)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of the first 2 prompts have control tokens of another model in them" in said and "in task 't1'" in said


@pytest.mark.parametrize(
    ("pattern", "sought"),
    [("<answer>.+</answer>", "'</answer>', '<answer>'"), (r"\<answer\>", "'<answer>'"), ("<think>.+</think>", ""), ("#### ", "")],
)  # fmt: skip
def test_a_reward_that_looks_for_a_special_token_is_named(tokenizer, capsys, tmp_path, pattern, sought):
    function = tmp_path / "grade.py"
    function.write_text(f"import re\nPATTERN = re.compile(r{pattern!r})\n")
    in_options = SimpleNamespace(component=SimpleNamespace(use="format"), options=FormatOptions(patterns=(pattern,)))
    in_a_file = SimpleNamespace(component=SimpleNamespace(use=f"{function}:score"), options=FormatOptions())
    warn_of_rewards({"reward": {"format": in_options, "mine": in_a_file}}, tokenizer)  # type: ignore[dict-item]
    said = " ".join(capsys.readouterr().err.split())
    for label in ("reward.format", "reward.mine"):
        assert (f"{label} looks for {sought}" in said) == bool(sought)


def test_known_answers_that_are_longer_than_a_reply_may_be_are_counted(tokenizer, capsys):
    answer = "four, five, six"
    tokens = len(tokenizer.encode(answer))
    environment = Asking("a", "b", "c", answers=(answer, "4", None))
    warn_of_long_answers("mine", environment, tokenizer, tokens)
    assert not capsys.readouterr().err
    warn_of_long_answers("mine", environment, tokenizer, tokens - 1)
    said = " ".join(capsys.readouterr().err.split())
    assert f"1 of the first 3 tasks have more than {tokens - 1} tokens, up to {tokens}," in said
    few = Asking(*map(str, range(40)), answers=(answer,) * 2 + ("4",) * 38)
    warn_of_long_answers("mine", few, tokenizer, tokens - 1)
    assert not capsys.readouterr().err, "two of forty are few"
