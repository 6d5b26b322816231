"""The tokens that end a reply, from the files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def stop_ids(model: Path) -> list[int]:
    """Return the ids of the generation config, or else of the model's config, together with the tokenizer's own eos token."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _read(model / name).get("eos_token_id")
        if eos is not None:
            found = {eos} if isinstance(eos, int) else set(eos)
            break
    named = _read(model / "tokenizer_config.json").get("eos_token")
    text = named["content"] if isinstance(named, dict) else named
    if text and (model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        number = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(text)
        found |= {number} if number is not None else set()
    return sorted(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read
    except OSError:
        return {}
