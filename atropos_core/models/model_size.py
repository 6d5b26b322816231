"""The size of a model, read from config.json and the headers of its safetensors, if they are there. Nothing is loaded."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
PARAMETERS_A_THREAD = 4_000_000
LLAMA_LIKE = {  # model_type -> (queries, keys and values have biases; queries and keys are normalised)
    "llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True), "smollm3": (False, False),
}  # fmt: skip
_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_EXPERTS = re.compile(_EXPERT.pattern + r"|\.(gate|router)\.weight$")
_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class ModelSize:
    """A decoder of the usual shape. `tensors` are those that are stored, so without a tied head."""

    tensors: Mapping[str, tuple[int, ...]]
    stored_bytes: int
    dtype: str  # that config.json names, or of the files
    layers: int
    hidden: int
    intermediate: int  # of the experts that one token uses, if there are several
    query_width: int  # of all heads together
    key_width: int
    vocabulary: int
    tied: bool
    longest: int  # positions
    norms_heads: bool  # queries and keys are normalised

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    def quantized_bytes(self, kind: str, element: int) -> int:
        """Return the bytes of its weights, with linear layers in 4 bits (nf4: half a byte, and a float32 scale for each 64) or 8 bits
        (int8: a byte, and a scale for each output), and the others with `element` bytes each."""
        shapes = self.linear().values()
        linear = sum(out * into for out, into in shapes)
        held = int(linear * (1 / 2 + 4 / 64)) if kind == "nf4" else linear + 4 * sum(out for out, _ in shapes)
        return (self.parameters - linear) * element + held

    def linear(self) -> dict[str, tuple[int, int]]:
        """Return the matrices of linear layers, so without embedding, head, experts and their routers: name, outputs, inputs."""
        return {name: shape for name, shape in self._matrices().items() if not _OF_EXPERTS.search(name)}

    def experts(self) -> dict[str, tuple[int, int]]:
        """Return the matrices of each expert, which are stored one by one: name, outputs, inputs. A model computes with all of a layer
        as one tensor."""
        return {name: shape for name, shape in self._matrices().items() if _EXPERT.search(name)}

    def _matrices(self) -> dict[str, tuple[int, int]]:
        apart = ("embed", "lm_head", "wte", "wpe")
        return {
            name: (shape[0], shape[1])
            for name, shape in self.tensors.items()
            if len(shape) == 2 and not any(word in name for word in apart)
        }


def described(directory: Path) -> str:
    """Return the model's name, and its size if known, for a line that says what is loaded."""
    cached = directory.parent.parent.name  # of the hub's: models--OWNER--NAME/snapshots/COMMIT
    name = cached.removeprefix("models--").replace("--", "/") if cached.startswith("models--") else directory.name
    if (size := read(directory)) is None:
        return name
    return f"{name} ({size.parameters:,} parameters, {size.stored_bytes / 1e6:,.1f} MB)"


def cpu_threads(directory: Path) -> int:
    """Return how many CPU threads a model can use: one for every 4 million parameters or part of them, at most one per core. In a small
    model, an operation takes less time than its threads take to meet (`python -m benchmarks.threads`)."""
    cores = len(os.sched_getaffinity(0))
    size = read(directory)
    return cores if size is None else max(1, min(cores, math.ceil(size.parameters / PARAMETERS_A_THREAD)))


def read(directory: Path) -> ModelSize | None:
    """Return the size, or None if this is not a Hugging Face model, or its shape is unclear: without safetensors, config.json says
    it only for architectures of LLAMA_LIKE."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        tensors, stored, dtypes = _headers(directory)
        if not tensors:  # not fetched yet, or in another format
            tensors = _usual_tensors(config)
            stored = sum(map(math.prod, tensors.values())) * BYTES.get(
                str(config.get("dtype") or config.get("torch_dtype")), 2
            )
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        width = int(config.get("head_dim") or hidden // heads)
        per_token = int(config.get("num_experts_per_tok") or 0)
        intermediate = int(config["intermediate_size"])
        if per_token and "moe_intermediate_size" in config:
            intermediate = per_token * int(config["moe_intermediate_size"])
        return ModelSize(
            tensors=tensors,
            stored_bytes=stored,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or ("float32" if dtypes == {"F32"} else "bfloat16")),
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=intermediate,
            query_width=heads * width,
            key_width=int(config.get("num_key_value_heads") or heads) * width,
            vocabulary=int(config["vocab_size"]),
            tied=not any("lm_head" in name for name in tensors),
            longest=int(config.get("max_position_embeddings") or 1 << 20),
            norms_heads=any(name.endswith("q_norm.weight") for name in tensors),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def context_tokens(directory: Path) -> int:
    """Return the context length, prompt and reply together, from the model directory; 0 if unknown."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return int(
            config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings") or 0
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return 0  # an engine says what is wrong with it


def _headers(directory: Path) -> tuple[dict[str, tuple[int, ...]], int, set[str]]:
    """Return names and shapes, total bytes, and dtypes of all tensors."""
    tensors: dict[str, tuple[int, ...]] = {}
    stored, dtypes = 0, set()
    for path in sorted(directory.glob("*.safetensors")):
        found = path.stat()
        for name, shape, dtype in _header(path, found.st_size, found.st_mtime_ns):
            tensors[name] = shape
            stored += math.prod(shape) * _STORED.get(dtype, 4)
            dtypes.add(dtype)
    return tensors, stored, dtypes


def _usual_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes by config.json only, for architectures of LLAMA_LIKE. Raises KeyError for others."""
    biases, norms = LLAMA_LIKE[config["model_type"]]
    hidden, wide = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    query, key = heads * width, int(config.get("num_key_value_heads") or heads) * width
    outputs = {"q_proj": query, "k_proj": key, "v_proj": key}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": (out, hidden) for name, out in outputs.items()}
    if biases or config.get("attention_bias"):
        layer |= {f"self_attn.{name}.bias": (out,) for name, out in outputs.items()}
    if norms:
        layer |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    layer |= {"self_attn.o_proj.weight": (hidden, query), "mlp.down_proj.weight": (hidden, wide)}
    layer |= {f"mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    table = (int(config["vocab_size"]), hidden)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = table
    for number in range(int(config["num_hidden_layers"])):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


@lru_cache(maxsize=256)
def _header(path: Path, size_bytes: int, modified_ns: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return name, shape and dtype of each tensor of a file with this size and time, cached because `atropos plan` asks a hundred times.
    A header is a length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size_bytes:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return tuple((name, tuple(one["shape"]), one["dtype"]) for name, one in header.items() if name != "__metadata__")
