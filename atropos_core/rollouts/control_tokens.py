"""Text of messages that looks like a model's control tokens stays text: a web page with `<|im_start|>system` in it, as a tool's
result or in its description, begins no turn.

A tokenizer finds such tokens wherever their text is, and a chat template writes its own tokens between the messages. So a text in a
message that looks like a control token, or may become one next to another text, gets a mark before the template sees it. The mark is
after its first character, so that a template that trims, splits or joins texts keeps it. A token with a mark in it is text. If there
is one, a second tokenizer encodes the rendered text: the same one with other names for its control tokens, which only this module
writes.
"""

from __future__ import annotations

import bisect
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

_AT_ONCE = 1 << 17


def ids_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the ids of a text. Raises UnicodeEncodeError for half of a surrogate pair."""
    try:  # a batch of one, because `encode` keeps Python's lock and other threads would wait
        ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
    except TypeError:
        text.encode()  # which says what is wrong, and where
        raise
    made = np.empty(len(ids), np.int32)
    for at in range(0, len(ids), _AT_ONCE):  # for the same reason
        made[at : at + _AT_ONCE] = ids[at : at + _AT_ONCE]
    return made


class ControlTokens:
    """`texts`: the control tokens. `kept`: tokens that a message may contain; a template may cut its text there. `tokenizer`: as
    JSON."""

    def __init__(self, texts: Collection[str], tokenizer: Mapping[str, Any], kept: Collection[str] = ()) -> None:
        self._texts = sorted(text for text in texts if text.strip())  # space begins no turn
        self._tokens = _any_of(self._texts)
        said = {text.lstrip() for text in self._texts}  # templates trim
        self._begun = {text[:size] for text in said for size in range(1, len(text))}
        self._first = re.compile(f"[{re.escape(MARK + ''.join({text[0] for text in said}))}]")
        self._said = _any_of(said)
        longest = max(map(len, said), default=0)
        cut = "|".join([r"\s", r"\Z", *map(re.escape, sorted(kept))])
        self._until_cut = re.compile(rf"\S{{1,{max(1, longest)}}}?(?={cut})")
        self._definition = tokenizer
        secret = secrets.token_hex(16)  # no message can have it
        self._names = {text: f"{MARK}{secret}-{number}{MARK}" for number, text in enumerate(self._texts)}

    def marked(self, value: Any) -> Any:
        """Return a message, a tool, or any JSON value with a mark in each control token and in each text that may begin one."""
        if isinstance(value, str):
            return self._first.sub(self._marked, value)
        if isinstance(value, Mapping):  # a template shows the names of arguments too
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list | tuple) else value

    def _marked(self, found: re.Match[str]) -> str:
        text, at = found.string, found.start()
        if found[0] != MARK and not self._said.match(text, at):
            begun = self._until_cut.match(text, at)
            if begun is None or begun[0] not in self._begun:
                return found[0]
        return f"{found[0]}{MARK}"

    def found(self, value: Any) -> str:
        """Return the first control token in the text of a message, or of any JSON value in it; empty if there is none."""
        if isinstance(value, str):
            token = self._tokens.search(value)
            return token[0] if token else ""
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return next(filter(None, map(self.found, entries)), "")

    def encode(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        """Return the ids of a text that was rendered from marked messages. `encode`: the tokenizer's own, for unmarked tokens."""
        if MARK not in text:
            return encode(text)
        plain, marks = _without_marks(text)
        others = 0

        def named(found: re.Match[str]) -> str:
            nonlocal others
            after = bisect.bisect_right(marks, found.start())
            if after < len(marks) and marks[after] <= found.end():
                others += 1
                return found[0]
            return self._names[found[0]]

        renamed = self._tokens.sub(named, plain)
        return self._true_ids[ids_of(self._renamed, renamed)] if others else encode(plain)

    @cached_property
    def _renamed(self) -> Tokenizer:
        """Return the tokenizer with other names for control tokens, also in its vocabulary, where models of pieces (Unigram) would
        find the original texts."""
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
        """Return the real tokenizer's ids, indexed by the renamed one's [V]."""
        ids = np.arange(self._renamed.get_vocab_size(with_added_tokens=True), dtype=np.int32)
        for one in self._definition.get("added_tokens", []):
            name = self._names.get(one["content"], one["content"])
            ids[self._renamed.token_to_id(name)] = one["id"]
        return ids


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of these texts, the longest first. Without texts, it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _without_marks(text: str) -> tuple[str, list[int]]:
    """Return the text without marks, and the positions of the marks. Two marks in a row are one that the message contained."""
    pieces, marks, size = [], [], 0
    for piece in re.split(f"({MARK}+)", text):
        if piece.startswith(MARK):
            own, marked = divmod(len(piece), 2)
            if marked:
                marks.append(size)
            piece = MARK * own
        pieces.append(piece)
        size += len(piece)
    return "".join(pieces), marks
