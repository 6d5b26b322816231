"""A program on OpenAI's SDK talks to the real model in a run: the tokens that it received are those that are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_records.rollout_records import RolloutRecords
from tests.conftest import Ended
from tests.real.runs import SMALL, logprobs, plain

AGENT = Path(__file__).parent / "agent.py"


@pytest.mark.timeout(500)
def test_the_tokens_of_an_agent_s_session_are_trained_as_they_were_sampled(
    model: Path, tmp_path: Path, atropos: Callable[..., Ended]
) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(4)))
    values = {
        "function": f"{AGENT}:main", "tasks": "tasks.jsonl", "held_out": 0.0, "sandbox": "process", "network": True,
        "reward.function": f"{AGENT}:vowels",
    }  # fmt: skip
    options = [
        word for name, value in values.items() for word in ("--set", f"environment.agent.{name}={json.dumps(value)}")
    ]
    ended = atropos(
        "run", "--model", str(model), "--env", "agent", *options, "--dir", "run", *SMALL, "--steps", "1",
        "--set", "checkpoint.every=0", timeout=450,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    received = [
        json.loads(path.read_text()) for path in (tmp_path / "run/agents").glob("**/stdout.txt") if path.stat().st_size
    ]
    step = RolloutRecords(tmp_path / "run").step(1)
    assert step.tokens is not None and step.tokens.sequences == len(received) == 4
    chat, reference = ChatTokenizer(model), plain(model)
    trained = []
    for number in range(4):
        one = step.tokens.sequence(number)
        assert np.array_equal(one.sampled, one.trained) and len(one.replies) == 2, "the second call continues the first"
        assert np.abs(logprobs(reference, one.ids) - one.logprobs)[one.trained].max() <= 1e-4
        trained.append([
            [[chat.decode(one.ids[at : at + 1], keep_special=True), float(one.logprobs[at])] for at in range(start, end)]
            for start, end in one.replies
        ])  # fmt: skip
    assert sorted(trained) == sorted(received)
