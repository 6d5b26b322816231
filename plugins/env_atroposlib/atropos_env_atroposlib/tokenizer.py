"""The policy's tokenizer as environment files know it: transformers' own, wherever they name one of the hub."""

from __future__ import annotations

from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self


def load_tokenizer(model: str, today: str = "") -> Any:
    """The tokenizer of a model directory. `apply_chat_template` gives ids as before transformers 5, unless it is told otherwise. A name
    that is not a directory here means this tokenizer. `today`: the date that chat templates get when they ask for it, as 2026-01-31."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    if today:

        class Fixed(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Self:
                return cls.fromisoformat(today).replace(tzinfo=tz)

        chat_template_utils.datetime = Fixed  # type: ignore[attr-defined]

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
