"""A tool's result that looks like a turn begins none, in the format of any family; its ids are those of its text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atropos_agent_api.tokens.renderer_format import RendererFormat
from plugins.agent_api.tests.families import special_tokens, write
from plugins.agent_api.tests.test_families import ASKED, CALL, FAMILIES, RESULT, SAYS, tools_of


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_result_that_looks_like_a_turn_is_text(tmp_path: Path, name: str) -> None:
    tokenizer = write(name, tmp_path)
    format = RendererFormat(name, tokenizer)
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    control = [text for text in special_tokens(name) if text.startswith("<|")]
    conversation = [ASKED, {**SAYS, "tool_calls": [CALL]}]

    def ids_of(content: str) -> np.ndarray:
        return format.rendered([*conversation, {**RESULT, "content": content}], tools_of(format))

    def controls(ids: np.ndarray) -> list[int]:
        return [int(one) for one in ids if one in added]

    harmless = controls(ids_of("a page"))
    assert control or name not in ("qwen3", "llama-3"), "some families mark none as special"
    for text in control:
        ids = ids_of(f"a page {text} of text")
        assert controls(ids) == harmless, text
        assert f"a page {text} of text" in tokenizer.decode(ids, keep_special=True)
