"""docs/multi-turn.md: its environment is the one that comes along, learns, and does what the page says of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.plugins.manager import load_plugins
from atropos_core.rollouts.replies import message_of
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.turn_rewards import outcome_reward, turn_rewards
from atropos_core.types import Score
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import REPOSITORY, in_front, metrics_of
from tests.pages.blocks import Block, blocks_of, the_block

PAGE = "docs/multi-turn.md"
PIECES = ('"""Word problems with a calculator', "# A question, and the operations", "class Calculator(Environment)")
OWN = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/calculator.py"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder with the file that the page builds."""
    (tmp_path / "calculator.py").write_text("\n\n".join(the_block(PAGE, first).text for first in PIECES))
    return tmp_path


def after(first: str) -> Block:
    """The block that comes next."""
    blocks = blocks_of(REPOSITORY / PAGE)
    return blocks[blocks.index(the_block(PAGE, first)) + 1]


def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_plugins().resolve_model("tiny-tools").directory)


def test_the_pieces_of_the_page_are_the_environment_that_comes_along(page):
    import ast

    assert ast.dump(ast.parse((page / "calculator.py").read_text())) == ast.dump(ast.parse(OWN.read_text()))


def test_the_commands_beside_it_check_it_and_train_it(page, atropos):
    checked, trained = (command.split()[1:] for command in the_block(PAGE, "atropos check ./calculator.py").commands)
    ended = atropos(*checked, timeout=230)
    assert ended.code == 0 and "fulfills its contract" in ended.out, ended.out
    few = ("--steps", "8", "--set", "training.groups_per_step=8", "--set", "evaluation.problems=100", "--dir", "run")
    ended = atropos(*trained, *few, timeout=230, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    before, *steps = metrics_of(page / "run")
    assert all(step["rollouts/failed"] == 0 for step in steps)
    assert max(step["alignment/max_abs_logprob_diff"] for step in steps) < 1e-4
    assert steps[0]["tools/calls"] > 0.3 and steps[0]["tools/errors"] > 0.05, "tiny-tools calls, not always well"
    assert steps[-1]["eval/accuracy"] >= before["eval/accuracy"] + 0.1
    assert steps[-1]["eval/tools/calls"] > before["eval/tools/calls"]


def test_the_page_says_what_was_gained():
    """Its figures are those of `python -m benchmarks.soak --only tools`."""
    seeds: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/soak_tools.json").read_text())["seeds"]
    text = " ".join((REPOSITORY / PAGE).read_text().split())
    gains = sorted(one["gain_points"] for one in seeds)
    shown = next(one for one in seeds if one["gain_points"] == statistics.median(gains))
    assert after("atropos run --env calculator").text == (
        f"held-out accuracy {shown['before']:.1%} -> {shown['after']:.1%} (+{shown['gain_points']:.1f} points, 500 problems)\n"
    )
    assert len(seeds) == 5 and gains[0] >= 20
    assert f"gained {gains[0]:.1f} to {gains[-1]:.1f} points" in text
    calls, errors = shown["tools/calls"], shown["tools/errors"]
    assert (
        f"`tools/calls` from {calls[0]:.2f} an episode to {calls[1]:.2f}, `tools/errors` from {errors[0]:.2f} to {errors[1]:.2f}"
        in text
    )


def test_the_turn_rewards_of_the_page_are_placed_recorded_and_audited(page, atropos):
    names: dict[str, Any] = {"Score": Score}
    exec(the_block(PAGE, "score = Score").text, names)
    score = names["score"]
    assert outcome_reward(score.value, [turn_rewards([1, 2, 3], score.turns)]) == 0.25
    (page / "tools.py").write_text(the_block(PAGE, "# tools.py").text)
    [command] = the_block(PAGE, "atropos run --model tiny-tools").commands
    few = ("training.groups_per_step=4", "training.group_size=4", "evaluation.problems=8", "reward.no_errors.weight=2")
    sets = [word for one in few for word in ("--set", one)]
    ended = atropos(*command.split()[1:], *sets, "--steps", "1", "--dir", "run", timeout=230, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    step = RolloutRecords(page / "run").step(1)
    costs = 0
    for one in step.episodes:
        expected: list[float] = []
        for message in one.messages:
            if message["role"] == "assistant":
                expected.append(0.0)
            elif message["role"] == "tool" and message["content"].startswith("error"):
                expected[-1] -= 0.1
        [turns] = one.turn_rewards
        [tokens] = step.sequences(one)
        assert turns.values.tolist() == [2.0 * value for value in expected]
        assert [end for _, end in tokens.replies] == turns.ends.tolist()
        assert outcome_reward(one.reward, one.turn_rewards) == pytest.approx(one.score, abs=1e-6)
        costs += sum(value < 0 for value in expected)
    assert costs, "tiny-tools makes errors"
    assert atropos("audit", "run", timeout=120).code == 0


def test_the_messages_of_the_page_are_what_a_reply_is_read_as():
    names: dict[str, Any] = {}
    exec(the_block(PAGE, "reply = {").text, names)
    chat = tokenizer()
    [call] = names["reply"]["tool_calls"]
    text = f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call><|im_end|>"
    assert chat.parse(chat.encode(text)) == {**names["reply"], "text": text.removesuffix("<|im_end|>")}
    assert (
        message_of(f"<tool_call>{json.dumps({'name': 'a'})}</tool_call>")["tool_calls"][0]["function"]["arguments"]
        == {}
    )


def test_the_rollout_of_the_page_is_what_the_policy_reads_and_what_is_trained():
    from atropos_env_gsm8k.calculator import CALCULATE

    lines = the_block(PAGE, "<|im_start|>system").text.splitlines()
    names: dict[str, Any] = {}
    exec(the_block(PAGE, "reply = {").text, names)
    chat = tokenizer()
    question = lines[lines.index("  <|im_start|>user") + 1].strip().removesuffix("<|im_end|>")
    call = names["reply"]["tool_calls"][0]["function"]
    said = [f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", f"#### {names['result']['content']}<|im_end|>"]
    rendered = chat.render([{"role": "user", "content": question}], [CALCULATE])
    first = chat.encode(said[0])
    between = chat.extend([names["result"]], np.concatenate([rendered, first]), [CALCULATE])
    drawn = ""
    for ids, trained in ((rendered, False), (first, True), (between, False), (chat.encode(said[1]), True)):
        text = chat.decode(ids, keep_special=True).removeprefix("\n").removesuffix("\n")
        drawn += "".join(f"{'+' if trained else ' '} {line}\n" for line in text.split("\n"))
    assert drawn == "\n".join(lines) + "\n"


def test_the_scripted_test_of_the_page_prints_what_it_shows(page):
    block = the_block(PAGE, "import asyncio")
    ended = subprocess.run([sys.executable, "-c", block.text], cwd=page, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == after("import asyncio").text


def test_a_package_with_tools_is_made_checked_and_trained_by_the_commands_of_the_page(tmp_path, atropos):
    new, install, check, test, run = the_block(PAGE, "atropos new environment shop").commands
    suggested = [line.strip() for line in atropos(*new.split()[1:]).out.splitlines() if line.startswith("  ")]
    assert suggested == [install, check, test, run]
    info = tmp_path / "env_shop/shop-0.1.0.dist-info"  # what pip install -e would have written
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos-plugin-env-shop\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[atropos]\nenv_shop = atropos_env_shop.plugin\n")
    installed = {"PYTHONPATH": in_front(tmp_path / "env_shop")}
    assert "environment 'shop' fulfills its contract." in atropos(*check.split()[1:], **installed).out
    small = ("--set", "training.groups_per_step=2", "--set", "evaluation.problems=8", "--dir", "run")
    ended = atropos(*run.replace("--steps 20", "--steps 2").split()[1:], *small, **installed, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert metrics_of(tmp_path / "run")[-1]["tools/calls"] > 0
