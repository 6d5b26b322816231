"""Read replies with ROLL's own tokenizer, without the tokens that are not part of the text."""

from __future__ import annotations

from typing import Any

from atropos_core.rollouts.replies import SENTINEL, ReplyReader, end_of_turn


def reader_of(tokenizer: Any) -> ReplyReader:
    """`tokenizer`: of transformers. Special tokens are those that it lists, added tokens that are marked special, and the one that its
    chat template puts after a reply."""
    added = {int(number): token for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special = {int(number): str(tokenizer.decode([number])) for number in tokenizer.all_special_ids}
    special |= {number: str(token.content) for number, token in added.items() if token.special}
    turn = _end_of_turn(tokenizer, [str(token.content) for token in added.values()])
    special |= {number: turn for number, token in added.items() if turn and str(token.content) == turn}
    ends = {
        int(number): special[int(number)]
        for number in (tokenizer.eos_token_id, tokenizer.pad_token_id)
        if number in special
    }
    return ReplyReader(special, ends, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))


def _end_of_turn(tokenizer: Any, added: list[str]) -> str:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except (ValueError, TemplateError):
        return ""  # no template, or none for this: ROLL reports that when it renders a prompt
    return end_of_turn(str(rendered), added)
