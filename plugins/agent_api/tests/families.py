"""A tokenizer for each renderer: a real byte-level BPE with merges, and the special tokens that the renderer looks for."""

from __future__ import annotations

import json
from pathlib import Path

from renderers import config_from_name, create_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from atropos_core.rollouts.tokenizer import ChatTokenizer

MORE = {  # that renderers look for in texts
    "llama-3": ("<|python_tag|>",),
    "deepseek-v4": ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
}
EOS = {"llama-3": "<|eot_id|>"}
TEXT = [
    "I look it up: the weather in Oslo is wet, and the city is small. " * 3,
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "user\nassistant\n\n",
]


class Recorder:
    """A tokenizer that has every token."""

    name_or_path = "recorder"
    chat_template = ""
    unk_token_id = None
    eos_token_id = 0

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self.tokens.setdefault(tokens, len(self.tokens) + 1)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def encode(self, text, **options):
        return [self.convert_tokens_to_ids(text)] if text[:1] in "<｜" else [ord(letter) + 100_000 for letter in text]

    def decode(self, ids, **options):
        return ""


def special_tokens(name: str) -> list[str]:
    recorder = Recorder()
    create_renderer(recorder, config_from_name(name))
    known = [token for token in recorder.tokens if "\n" not in token and not token.startswith("<|im_start|>assistant")]
    return [*known, *(token for token in MORE.get(name, ()) if token not in recorder.tokens)]


def write(name: str, directory: Path, template: str | None = None) -> ChatTokenizer:
    """The family's tokenizer as a model directory has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    special = special_tokens(name)
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<|"), normalized=False) for token in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = EOS.get(
        name,
        next((token for token in special if "im_end" in token or "eos" in token or "endoftext" in token), special[0]),
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)
