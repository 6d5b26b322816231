"""Model directories for these tests: a tokenizer with real special tokens, and a chat template that knows tools."""

from __future__ import annotations

from pathlib import Path

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


def qwen_like(directory: Path, template: str = TOOLS + TURNS + CALLS) -> ChatTokenizer:
    """Qwen's special tokens; a template that keeps reasoning."""
    write("qwen", directory)
    (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)
