"""The ids that may complete a stop text: whatever text is encoded, the token that completes one is among them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests import families

STOPS = ["=", "\n", "\n\n", "Observation:", "<end_code>", "é!", "」", " ", "ab", "</s"]
WORDS = [
    "a",
    "b",
    "ab",
    " ",
    "\n",
    "=",
    ":",
    "Observation",
    "Obs",
    "ervation:",
    "<end",
    "_code>",
    "é",
    "!",
    "「x」",
    "</s",
    ">",
]


def completing(tokenizer: ChatTokenizer, ids: list[int], stop: str) -> int:
    for size in range(1, len(ids) + 1):
        if stop in tokenizer._decode(ids[:size]):
            return ids[size - 1]
    raise AssertionError(f"{stop!r} is in the text and not in its ids")


def check(tokenizer: ChatTokenizer) -> int:
    """How often a stop text was completed."""
    draw = random.Random(0)
    completed = 0
    for stop in STOPS:
        ids = set(tokenizer.completing_ids([stop]))
        assert len(ids) < tokenizer.vocabulary
        for _ in range(40):
            text = "".join(draw.choices(WORDS, k=6)) + stop + draw.choice(WORDS)
            encoded = tokenizer.encode(text).tolist()
            if stop in tokenizer._decode(encoded):  # some tokenizers change spaces
                assert completing(tokenizer, encoded, stop) in ids, (stop, text)
                completed += 1
    return completed


@pytest.mark.parametrize("name", families.FAMILIES)
def test_of_families(name: str, tmp_path: Path) -> None:
    assert check(ChatTokenizer(families.write(name, tmp_path))) > 300


@pytest.mark.parametrize(("kind", "scheme"), families.SENTENCEPIECE)
def test_where_spaces_are_letters(kind: str, scheme: str, tmp_path: Path) -> None:
    assert check(ChatTokenizer(families.write_sentencepiece(kind, scheme, tmp_path))) > 100, "it has no newlines, no é"


def test_a_very_long_stop_text_takes_no_longer_than_its_end(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(families.write("llama-3", tmp_path))
    assert tokenizer.completing_ids(["x" * 1_000_000 + "="]) == tokenizer.completing_ids(["x="])


def test_what_ends_a_reply_by_itself_is_none_of_them(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(families.write("llama-3", tmp_path))
    assert tokenizer.completing_ids(["<|eot_id|>"]), "the text of it is some other tokens"
    end = int(tokenizer.encode(tokenizer.eos)[0])
    assert end not in tokenizer.completing_ids(["<|eot_id|>", tokenizer.eos])
