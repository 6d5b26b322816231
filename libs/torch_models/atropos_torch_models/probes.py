"""Measured facts about an architecture, kept per configuration so that each is measured once.

A probe computes something in several ways on a small copy of a model (small_model.py), and says how far each is from the plain
forward pass. It depends on config.json, on our code, and on the versions of torch and transformers, so these are its key.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, FitError
from atropos_core.storage.atomic import write_whole
from atropos_torch_models.user_cache import user_cache

DEADLINE_S = 300.0  # of a probe in a child process, most of which is the import of torch on a busy machine

# Models whose layers are all plain full attention, and whose logits come from a plain head.
_PLAIN = frozenset(
    {"llama", "qwen2", "qwen3", "smollm3", "gpt_neox", "gpt2", "olmo2", "ernie4_5", "seed_oss", "qwen3_moe", "olmoe"}
)
_PLAIN_IF = ("sliding_window", "attention_chunk_size", "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling",
             "text_config")  # fmt: skip


def plain(directory: Path) -> bool:
    """Return true if config.json says that every way to compute is exact, so that nothing has to be measured before a run starts.
    (It is measured all the same by the process that opens the model, which has it open.)"""
    try:
        config = _read(directory)
    except ConfigError:
        return True  # an adapter, or a directory that its reader refuses with a better message
    windowed = [name for name in _PLAIN_IF if config.get(name)]
    if windowed == ["sliding_window"] and config.get("use_sliding_window") is False:
        windowed = []
    return (
        config.get("model_type") in _PLAIN
        and not windowed
        and set(config.get("layer_types") or ()) <= {"full_attention"}
    )


def probed(directory: Path, name: str, module: str) -> dict[str, Any]:
    """Return what this probe found for the model's configuration: what is kept, or else what `python -m MODULE DIRECTORY` prints, a JSON
    object. Raises FitError if that process fails, with the last line that it wrote."""
    if (found := kept(directory, name, module)) is not None:
        return found
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a probe computes on one thread of the CPU
    command = [sys.executable, "-m", module, str(directory)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise FitError(f"{' '.join(command)} has not ended within {DEADLINE_S:g} s.") from error
    try:
        result = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        said = (ended.stderr.strip() or ended.stdout.strip() or "it wrote nothing").splitlines()[-1]
        raise FitError(f"{' '.join(command)} ended with code {ended.returncode}: {said}") from error
    keep(directory, name, module, result)
    return dict(result)


def kept(directory: Path, name: str, module: str) -> dict[str, Any] | None:
    """Return what was kept of this probe for this configuration, or None."""
    try:
        result = json.loads(_place(directory, name, module).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def keep(directory: Path, name: str, module: str, result: Mapping[str, Any]) -> None:
    """Keep a result, whole or not at all. A cache folder that cannot be written costs the next run a measurement."""
    place = _place(directory, name, module)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(result))
    except OSError:
        return


def _place(directory: Path, name: str, module: str) -> Path:
    config = {
        field: value
        for field, value in _read(directory).items()
        if field not in ("_name_or_path", "transformers_version")
    }
    key = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for package in ("torch", "transformers"):
        key.update(importlib.metadata.version(package).encode())
    for package in {module.split(".")[0], __name__.split(".")[0]}:
        spec = importlib.util.find_spec(package)
        for folder in sorted((spec.submodule_search_locations or ()) if spec else ()):
            for path in sorted(Path(folder).rglob("*.py")):
                key.update(path.read_bytes())
    return user_cache("probes") / f"{name}-{config.get('model_type')}-{key.hexdigest()[:24]}.json"


def _read(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {directory / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{directory / 'config.json'} is not a JSON object.")
    return config
