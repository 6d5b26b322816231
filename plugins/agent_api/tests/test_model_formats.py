"""The format of a model: a renderer's if it renders as the model's own chat template does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atropos_agent_api.calls import Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.model_formats import ModelFormats
from atropos_agent_api.tokens.openings import opening_of
from atropos_core.errors import ConfigError
from atropos_core.types import Task
from atropos_testing.scripted import Script, ScriptedPolicy
from plugins.agent_api.tests.families import write
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of

QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text()
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


async def test_a_renderer_is_used_where_it_renders_as_the_template_does(tmp_path: Path):
    formats = ModelFormats(write("qwen3", tmp_path, QWEN3).directory)
    policy = policy_of(LedgerEngine(formats.tokenizer, lambda prompt, seed: "ok"), formats.tokenizer)
    assert (await formats.of(policy)).name == "renderer qwen3"
    named = ModelFormats(tmp_path, "template")
    assert (await named.of(policy)).name == "template"


async def test_a_fine_tune_with_a_template_of_its_own_has_that(tmp_path: Path):
    template = QWEN3.replace("# Tools", "# My tools")
    formats = ModelFormats(write("qwen3", tmp_path, template).directory)
    policy = policy_of(LedgerEngine(formats.tokenizer, lambda prompt, seed: "ok"), formats.tokenizer)
    assert (await formats.of(policy)).name == "template"
    with pytest.raises(ConfigError, match="unknown format 'qwen33'"):
        ModelFormats(tmp_path, "qwen33")


async def test_a_policy_with_ids_of_its_own_speaks_for_itself(tmp_path: Path):
    formats = ModelFormats(write("qwen3", tmp_path, QWEN3).directory)
    policy = ScriptedPolicy(Script("says", lambda task, seed: "hello"), Task("t", ({"role": "user", "content": "?"},)))
    format = await formats.of(policy)
    session = Session(policy, format, SessionOptions(), seed=1, name="scripted")
    first = await session.answer(Call("chat", "m", ({"role": "user", "content": "hi"},)))
    message = first.choices[0].message
    await session.answer(
        Call("chat", "m", ({"role": "user", "content": "hi"}, message, {"role": "user", "content": "?"}))
    )
    [rollout] = session.record().rollouts
    assert message["content"] == "hello"
    assert rollout.tokens[rollout.trained].tolist() == [int(one) for given in policy.given for one in given]
    with pytest.raises(CallRefused, match="no tokenizer") as refused:
        await session.answer(Call("completions", "m", prompt="once"))
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("choice", ["required", "tool:clock"])
async def test_a_tool_that_must_be_called_is_begun_for_the_policy(tmp_path: Path, choice: str):
    formats = ModelFormats(write("qwen3", tmp_path, QWEN3).directory)
    engine = LedgerEngine(formats.tokenizer, lambda prompt, seed: '{"zone": "UTC"}}\n</tool_call>')
    policy = policy_of(engine, formats.tokenizer)
    session = Session(policy, await formats.of(policy), SessionOptions(), seed=1, name="choice")
    asked = {"role": "user", "content": "Time?"}
    answer = await session.answer(Call("chat", "m", (asked,), tools=(CLOCK,), tool_choice=choice))
    [choice_made] = answer.choices
    assert choice_made.finish == "tool_calls"
    assert choice_made.message["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"zone": "UTC"}}
    [rollout] = session.record().rollouts
    assert rollout.tokens[rollout.trained].tolist() == engine.ledger[0].tokens.tolist(), "what was given is context"
    said = {**choice_made.message, "tool_calls": json.loads(json.dumps(choice_made.message["tool_calls"]))}
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "noon"}
    await session.answer(Call("chat", "m", (asked, said, result), tools=(CLOCK,)))
    before = np.concatenate([engine.ledger[0].prompt, engine.ledger[0].tokens])
    assert engine.ledger[1].prompt[: len(before)].tolist() == before.tolist()


async def test_a_tool_choice_that_the_format_cannot_keep_is_refused_by_name(tmp_path: Path):
    template = "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    formats = ModelFormats(write("qwen3", tmp_path, template).directory)
    policy = policy_of(LedgerEngine(formats.tokenizer, lambda prompt, seed: "ok"), formats.tokenizer)
    session = Session(policy, await formats.of(policy), SessionOptions(), seed=1, name="choice")
    with pytest.raises(CallRefused, match="'required' cannot be kept") as refused:
        await session.answer(
            Call("chat", "m", ({"role": "user", "content": "?"},), tools=(CLOCK,), tool_choice="required")
        )
    assert refused.value.field == "tool_choice"


async def test_a_beginning_that_text_may_have_too_is_no_opening(tmp_path: Path):
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | length
}}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    formats = ModelFormats(write("qwen3", tmp_path, template).directory)
    policy = policy_of(LedgerEngine(formats.tokenizer, lambda prompt, seed: "ok"), formats.tokenizer)
    assert await opening_of(await formats.of(policy), ["clock"]) is None


async def test_ids_that_a_format_samples_are_written_down_again_whatever_the_client_calls_them(tmp_path: Path):
    formats = ModelFormats(write("kimi-k2", tmp_path, QWEN3).directory, "kimi-k2")
    sampled = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    engine = LedgerEngine(formats.tokenizer, lambda prompt, seed: sampled)
    policy = policy_of(engine, formats.tokenizer)
    session = Session(policy, await formats.of(policy), SessionOptions(), seed=1, name="ids")
    asked = {"role": "user", "content": "Time?"}
    said = (await session.answer(Call("chat", "m", (asked,), tools=(CLOCK,)))).choices[0].message
    assert said["tool_calls"][0]["id"] == "functions.clock:0"
    renamed = {**said, "tool_calls": [{**said["tool_calls"][0], "id": "toolu_9"}]}
    result = {"role": "tool", "tool_call_id": "toolu_9", "content": "noon"}
    await session.answer(Call("chat", "m", (asked, renamed, result), tools=(CLOCK,)))
    added = engine.ledger[1].prompt[len(engine.ledger[0].prompt) + len(engine.ledger[0].tokens) :]
    text = formats.tokenizer.decode(added, keep_special=True)
    assert "functions.clock:0" in text and "toolu_9" not in text and "noon" in text
