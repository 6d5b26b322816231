"""Convert a GGUF file to a model directory. This is the program of a child process: `python -m ... FILE DIRECTORY`.

transformers loads the file and dequantizes its tensors by the package `gguf`. The model is saved in float32, which holds what was
dequantized exactly; bfloat16 would round it (README.md of this library has the figures). Its config.json names bfloat16, which is
what a GPU should compute in, unless the file itself is float32.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError
from atropos_core.processes.child_main import end_with_parent
from atropos_torch_models.gguf_header import Header, Unreadable, read_header

FETCH_AGAIN = "Fetch the file again, and compare its size or hash with the original's."
OTHER_MODEL = "Use a model of another architecture, or the directory of the original model (safetensors)."
GPT2 = (
    "gpt-2",
    "gpt2",
    "mpt",
    "olmo",
    "jais",
)  # these pre-tokenizers split as GPT-2 does, which is what transformers takes
DIGITS = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)  # each digit is split off first
# Errors of transformers for a file that it cannot load (NotImplementedError is a RuntimeError).
LOADING_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)
ROPE = "rope_freqs.weight"
LLAMA3_FACTORS = (8.0, 32.0, 16.0)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert(file: Path, directory: Path) -> dict[str, Any]:
    """Fill `directory`, and return its types, and a warning if there is one. Raises ConfigError."""
    header, kinds = checked_header(file)
    elements = sum(tensor.elements for tensor in header.tensors)
    free = shutil.disk_usage(directory).free
    if 4 * elements > free:
        raise ConfigError(
            f"{file} needs {4 * elements / 1e9:,.1f} GB as a model directory, and the disk of {directory.parent} has {free / 1e9:,.1f}.",
            remedy="Free some of that disk, or name a folder on another one in XDG_CACHE_HOME.",
        )
    model = _load_model(file, header)
    tokenizer, warning = _load_tokenizer(file, header)
    _save_tokenizer(tokenizer, directory, header.metadata["tokenizer.ggml.tokens"])
    _save_model(model, directory, "float32" if set(kinds) == {"F32"} else "bfloat16")
    return {"from": ", ".join(kinds), "to": "float32", "warning": warning}


def checked_header(file: Path) -> tuple[Header, list[str]]:
    """Return the header, and the names of the types of its matrices. Raises ConfigError for a file that cannot be converted."""
    try:
        header = read_header(file)
    except Unreadable as error:
        raise ConfigError(f"{file} is not a GGUF file that can be read: {error}.", remedy=FETCH_AGAIN) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", remedy="See who may read it.") from error
    metadata = header.metadata
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 1)
    if "general.architecture" not in metadata:
        raise ConfigError(f"{file} does not name its architecture (general.architecture).", remedy=FETCH_AGAIN)
    if kind != "model":
        raise ConfigError(
            f"{file} is not a model: its general.type is {kind!r}.",
            remedy="Name the GGUF file of the language model itself.",
        )
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(
            f"{file} is one of {parts} parts of a model.",
            remedy="Join them with llama-gguf-split, a program of llama.cpp, and name the joined file.",
        )
    if not header.tensors:
        raise ConfigError(
            f"{file} has a vocabulary and no weights.",
            remedy="Name the GGUF file of the whole model, not its vocabulary.",
        )
    if metadata.get("tokenizer.ggml.model") in (None, "none") or not metadata.get("tokenizer.ggml.tokens"):
        raise ConfigError(
            f"{file} has no tokenizer (tokenizer.ggml.model).",
            remedy="Use a file that has one, or the original model's directory.",
        )
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{file} is a GGUF file, and the package gguf, which dequantizes its weights, is not installed.",
            remedy="Install it: pip install 'atropos-torch-models[gguf]'",
        ) from error
    blocks = {int(one): size for one, size in GGML_QUANT_SIZES.items()}
    if unknown := sorted({tensor.kind for tensor in header.tensors} - set(blocks)):
        raise ConfigError(
            f"{file} has tensors of type {unknown[0]}, which gguf {_version('gguf')} does not know.",
            remedy="Update it: pip install -U gguf. Or use a file with a common type, such as Q8_0 or F16.",
        )
    if missing := header.missing_bytes(blocks):
        raise ConfigError(
            f"{file} is cut off: its tensors need {missing:,} bytes more than the {header.size_bytes:,} that it has.",
            remedy=FETCH_AGAIN,
        )
    names = Counter(GGMLQuantizationType(tensor.kind).name for tensor in header.tensors if len(tensor.shape) > 1)
    return header, [name for name, _ in names.most_common()]


def _load_model(file: Path, header: Header) -> Any:
    """Return the model in float32, as transformers loads it. Raises ConfigError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = header.metadata["general.architecture"]
    loader: Any = AutoModelForCausalLM  # its types know no `output_loading_info`
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        if width := header.metadata.get(f"{architecture}.attention.key_length"):
            config.head_dim = width  # transformers reads it for few architectures, and takes its default for the others
        rope = _rope_of_llama3(file, header)
        if rope is not None:
            config.rope_parameters = {**config.rope_parameters, **rope}
        model, found = loader.from_pretrained(
            **place, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"transformers {_version('transformers')} does not load {file}, of the architecture {architecture!r}: {_first_line(error)}",
            remedy=OTHER_MODEL,
        ) from error
    if wrong := sorted(found.get("mismatched_keys", ())):
        name, stored_shape, shape = wrong[0]
        raise ConfigError(
            f"{file} has {name} in the shape {tuple(stored_shape)}, and the model that transformers {_version('transformers')} makes of "
            f"its header wants {tuple(shape)}.",
            remedy=OTHER_MODEL,
        )
    lacking = sorted(found.get("missing_keys", ()))
    if lacking:
        raise ConfigError(
            f"{file} lacks {len(lacking)} tensors of its model, {lacking[0]} among them.", remedy=FETCH_AGAIN
        )
    taken = sum(one.numel() for one in {id(one): one for one in model.state_dict(keep_vars=True).values()}.values())
    stored = sum(tensor.elements for tensor in header.tensors if rope is None or tensor.name != ROPE)
    if taken != stored:
        raise ConfigError(
            f"{file} has {stored:,} numbers in its tensors, and the model that transformers {_version('transformers')} makes of it has "
            f"{taken:,}, so that some would be lost.",
            remedy=OTHER_MODEL,
        )
    return model


