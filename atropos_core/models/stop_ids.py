"""Which tokens end a continuation, for every engine alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def stop_ids(directory: Path, eos: int | Iterable[int] | None) -> set[int]:
    """`eos`, as the generation config says it (the model's, where there is none), and the tokenizer's own eos token."""
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
