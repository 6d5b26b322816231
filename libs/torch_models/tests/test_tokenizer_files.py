"""A saved model has every file of the tokenizer of the model that it was trained from, and no weights of it."""

from __future__ import annotations

from pathlib import Path

from atropos_torch_models import tokenizer_files

OF_A_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "spiece.model",
)


def test_a_tokenizer_is_copied_whole_and_nothing_else(tmp_path: Path):
    origin, saved = tmp_path / "origin", tmp_path / "saved"
    (origin / "additional_chat_templates").mkdir(parents=True)
    (origin / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    saved.mkdir()
    for name in (*OF_A_TOKENIZER, "config.json", "model.safetensors"):
        (origin / name).write_text(name)
    tokenizer_files.copy(origin, saved)
    assert {path.name for path in saved.iterdir()} == {*OF_A_TOKENIZER, "additional_chat_templates"}
    assert (saved / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
