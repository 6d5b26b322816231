"""Rows of a warm start: their tokens and which of them are trained, their order, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from atropos_core.config.run_file import WarmupSection
from atropos_core.errors import DataError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_env_dataset.completions import open_completions
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
TOOLS = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny_tools"
SUM = {"prompt": "What is 2 + 2?", "completion": "2 + 2 = 4 #### 4"}
CHAT = [
    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 1?"}, {"role": "assistant", "content": "5"},
]  # fmt: skip


def opened(tmp_path: Path, rows, model: Path = TINY, *, seed: int = 0, max_tokens: int = 512, **options):
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = WarmupSection(data=path, **{"held_out": 0, **options})
    return open_completions(section, ChatTokenizer(model), max_tokens=max_tokens, seed=seed)


def text(row, model: Path = TINY, *, trained: bool = False) -> str:
    return ChatTokenizer(model).decode(row.tokens[row.trained] if trained else row.tokens, keep_special=True)


@pytest.mark.parametrize(
    "row",
    [
        SUM,
        {
            "prompt": [{"role": "user", "content": SUM["prompt"]}],
            "completion": [{"role": "assistant", "content": SUM["completion"]}],
        },
        {"messages": [{"role": "user", "content": SUM["prompt"]}, {"role": "assistant", "content": SUM["completion"]}]},
        {"prompt": SUM["prompt"], "completion": json.dumps([{"role": "assistant", "content": SUM["completion"]}])},
    ],
    ids=["texts", "messages in both", "messages", "messages in a text"],
)
def test_the_forms_of_a_row_are_the_prompt_of_a_rollout_and_a_reply_with_its_end(tmp_path, row):
    [made] = opened(tmp_path, [row]).trained
    prompt = ChatTokenizer(TINY).render([{"role": "user", "content": SUM["prompt"]}])
    assert made.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert text(made, trained=True) == SUM["completion"] + "<|end|>"
    assert not made.trained[: len(prompt)].any() and made.trained[len(prompt) :].all()
    assert made.sft and not made.sampled.any() and made.logprobs is None


def test_columns_may_have_other_names_and_a_system_message(tmp_path):
    row = {"question": "2 + 2?", "answer": "4", "system": "Be brief."}
    [made] = opened(tmp_path, [row], TOOLS, prompt="question", completion="answer").trained
    assert "Be brief." in text(made, TOOLS) and text(made, TOOLS, trained=True).startswith("4<|im_end|>")


def test_of_messages_each_reply_is_trained_with_its_end_and_nothing_else(tmp_path):
    [made] = opened(tmp_path, [{"messages": CHAT}], TOOLS).trained
    assert text(made, TOOLS, trained=True) == "4<|im_end|>5<|im_end|>"
    assert text(made, TOOLS).count("<|im_end|>") >= 4


def test_each_epoch_has_every_row_once_in_an_order_of_the_seed(tmp_path):
    data = [SUM | {"completion": str(number)} for number in range(10)]
    rows = opened(tmp_path, data, rows_per_step=4, epochs=2)
    assert rows.steps == 6
    epochs = [[text(row) for step in steps for row in rows.batch(step)] for steps in ((1, 2, 3), (4, 5, 6))]
    assert [len(rows.batch(step)) for step in range(1, 7)] == [4, 4, 2] * 2
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(text, rows.trained)) and epochs[0] != epochs[1]
    again, other = opened(tmp_path, data, rows_per_step=4, epochs=2), opened(tmp_path, data, rows_per_step=4, seed=1)
    assert [text(row) for row in again.batch(5)] == [text(row) for row in rows.batch(5)]
    assert [text(row) for row in other.batch(1)] != [text(row) for row in rows.batch(1)]
    assert again.digest == rows.digest != other.digest
    assert opened(tmp_path, data, rows_per_step=4, steps=5).steps == 5


def test_held_out_rows_are_not_trained(tmp_path):
    data = [SUM | {"completion": str(number)} for number in range(40)]
    rows = opened(tmp_path, data, held_out=None)
    trained, held_out = ({text(row) for row in part} for part in (rows.trained, rows.held_out))
    assert (len(trained), len(held_out), len(trained | held_out)) == (36, 4, 40)
    assert len(opened(tmp_path, data, held_out=7).held_out) == 7
    with pytest.raises(DataError, match="held_out = 40 leaves no row to train on"):
        opened(tmp_path, data, held_out=40)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_is_that_of_transformers_schedulers(tmp_path, schedule):
    rows = opened(tmp_path, [SUM], steps=23, schedule=schedule, rise=0.2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[schedule](
        optimizer, 5, 23
    )
    theirs = []
    for _ in range(24):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    # Theirs begins at 0, ours at 1/5: step n of ours is update n of theirs while it rises, and update n - 1 once it falls.
    wanted = theirs[1:6] + theirs[5:23]
    np.testing.assert_allclose([rows.rate(step) for step in range(1, 24)], wanted, atol=1e-12)
    assert {opened(tmp_path, [SUM], steps=9, schedule="constant", rise=0.0).rate(step) for step in range(1, 10)} == {
        1.0
    }


def test_rows_that_are_too_long_are_left_out_and_named(tmp_path, capsys):
    long = SUM | {"completion": "1 " * 200}
    rows = opened(tmp_path, [SUM, long, SUM], max_tokens=60)
    assert len(rows.trained) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "1 of 3 rows have more than 60 tokens (warmup.max_tokens): line 2 has" in said and "They are left out." in said
    )
    with pytest.raises(DataError, match="None is left") as caught:
        opened(tmp_path, [long], max_tokens=60)
    assert "--set warmup.max_tokens=" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "2 + 2?", "answer": "4"},
            r"line 2 has no column 'completion' and no messages. It has 'prompt', 'answer'",
        ),
        ({"prompt": "2 + 2?", "completion": " "}, "line 2: completion is blank"),
        (
            {"prompt": "2 + 2?", "completion": [{"role": "user", "content": "4"}]},
            "completion begins with a message of the role 'user'",
        ),
        ({"prompt": CHAT, "completion": "4"}, "the prompt ends with a reply of the assistant"),
        ({"messages": CHAT[:1]}, "line 2: the conversation has no reply of the assistant"),
        ({"messages": CHAT[1:]}, "line 2: the conversation begins with a reply of the assistant"),
        ({"completion": "4"}, "line 2: a task has one of prompt"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line(tmp_path, row, says):
    with pytest.raises(DataError, match=says):
        opened(tmp_path, [SUM, row])


def test_no_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no rows"):
        opened(tmp_path, [])


def with_template(tmp_path: Path, template: str) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (model / name).write_bytes((TINY / name).read_bytes())
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return model


def test_a_template_that_writes_the_prompt_in_another_way_is_refused(tmp_path):
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    with pytest.raises(
        DataError, match="line 1: the tokens of the prompt are not the beginning of those of prompt and reply"
    ):
        opened(tmp_path, [SUM], with_template(tmp_path, template))


def test_a_template_without_an_end_after_a_reply_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError, match="writes no token that ends a reply"):
        opened(tmp_path, [SUM], with_template(tmp_path, template))
