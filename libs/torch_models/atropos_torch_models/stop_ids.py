"""The tokens that end a continuation, the same for every engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def stop_ids(directory: Path, eos: int | Iterable[int] | None) -> set[int]:
    """Return `eos`, from the generation config or else the model's config, together with the tokenizer's own eos token."""
    from tokenizers import Tokenizer

    found = {eos} if isinstance(eos, int) else set(eos or ())
    settings = directory / "tokenizer_config.json"
    if settings.is_file() and (directory / "tokenizer.json").is_file():
        named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
        text = named["content"] if isinstance(named, dict) else named
        number = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(text) if text else None
        if number is not None:
            found.add(number)
    return found
