"""Model directories for these tests: a tokenizer with real special tokens, and a chat template that knows tools."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests.families import write

TOOLS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""
TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"""
CALLS = """{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


PLAIN = """{% for m in messages %}{{ 'Bot' if m.role == 'assistant' else m.role | capitalize }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}"""  # noqa: E501


def qwen_like(directory: Path, template: str = TOOLS + TURNS + CALLS) -> ChatTokenizer:
    """Qwen's special tokens; a template that keeps reasoning."""
    write("qwen", directory)
    (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)


def merging(directory: Path) -> ChatTokenizer:
    """No token frames a turn but the last: the words that begin one are text, and merge with what stands before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = [
        "END\nUser: the\nBot: a cat\nUser: no\n\nyes\nBot: 42\nUser: {\n",
        "}\nUser: naïve\nBot: <think>the</think>",
    ]
    tokenizer.train_from_iterator(text * 5, trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text(PLAIN)
    return ChatTokenizer(directory)
