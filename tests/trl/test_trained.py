"""What `atropos export` writes, in TRL's own SFTTrainer and DPOTrainer: it trains, on the tokens that the policy saw and sampled.
`make test-export`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_core.interfaces import SettledGroup
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_records.rollout_records import RolloutRecords
from tests.e2e.runs import finish
from tests.recorded_runs import group_of, says, settled, user

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "TRL_PYTHON" not in os.environ, reason="needs TRL in an environment of its own: `make test-export`"
    ),
]
PROGRAM = Path(__file__).parent / "trained.py"
RUN = (
    "--env", "gsm8k", "--steps", "2", "--set", "training.groups_per_step=8", "--set", "training.group_size=4",
    "--set", "evaluation.problems=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    finish(folder, "run", *RUN, "--dir", str(folder))
    return folder


@pytest.fixture(scope="module")
def policy(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    exported = tmp_path_factory.mktemp("policy") / "exported"
    assert run_app(["export", str(run), "--as", "hf", "--out", str(exported)]) == 0
    return exported


def trained(form: str, data: Path, policy: Path) -> dict[str, Any]:
    result = data.with_suffix(".json")
    ended = subprocess.run(
        [os.environ["TRL_PYTHON"], str(PROGRAM), form, str(data), str(policy), str(result)],
        capture_output=True, text=True, timeout=500, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["losses"] and all(map(math.isfinite, found["losses"])) and found["changed"] > 0
    return found


def sampled_histories(run: Path) -> dict[tuple[int, str], list[tuple[list[int], list[int]]]]:
    """By step and task: the prompt's ids and the reply's, of each whole episode."""
    records, found = RolloutRecords(run), {}
    for step in map(records.step, records.steps()):
        for episode in step.episodes:
            [tokens] = step.sequences(episode)
            [(start, end)] = tokens.replies
            history = tokens.ids[:start].tolist(), tokens.ids[start:end].tolist()
            found.setdefault((step.step, episode.task), []).append(history)
    return found


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_sft_trains_on_the_tokens_that_the_policy_saw_and_sampled(
    suffix: str, run: Path, policy: Path, tmp_path: Path
) -> None:
    data = tmp_path / f"sft.{suffix}"
    assert run_app(["export", str(run), "--as", "sft", "--out", str(data), "--best-per-group", "2"]) == 0
    found = trained("sft", data, policy)
    assert found["columns"] == ["messages", "tools", "reward", "task", "environment", "step"]
    of_run = [prompt + reply for histories in sampled_histories(run).values() for prompt, reply in histories]
    assert len(found["tokens"]) >= 16
    for row in found["tokens"]:
        ids = row["input_ids"]
        assert any(ids[: len(one)] == one and len(ids) - len(one) <= 1 for one in of_run), (
            "but for the template's last newline"
        )


def test_dpo_trains_on_pairs_of_what_was_sampled(run: Path, policy: Path, tmp_path: Path) -> None:
    data = tmp_path / "dpo.jsonl"
    assert run_app(["export", str(run), "--as", "dpo", "--out", str(data)]) == 0
    found = trained("dpo", data, policy)
    assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-3), "the reference is the policy itself"
    pairs, histories = [json.loads(line) for line in data.read_text().splitlines()], sampled_histories(run)
    assert len(pairs) == len(found["tokens"]) > 1
    for pair, tokens in zip(pairs, found["tokens"], strict=True):
        of_task = histories[pair["step"], pair["task"]]
        assert tokens["prompt_ids"] == of_task[0][0]
        for name in ("chosen_ids", "rejected_ids"):
            assert any(tokens[name][: len(reply)] == reply for _, reply in of_task)
        assert pair["score_chosen"] > pair["score_rejected"]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TEMPLATE = (
    "{%- for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)


async def test_conversations_with_tool_calls_train_as_they_are(policy: Path, tmp_path: Path) -> None:
    """Two calls with other arguments, which would be filled up with nulls if they were columns."""
    conversations = [
        [user("6 times 7?"), says("", tool_calls=[one]), {"role": "tool", "content": "42"}, says("42")]
        for one in (call("calculate", expression="6*7"), call("find", what={"a": 1}))
    ]
    tools = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("calculate", "find"))
    run = await settled(
        tmp_path / "run", [SettledGroup(group_of(0, [1.0, 0.5], *conversations), "trained", tools=tools)]
    )
    assert run_app(["export", str(run), "--as", "sft", "--out", str(tmp_path / "calls.jsonl")]) == 0
    model = Path(shutil.copytree(policy, tmp_path / "policy"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = ChatTokenizer(model)
    texts = [
        tokenizer.decode(np.array(row["input_ids"], np.int32), keep_special=True)
        for row in trained("sft", tmp_path / "calls.jsonl", model)["tokens"]
    ]
    turns = [("user", "6 times 7?"), ("assistant", "{}"), ("tool", "42"), ("assistant", "42")]
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    wanted = [
        "[calculate][find]" + whole.replace("{}", arguments)
        for arguments in ('{"expression": "6*7"}', '{"what": {"a": 1}}')
    ]
    assert [text.removesuffix("\n") for text in texts] == [text.removesuffix("\n") for text in wanted]