def _rope_of_llama3(file: Path, header: Header) -> dict[str, Any] | None:
    """Return how Llama 3.1 to 3.3 stretch their positions. The file has only the divisors of the frequencies that follow from it, which
    transformers does not read: the settings are found by trying those of the published models. None for a file without divisors.
    Raises ConfigError if none of these fits."""
    import numpy as np

    tensor = next((one for one in header.tensors if one.name == ROPE), None)
    if tensor is None:
        return None
    with file.open("rb") as opened:
        opened.seek(header.data_start + tensor.offset)
        divisors = np.frombuffer(opened.read(4 * tensor.elements), dtype="<f4")
    base = float(header.metadata.get(f"{header.metadata['general.architecture']}.rope.freq_base", 10_000.0))
    for factor in LLAMA3_FACTORS:
        made = {"rope_type": "llama3", "factor": factor, **LLAMA3}
        if np.allclose(divisors, llama3_divisors(base, 2 * tensor.elements, made), rtol=1e-3):
            return made
    raise ConfigError(
        f"{file} changes the frequencies of its positions ({ROPE}) in a way that is of no published Llama 3.",
        remedy=OTHER_MODEL,
    )


def llama3_divisors(base: float, width: int, rope: Mapping[str, Any]) -> Any:
    """Return the divisor of each frequency, [width / 2], by the formula of https://arxiv.org/abs/2407.21783 as Meta published it: whole
    waves of the first context stay, long ones are stretched, and those between change from one to the other."""
    import numpy as np

    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)  # positions in one turn
    turns = rope["original_max_position_embeddings"] / waves
    smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _save_model(model: Any, directory: Path, dtype: str) -> None:
    """Save it from an object that knows of no quantization: transformers refuses to save one that was loaded from GGUF."""
    import torch

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory)
    path = directory / "config.json"
    said = {**json.loads(path.read_text()), "dtype": dtype}
    said.pop("_model_name_or_path", None)
    path.write_text(json.dumps(said, indent=2) + "\n")


def _load_tokenizer(file: Path, header: Header) -> tuple[Any, str]:
    """Return the tokenizer that the file declares, and a warning, "" if there is none. Raises ConfigError."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    named, split = header.metadata["tokenizer.ggml.model"], header.metadata.get("tokenizer.ggml.pre")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"transformers {_version('transformers')} does not load the tokenizer of {file} ({named!r}): {_first_line(error)}",
            remedy=OTHER_MODEL,
        ) from error
    if named != "gpt2":
        return tokenizer, ""
    if split in DIGITS:  # transformers splits these as GPT-2 does, which takes a space before a number to the number
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return tokenizer, ""
    if split in GPT2 or split in _known_splits():
        return tokenizer, ""
    return tokenizer, (
        f"{file.name} splits text as {split!r} before it is encoded, which transformers {_version('transformers')} does not know: it is "
        "split as GPT-2 does it, so that some texts get other tokens than those that the model was trained on. The directory of the "
        "original model has its own tokenizer."
    )


def _save_tokenizer(tokenizer: Any, directory: Path, entries: int) -> None:
    """Save it with the file's own vocabulary of `entries` tokens: transformers adds GPT-2's <|endoftext|> to one that lacks it, under an
    id for which the model has no embedding."""
    tokenizer.save_pretrained(directory)
    path, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    content, said = json.loads(path.read_text("utf-8")), json.loads(settings.read_text("utf-8"))
    invented = {one["content"] for one in content["added_tokens"] if one["id"] >= entries}
    if not invented:
        return
    content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] < entries]
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    kept = {key: value for key, value in said.items() if not (isinstance(value, str) and value in invented)}
    settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _known_splits() -> Collection[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # of an older version
        return ()
    return GGUF_PRE_TOKENIZER_SPLITS


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    end_with_parent()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        said = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        said = {"error": Exception.__str__(error), "remedy": error.remedy}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
