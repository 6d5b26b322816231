"""The directory made of the GGUF file has the file's own weights, tokens and template."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atropos_core.rollouts.tokenizer import ChatTokenizer

TEXTS = (
    "There are 220 castles in Scotland.  40 percent of them are ruins.\n#### 132",
    "<|im_start|>user\nWhat is 12,345.67 - 8?<|im_end|>\n<|im_start|>assistant\n",
    "\tdef f(x1):\n        return x1  ** 2  # ½ Ⅷ １２, don't",
)


def test_the_weights_are_those_that_gguf_dequantizes(gguf_file: Path, model: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": 9, "attn_k": 3}
    seen = 0
    with safe_open(model / "model.safetensors", "np") as ours:
        for tensor in GGUFReader(gguf_file).tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            name = names.get(tensor.name)
            if name is None:
                _, layer, part, _ = tensor.name.split(".")
                name = f"model.layers.{layer}.{parts[part]}.weight"
                if part in heads:  # llama.cpp turns pairs of neighbours, transformers the halves of a head
                    rows, columns = values.shape
                    pairs = values.reshape(heads[part], rows // heads[part] // 2, 2, columns)
                    values = pairs.swapaxes(1, 2).reshape(rows, columns)
            assert np.array_equal(ours.get_tensor(name), values), name
            seen += 1
        assert seen == len(list(ours.keys())) == 272


def test_text_is_encoded_as_the_file_declares(model: Path) -> None:
    """Its pre-tokenizer is `smollm`: llama.cpp splits off each digit, then splits as GPT-2 does."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    tokenizer = ChatTokenizer(model)
    reference = Tokenizer.from_file(str(model / "tokenizer.json"))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        ids = list(tokenizer.encode(text))
        assert ids == reference.encode(text).ids
        assert reference.decode(ids, skip_special_tokens=False) == text
    assert "ĠĠ" in reference.encode(TEXTS[0]).tokens, "only transformers joins a space to the number here"
