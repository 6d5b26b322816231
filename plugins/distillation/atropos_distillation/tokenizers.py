"""Check that a teacher's tokenizer has the same vocabulary as the policy's: the same ids for the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atropos_core.errors import TokenizerMismatch
from atropos_core.rollouts.tokenizer import ChatTokenizer, fingerprint


def refuse_another(teacher: Path, policy: Path, label: str) -> None:
    """Raise TokenizerMismatch, which names the difference, unless both have the same vocabulary, special tokens and chat
    template."""
    theirs, ours = fingerprint(teacher), fingerprint(policy)
    if theirs != ours:
        raise TokenizerMismatch(
            f"{label}: the teacher's tokenizer ({theirs}, {teacher}) is not the policy's ({ours}): {difference(teacher, policy)}.",
            remedy="Distillation compares token by token: take a teacher of the policy's own family.",
        )


def difference(teacher: Path, policy: Path) -> str:
    """Describe the first difference."""
    theirs, ours = ChatTokenizer(teacher), ChatTokenizer(policy)
    if theirs.vocabulary != ours.vocabulary:
        return f"it has {theirs.vocabulary:,} tokens, the policy's {ours.vocabulary:,}"
    here, there = _vocabulary(policy), _vocabulary(teacher)
    for token, number in sorted(here.items(), key=lambda item: item[1]):
        if there.get(token) != number:
            return f"token {token!r} is {number} of the policy's and {there.get(token, 'none')} of the teacher's"
    if theirs.eos != ours.eos:
        return f"a reply of its ends in {theirs.eos!r}, the policy's in {ours.eos!r}"
    if theirs.special != ours.special:
        return f"its special tokens are {theirs.special}, the policy's {ours.special}"
    if theirs.template != ours.template:
        return "its chat template is another"
    return "it divides text in another way (merges, normalisation or added tokens in tokenizer.json)"


def _vocabulary(directory: Path) -> dict[str, int]:
    saved: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = saved["model"].get("vocab", {})
    ids = model if isinstance(model, dict) else {entry[0]: number for number, entry in enumerate(model)}
    return ids | {entry["content"]: entry["id"] for entry in saved.get("added_tokens", ())}
