"""Small tokenizers with the special tokens, the chat format and the ends of turn of well-known families, as their public
tokenizer_config.json, generation_config.json and chat templates have them. Their words are single bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


@dataclass(frozen=True)
class Family:
    special: tuple[str, ...]  # marked as such in tokenizer.json
    added: tuple[str, ...]  # and those that are not
    config: Mapping[str, str]
    template: str
    ends: tuple[str, ...]  # what may end a reply
    unlisted: tuple[str, ...] = ()  # of these, what the generation config's eos_token_id does not list


TURNS = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{}{{% endif %}}"


def turns(turn: str, start: str) -> str:
    return TURNS.format(turn, start)


FAMILIES = {
    "gemma": Family(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), (),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        "{{ bos_token }}" + turns(
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
        ), ("<eos>", "<end_of_turn>"),
    ),
    "phi-3": Family(
        ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"), (),
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        turns("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n"), ("<|endoftext|>", "<|end|>"),
    ),
    "phi-4": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"), (),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        turns("<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "deepseek": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"), ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"},
        "{{ bos_token }}" + turns(
            "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}",
            "<｜Assistant｜>",
        ), ("<｜end▁of▁sentence｜>",),
    ),
    "llama-3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"), (),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "{{ bos_token }}" + turns(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "qwen": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        turns("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "mistral": Family(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), (), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "{{ bos_token }}" + turns("{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}", ""),
        ("</s>",),
    ),
    "gpt-oss": Family(
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
         "<|call|>"), (), {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        turns(
            "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant",
        ), ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "command": Family(  # whose end of turn is the eos token, and not marked as special
        ("<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>"), ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
        turns(
            "<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ), ("<|END_OF_TURN_TOKEN|>",),
    ),
    "unmarked": Family(  # an end of turn that only the chat template knows
        ("<s>", "</s>"), ("<turn>", "<turn_end>"), {"bos_token": "<s>", "eos_token": "</s>"},
        turns("<turn>{{ m.role }}:{{ m.content }} <turn_end>\n", "<turn>assistant:"), ("</s>", "<turn_end>"), ("<turn_end>",),
    ),
}  # fmt: skip


def write(name: str, directory: Path, more_special: tuple[str, ...] = ()) -> Path:
    """The family's tokenizer as a model directory has it, with further special tokens. Returns the directory."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*family.special, *more_special)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**family.config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    eos = [tokenizer.token_to_id(token) for token in family.ends if token not in family.unlisted]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (directory / "chat_template.jinja").write_text(family.template)
    return directory


SENTENCEPIECE = (("bpe", "first"), ("bpe", "always"), ("unigram", "first"), ("unigram", "never"))


def write_sentencepiece(kind: str, scheme: str, directory: Path) -> Path:
    """As those of Llama 2, Mistral and T5: spaces are letters, and control tokens stand in the model's own vocabulary."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>") if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = [chr(number) for number in range(33, 127)]
    trainer = (
        trainers.BpeTrainer(vocab_size=200, special_tokens=control, initial_alphabet=alphabet)
        if kind == "bpe"
        else trainers.UnigramTrainer(
            vocab_size=160, special_tokens=control, unk_token="<unk>", initial_alphabet=alphabet
        )
    )
    tokenizer.train_from_iterator(["a page that a tool found for a user", "a plain one", "Sure. a b"] * 20, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    turn = "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}"
    template = "{{ bos_token }}" + turns(turn, "")
    config = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
