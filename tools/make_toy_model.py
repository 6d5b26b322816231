"""Makes the toy model's tokenizer: one id a printable ASCII character, and two marks. Run from the project root."""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path("atropos_core/builtin/toy_model")
MARKS = ["<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

letters = list(string.digits + string.ascii_letters + string.punctuation + " \n")
vocabulary = {text: number for number, text in enumerate(MARKS + letters)}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(MARKS)
tokenizer.save(str(HERE / "tokenizer.json"))
(HERE / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|end|>", "pad_token": "<|end|>"}, indent=1) + "\n"
)
(HERE / "chat_template.jinja").write_text(TEMPLATE)
