"""Writes the tables of docs/agent-api.md from those in the code. Run from the project root: python tools/make_agent_api_tables.py

A table stands between `<!-- fields of NAME -->` and `<!-- end -->`; what is around them is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from atropos_agent_api.dialects import (
    chat,
    chat_messages,
    completions,
    message_blocks,
    messages,
    openai,
    response_items,
    responses,
    tools,
)
from atropos_agent_api.dialects.fields import Fields

PAGE = Path("docs/agent-api.md")
TABLES: Mapping[str, Fields] = {
    "/v1/chat/completions": chat.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
}
PARTS: Mapping[str, Mapping[str, Fields]] = {
    "/v1/chat/completions": {
        **{f"a message of `{role}`": fields for role, fields in chat_messages.OF_MESSAGES.items()},
        "`stream_options`": openai.STREAM_OPTIONS,
        "a function": tools.FUNCTION,
    },
    "/v1/responses": {
        **{f"an item `{kind}`": fields for kind, fields in response_items.ITEMS.items()},
        "`reasoning`": responses.REASONING,
        "`text`": responses.TEXT,
    },
    "/v1/messages": {
        **{f"a block `{kind}`": fields for kind, fields in message_blocks.BLOCKS.items()},
        "a tool": messages.TOOL,
        "`output_config`": messages.OUTPUT,
    },
}


def table(path: str) -> str:
    lines = ["| field | effect |", "|---|---|", *_rows(TABLES[path])]
    for name, fields in PARTS.get(path, {}).items():
        said = f"read: {_names(fields.read)}"
        said += f"; no effect on tokens: {_names(fields.no_effect)}" if fields.no_effect else ""
        said += f"; only {', '.join(_only(*one) for one in fields.only.items())}" if fields.only else ""
        lines.append(f"| {name} | {said} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """With every table as the code has it."""
    for path in TABLES:
        opening = f"<!-- fields of {path} -->\n"
        assert opening in text, f"{PAGE} has no table for {path}"
        text = re.sub(
            f"({re.escape(opening)}).*?(<!-- end -->)",
            lambda found, path=path: f"{found[1]}\n{table(path)}\n\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
    return text


def _rows(fields: Fields) -> Iterator[str]:
    yield from (f"| `{name}` | {why} |" for name, why in fields.read.items())
    yield from (f"| `{name}` | about sampling: overruled and recorded, or refused |" for name in fields.sampling)
    yield from (f"| `{name}` | taken, of no effect on tokens: {why} |" for name, why in fields.no_effect.items())
    yield from (f"| `{name}` | only {_values(taken)} |" for name, taken in fields.only.items())


def _only(name: str, taken: tuple[object, ...]) -> str:
    return f"`{name}` as {_values(taken)}"


def _values(taken: tuple[object, ...]) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    return " or ".join(f"`{words.get(repr(one), repr(one))}`".replace("'", '"') for one in taken)


def _names(names: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
