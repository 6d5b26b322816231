"""Facts about a model directory that must be known before it is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from atropos_core.errors import ConfigError, FitError
from atropos_core.models.model_size import BYTES, read

NO_REPLAY = "--set trainer.router_replay=false"
OWN_CODE_REMEDY = "Use a model with an architecture that transformers itself knows, or convert it to one."


def check_weights(directory: Path) -> None:
    """Raises ConfigError for a model directory whose weights are missing or incomplete."""
    if not (directory / "config.json").is_file():
        return  # an adapter, or no Hugging Face model
    remedy = f"Save the model there whole (save_pretrained), or fetch it again into {directory}."
    try:
        named = set(
            json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"].values()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        named = set()
    if missing := sorted(name for name in named if not (directory / name).is_file()):
        raise ConfigError(
            f"{len(missing)} of the {len(named)} files of weights of the model in {directory} are not there, {missing[0]} among them.",
            remedy=remedy,
        )
    files = sorted(directory.glob("*.safetensors"))
    if not files and not any(directory.glob("*.bin")):
        raise ConfigError(
            f"the model in {directory} lacks its weights: there is a config.json, but no *.safetensors.", remedy=remedy
        )
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                ends = [
                    entry["data_offsets"][1]
                    for name, entry in json.loads(file.read(length)).items()
                    if name != "__metadata__"
                ]
            whole = path.stat().st_size == 8 + length + max(ends, default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError, struct.error):
            whole = False
        if not whole:
            raise ConfigError(f"{path} is damaged: it is not as long as its own header says.", remedy=remedy)


def sliding_window(directory: Path) -> int | None:
    """Return the window, in tokens, of layers with sliding attention, from config.json; None if there are none, or it is unknown."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        kinds, window = config.get("layer_types"), config.get("sliding_window")
        some = "sliding_attention" in kinds if kinds is not None else config.get("use_sliding_window", True)
        if kinds is None and int(config.get("max_window_layers", 0)) >= int(config.get("num_hidden_layers", 1)):
            some = False
        return int(window) if some and window is not None else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def loaded_dtype(directory: Path, wanted: str, device: str) -> str:
    """Resolve the dtype `auto`: float32 on a CPU, elsewhere that of config.json; "" if it names no known one."""
    if wanted != "auto":
        return wanted
    if device == "cpu":
        return "float32"
    return model.dtype if (model := read(directory)) is not None and model.dtype in BYTES else ""


def needs_own_code(directory: Path) -> str | None:
    """Return the fact, for a loader's error, that config.json refers to Python code of the model, which is never run here. None if
    it does not refer to any."""
    try:
        named = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("auto_map")
    except (OSError, ValueError, AttributeError):
        return None
    if not named:
        return None
    return (
        f"the model in {directory} needs its own Python code (auto_map in its config.json: {named}), and Atropos "
        "does not run code that comes with a model"
    )


def check_experts(directory: Path, engine: str) -> None:
    """Raises FitError if the engine is to record the experts of each token, and config.json and the files of weights name none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        named = any("expert" in key and isinstance(value, int) and value > 0 for key, value in config.items())
    except (OSError, ValueError, AttributeError):
        return  # an adapter, or no Hugging Face model
    size = read(directory)
    if not named and not (size and any(".experts." in name for name in size.tensors)):
        raise FitError(
            f"engine {engine!r} is to record which experts compute each token, as trainer.router_replay = true asks, and the model in"
            f" {directory} has no experts.",
            remedy=NO_REPLAY,
        )
