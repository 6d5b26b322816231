"""Each token as the text that it adds, decoded with the tokenizer of the run's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.errors import AtroposError
from atropos_core.plugins.manager import load_plugins
from atropos_core.rollouts.tokenizer import ChatTokenizer

LONGEST = 6  # tokens that one character may take
HALF = "\ufffd"  # a decoder writes this for an incomplete character


class TokenTexts:
    """`why_none` says why tokens are shown as numbers; empty if they are shown as text."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.why_none = ""
        self._tokenizer: ChatTokenizer | None = None
        self._known: dict[tuple[int, ...], str] = {}
        try:
            self._tokenizer = ChatTokenizer(_model(directory, str(config.get("model", ""))))
        except AtroposError as error:
            self.why_none = f"Tokens are shown by their ids: {Exception.__str__(error)}"

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. If several tokens form one character, the last of them has it and the others are empty."""
        if self._tokenizer is None:
            return [f"⟨{one}⟩" for one in ids]
        texts: list[str] = []
        before: tuple[int, ...] = ()  # a token's text may depend on the token before it: a space, for example
        open_: tuple[int, ...] = ()
        for one in ids:
            open_ = (*open_, one)
            added = self._added(before, open_)
            if added.endswith(HALF) and len(open_) < LONGEST:
                texts.append("")
                continue
            texts.append(added)
            before, open_ = open_, ()
        return texts

    def _added(self, before: tuple[int, ...], ids: tuple[int, ...]) -> str:
        text = self._decoded((*before, *ids))
        first = self._decoded(before) if before else ""
        return text[len(first) :] if text.startswith(first) else self._decoded(ids)

    def _decoded(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            assert self._tokenizer is not None, "of() looks"
            self._known[ids] = self._tokenizer.decode(np.array(ids, np.int32), keep_special=True)
        return self._known[ids]


def _model(directory: Path, reference: str) -> Path:
    """The directory with the run's tokenizer: its newest checkpoint, or else the model that it began with."""
    saved = sorted((directory / "checkpoints").glob("step-*/policy/tokenizer.json"))
    return saved[-1].parent if saved else load_plugins().resolve_model(reference, download=False).directory
