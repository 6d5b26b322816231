"""A conversation with tools through the model's ChatML template: what is trained is what was sampled, after the prompt that was read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import tokens
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import Ended
from tests.real.runs import SMALL, logprobs, plain

ADDING = f"{Path(__file__).parent / 'adding.py'}:Adding"


@pytest.mark.timeout(500)
def test_a_conversation_with_tools_trains_what_was_sampled(
    model: Path, tmp_path: Path, atropos: Callable[..., Ended]
) -> None:
    ended = atropos(
        "run", "--model", str(model), "--env", ADDING, "--dir", "run", *SMALL, "--steps", "1", "--set", "sampling.max_tokens=40",
        "--set", "checkpoint.every=0", timeout=450, SAMPLED=str(tmp_path / "sampled.jsonl"),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    step = RolloutRecords(tmp_path / "run").step(1)
    assert step.tokens is not None
    recorded = [step.tokens.sequence(number) for number in range(step.tokens.sequences)]
    rows = [json.loads(line) for line in (tmp_path / "sampled.jsonl").read_text().splitlines()]
    assert len(recorded) == 4
    theirs, chat, reference = AutoTokenizer.from_pretrained(model), ChatTokenizer(model), plain(model)
    calls = 0
    for one in recorded:
        [row] = [row for row in rows if row["sampled"][-1][0] + row["sampled"][-1][1] == one.ids.tolist()]
        expected = np.zeros(len(one.ids), bool)
        values = np.zeros(len(one.ids), np.float32)
        for prompt, said, logs in row["sampled"]:
            assert one.ids[: len(prompt)].tolist() == prompt
            span = slice(len(prompt), len(prompt) + len(said))
            assert one.ids[span].tolist() == said
            expected[span], values[span] = True, logs
        assert np.array_equal(one.sampled, expected) and np.array_equal(one.trained, expected)
        assert np.array_equal(one.logprobs[expected], values[expected])
        assert np.abs(logprobs(reference, one.ids) - one.logprobs)[expected].max() <= 1e-4

        texts = iter(chat.decode(tokens(said)) for _, said, _ in row["sampled"])
        fixed = len(row["said"])
        history = [
            {"role": "assistant", "content": next(texts)} if at >= fixed and message["role"] == "assistant" else message
            for at, message in enumerate(row["heard"])
        ]
        assert history[:fixed] == row["said"]
        whole = theirs.apply_chat_template(history, tokenize=False)
        read = chat.decode(one.ids, keep_special=True)
        assert whole in (read + "\n", read + "<|im_end|>\n"), "a reply that is cut off has no end of its own"
        calls += sum(len(message.get("tool_calls", ())) for message in row["heard"])
    print(f"{calls} calls of the tool in 12 replies")
    assert calls, "the model calls the tool as it was shown"
