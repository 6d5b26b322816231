"""Chat templates of families without a renderer: a conversation of several turns is, as text, what the template renders."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_agent_api.calls import Call
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.model_formats import ModelFormats
from atropos_core.types import Message
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from tests.families import FAMILIES, write

ENDS = {"gemma": "<end_of_turn>", "phi-3": "<|end|>", "gpt-oss": "<|end|>", "unmarked": "<turn_end>"}  # others: eos
HISTORY = {  # what a template writes before a reply of the history, and what before one that is to be sampled
    "mistral": ("[/INST] ", "[/INST]"),
    "command": ("<|START_OF_TURN_TOKEN|>assistant", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant"),
    "unmarked": ("! <turn_end>", "!<turn_end>"),
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_three_turns_are_one_rollout_that_reads_as_the_template_renders_them(name: str, tmp_path: Path):
    formats = ModelFormats(write(name, tmp_path))
    tokenizer = formats.tokenizer
    replies = iter(("Hello you!", "Über 42!", "Bye."))
    engine = LedgerEngine(tokenizer, lambda prompt, seed: next(replies))
    engine.end = ENDS.get(name, tokenizer.eos)
    policy = policy_of(engine, tokenizer)
    session = Session(policy, await formats.of(policy), SessionOptions(), seed=1, name=name)
    messages: list[Message] = []
    for said in ("hi", "how much?", "bye"):
        messages.append({"role": "user", "content": said})
        answer = await session.answer(Call("chat", "m", tuple(messages)))
        messages.append(answer.choices[0].message)
    [rollout] = session.record().rollouts
    sampled = [one for entry in engine.ledger for one in entry.tokens.tolist()]
    assert rollout.tokens[rollout.trained].tolist() == sampled
    rendered = tokenizer.decode(tokenizer.render(messages[:-1]), keep_special=True)
    expected = rendered.replace(*HISTORY.get(name, ("", ""))) + "Bye." + engine.end
    assert tokenizer.decode(rollout.tokens, keep_special=True) == expected
