"""The policy's tokenizer as environment files know it: transformers' own, wherever they name one of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(model: str) -> Any:
    """Of a model directory. `apply_chat_template` gives ids as it did before transformers 5, unless it is told otherwise; a name
    that is no directory here means this tokenizer."""
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained
    made = _with_plain_ids(load(model))

    def from_pretrained(name: Any, *args: Any, **keywords: Any) -> Any:
        return _with_plain_ids(load(name, *args, **keywords)) if Path(str(name)).is_dir() else made

    AutoTokenizer.from_pretrained = from_pretrained  # type: ignore[assignment, method-assign]
    return made


def _with_plain_ids(tokenizer: Any) -> Any:
    kind = type(tokenizer)

    class PlainIds(kind):  # type: ignore[misc, valid-type]
        def apply_chat_template(self, conversation: Any, *args: Any, **keywords: Any) -> Any:
            keywords.setdefault("return_dict", False)
            return super().apply_chat_template(conversation, *args, **keywords)

    PlainIds.__name__ = kind.__name__
    PlainIds.__qualname__ = kind.__qualname__
    tokenizer.__class__ = PlainIds
    return tokenizer
