"""Read facts about a model from the files of its directory, without importing transformers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError
from atropos_core.storage.reading import base_of_adapter, json_object
from atropos_torch_models.stop_ids import stop_ids

_FLOATS = {"F64", "F32", "F16", "BF16"}
_STATES = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "zamba2", "jamba", "nemotron_h", "kimi_linear"}


def read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises ConfigError if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine 'vllm' cannot read a model from {directory}: {error}") from error
    return config


def adapter_config(directory: Path) -> dict[str, Any] | None:
    """Return the contents of a peft adapter's adapter_config.json, or None for the directory of a whole model.

    Raises ConfigError if the adapter's base model is not on this machine, or the file gives no rank."""
    path = directory / "adapter_config.json"
    if (directory / "config.json").is_file() or not path.is_file():
        return None
    base = base_of_adapter(directory)
    config = json_object(path)
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"the base model {base} of the adapter {directory} is not a model directory.",
            remedy="Put the base model there, or write its path into adapter_config.json.",
        )
    if not isinstance(config.get("r"), int):
        raise ConfigError(
            f"{path} does not give the adapter's rank: r is {config.get('r')!r:.100}.", remedy="Save the adapter again."
        )
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of the config."""
    return {**config, **(config.get("text_config") or {})}


def keeps_state(config: dict[str, Any]) -> bool:
    """True if some layers keep a state instead of keys and values: Mamba, gated delta rules, short convolutions."""
    text = text_config(config)
    kinds = {str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()}
    return text.get("model_type") in _STATES or bool(kinds & {"linear_attention", "mamba", "mamba2", "conv", "hybrid"})


def ends_of(directory: Path, config: dict[str, Any]) -> list[int]:
    """Return the sorted ids of the tokens that end a reply of the model in `directory`."""
    generation = directory / "generation_config.json"
    source = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else text_config(config)
    return sorted(stop_ids(directory, source.get("eos_token_id")))


def parameters(directory: Path, config: dict[str, Any]) -> int | None:
    """Count the parameters from the headers of the weight files; tied ones count once.

    Returns None if the headers do not tell: other formats, quantized weights."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():  # other files in the directory may repeat the same weights
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [directory / name for name in sorted(named)]
    else:
        files = [path for path in (directory / "model.safetensors",) if path.is_file()]
    tied = text_config(config).get("tie_word_embeddings", False)
    total = 0
    for file in files:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue  # a buffer; the embedding once more
            if tensor["dtype"] not in _FLOATS:
                return None
            total += math.prod(tensor["shape"])
    return total if files else None


def dtype(config: dict[str, Any], wanted: str, on_cpu: bool) -> str:
    """Return the precision to run in. "auto" is resolved here, because vLLM's own "auto" turns float32 into bfloat16."""
    if wanted != "auto":
        return wanted
    given = text_config(config).get("dtype") or config.get("torch_dtype") or "float32"
    return "float32" if on_cpu else str(given).removeprefix("torch.")
