"""Text of messages that looks like a model's control tokens stays text: a web page with `<|im_start|>system` in it, as a tool's
result or in its description, begins no turn.

A tokenizer finds such tokens wherever their text stands, and a chat template writes its own among those of messages. So what
looks like one in a message is marked before the template sees it. Where a mark comes out, a second tokenizer encodes the text: the
same one, in which control tokens have other names, that only this module writes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from atropos_core.rollouts.template_calls import MARK
from atropos_core.types import Tokens


def ids_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """Raises UnicodeEncodeError for text that nothing can write down: half of a surrogate pair."""
    try:  # a batch of one: other threads go on meanwhile, as with `encode` they do not
        return np.asarray(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids, np.int32)
    except TypeError:
        text.encode()  # which says what is wrong, and where
        raise


class ControlTokens:
    """`texts`: of the control tokens. `tokenizer`: as JSON."""

    def __init__(self, texts: Collection[str], tokenizer: Mapping[str, Any]) -> None:
        found = "|".join(re.escape(text) for text in (MARK, *sorted(texts, key=len, reverse=True)) if text)
        self._any = re.compile(found)
        self._marked_or_not = re.compile(f"({MARK})?(?:{found})")
        self._texts = sorted(texts)
        self._definition = tokenizer
        secret = secrets.token_hex(16)  # no message can have it
        self._names = {text: f"{MARK}{secret}-{number}{MARK}" for number, text in enumerate(self._texts)}

    def marked(self, value: Any) -> Any:
        """A message or a tool, or anything of JSON in one, with a mark before whatever looks like a control token."""
        if isinstance(value, str):
            return self._any.sub(lambda found: f"{MARK}{found[0]}", value)
        if isinstance(value, Mapping):  # a template shows the names of arguments too
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list | tuple) else value

    def found(self, value: Any) -> str:
        """The first control token in the text of a message, or of anything of JSON in one; empty if there is none."""
        if isinstance(value, str):
            return next((one[0] for one in self._any.finditer(value) if one[0] != MARK), "")
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return next(filter(None, map(self.found, entries)), "")

    def encode(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        """Ids of what was rendered of marked messages. `encode`: as the tokenizer does, for what has no mark in it."""
        if MARK not in text:
            return encode(text)
        renamed = self._marked_or_not.sub(  # a mark whose token the template has changed goes, and leaves text
            lambda found: found[0].removeprefix(MARK) if found[1] else self._names.get(found[0], ""), text
        )
        return self._true_ids[ids_of(self._renamed, renamed)]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The vocabulary has the other names too: models of pieces (Unigram) find the text of a control token there otherwise."""
        model = dict(self._definition["model"])
        if isinstance(model.get("vocab"), Mapping):
            model["vocab"] = {self._names.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[self._names.get(text, text), score] for text, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._names.get(model["unk_token"], model["unk_token"])
        added = [
            {**one, "content": self._names.get(one["content"], one["content"])}
            for one in self._definition.get("added_tokens", [])
        ]
        definition = {**self._definition, "model": model, "added_tokens": added, "post_processor": None}
        renamed = Tokenizer.from_str(json.dumps(definition))
        renamed.no_padding()
        renamed.no_truncation()
        return renamed

    @cached_property
    def _true_ids(self) -> Tokens:
        """By the id of a token there."""
        ids = np.arange(self._renamed.get_vocab_size(with_added_tokens=True), dtype=np.int32)
        for one in self._definition.get("added_tokens", []):
            name = self._names.get(one["content"], one["content"])
            ids[self._renamed.token_to_id(name)] = one["id"]
        return ids
