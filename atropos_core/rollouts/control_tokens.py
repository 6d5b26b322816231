"""Text of messages that looks like a model's control tokens stays text: a web page with `<|im_start|>system` in it, as a tool's
result, begins no turn.

A tokenizer finds such tokens wherever their text stands, and a chat template writes its own among those of messages. So what
looks like one in a message is marked before the template sees it, and encoded as plain text where the mark comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from atropos_core.types import Tokens

MARK = "\uf8f7"  # for private use; where a message has it, it is marked as well


class ControlTokens:
    """`texts`: of the control tokens. `tokenizer`: as JSON."""

    def __init__(self, texts: Collection[str], tokenizer: Mapping[str, Any]) -> None:
        found = "|".join(re.escape(text) for text in (MARK, *sorted(texts, key=len, reverse=True)) if text)
        self._any = re.compile(found)
        self._marked_or_not = re.compile(f"({MARK})?(?:{found})")
        self._texts = frozenset(texts)
        self._definition = tokenizer
        self._plain: Tokenizer | None = None

    def marked(self, value: Any) -> Any:
        """A message, or anything of JSON in one, with a mark before whatever looks like a control token."""
        if isinstance(value, str):
            return self._any.sub(lambda found: f"{MARK}{found[0]}", value)
        if isinstance(value, Mapping):
            return {key: self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        """Ids of what was rendered of marked messages. `encode`: as the tokenizer does. What has no mark in it is encoded whole;
        else between the template's control tokens, as every tokenizer divides it."""
        if MARK not in text:
            return encode(text)
        return np.concatenate([np.zeros(0, np.int32), *self._pieces(text, encode)])

    def _pieces(self, text: str, encode: Callable[[str], Tokens]) -> Iterator[Tokens]:
        begin, plain = 0, ""  # `plain`: from the last control token on, marks left out
        has_mark = False
        for found in self._marked_or_not.finditer(text):
            if found[1]:
                plain += text[begin : found.start()] + found[0].removeprefix(MARK)
                has_mark = True
            else:
                plain += text[begin : found.start()]
                yield self._encode_plain(plain) if has_mark else encode(plain)
                yield encode(found[0])
                plain, has_mark = "", False
            begin = found.end()
        yield self._encode_plain(plain + text[begin:]) if has_mark else encode(plain + text[begin:])

    def _encode_plain(self, text: str) -> Tokens:
        if self._plain is None:
            added = self._definition.get("added_tokens", [])
            all_special = [{**one, "special": one["special"] or one["content"] in self._texts} for one in added]
            self._plain = Tokenizer.from_str(json.dumps({**self._definition, "added_tokens": all_special}))
            self._plain.no_padding()
            self._plain.no_truncation()
            self._plain.encode_special_tokens = True  # as text
        return np.asarray(self._plain.encode(text, add_special_tokens=False).ids, np.int32)
