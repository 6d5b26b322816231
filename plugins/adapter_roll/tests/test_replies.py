"""What an environment reads of a reply inside ROLL, by tokenizers of transformers."""

from __future__ import annotations

import pytest

from atropos_adapter_roll.replies import reader_of
from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests.families import FAMILIES, write

transformers = pytest.importorskip("transformers", reason="ROLL's tokenizers are transformers'")

ENDS = [(name, end) for name, family in FAMILIES.items() for end in family.ends]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {name: write(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
    return {
        name: (transformers.AutoTokenizer.from_pretrained(directory), ChatTokenizer(directory))
        for name, directory in made.items()
    }


@pytest.mark.parametrize(("name", "end"), ENDS)
def test_in_roll_a_reply_is_read_as_in_a_run_of_our_own(tokenizers, name, end):
    theirs, ours = tokenizers[name]
    ids = theirs(f"14{end}{theirs.pad_token or end}", add_special_tokens=False)["input_ids"]
    assert ids == ours.encode(f"14{end}{theirs.pad_token or end}").tolist(), "one tokenizer, read by two libraries"
    assert reader_of(theirs).text(ids) == "14"
    for reply in (f"1 4{end}", f"{FAMILIES[name].special[0]}14 \n{end}", "</S> a<|b|>", f"<think>hm</think>1{end}4"):
        ids = theirs(reply, add_special_tokens=False)["input_ids"]
        assert reader_of(theirs).text(ids) == ours.decode(ours.encode(reply))


def test_in_roll_a_reply_in_channels_is_read_as_an_answer(tokenizers):
    theirs, _ = tokenizers["gpt-oss"]
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>14<|return|>"
    assert reader_of(theirs).text(theirs(reply, add_special_tokens=False)["input_ids"]) == "<think>Hm.</think>14"


def test_a_tokenizer_without_a_chat_template_has_its_special_tokens(tokenizers, tmp_path):
    directory = write("gemma", tmp_path)
    (directory / "chat_template.jinja").unlink()
    bare = transformers.AutoTokenizer.from_pretrained(directory)
    assert reader_of(bare).text(bare("14<end_of_turn><eos>", add_special_tokens=False)["input_ids"]) == "14"
