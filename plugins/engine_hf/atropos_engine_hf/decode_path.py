"""How rows are decoded for a model: in slots or as a cohort. Decided by what probe.py measured. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atropos_core.errors import FitError
from atropos_core.storage.reading import base_of_adapter
from atropos_torch_models.probes import plain, probed

if TYPE_CHECKING:
    from atropos_engine_hf.config import HFOptions

NAME, MODULE = "engine", "atropos_engine_hf.probe"
LIMIT = 1e-3  # of the logits' spread, in float32 on the small copy
OTHER = "Use a model of another type."
NO_GRAPHS = "Set engine.cuda_graphs = false."
NOT_IN_SLOTS = (
    "engine.cuda_graphs = true records steps over the slots of a cache of all keys and values, and this {kind!r} model is decoded as a"
    " cohort, whose cache grows at each step."
)
SLOTS, COHORT, EQUAL = "slots", "cohort", "cohort, equal lengths"
_LAYERS = {
    "DynamicSlidingWindowLayer": "see only a window or a chunk",
    "LinearAttentionLayer": "keep a state",
    "LinearAttentionAndFullAttentionLayer": "keep a state next to keys and values",
    "LinearAttentionAndSlidingWindowAttentionLayer": "keep a state next to a window",
    "DynamicIndexedLayer": "keep an index of their keys",
}


@dataclass
class RowBytes:
    """The bytes of one row in a model's own cache."""

    state: int = 0  # whatever its length
    token: int = 0  # for each of its tokens
    windows: dict[int, int] = field(default_factory=dict)  # tokens that are kept at most -> bytes for each of them

    def of(self, tokens: int) -> int:
        return self.state + self.token * tokens + sum(min(tokens, most) * size for most, size in self.windows.items())

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"state": self.state, "token": self.token, "windows": list(self.windows.items())}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> RowBytes:
        return cls(record["state"], record["token"], dict(record["windows"]))


class DecodePath(NamedTuple):
    """The decoder to use, and the reason."""

    name: str  # SLOTS, COHORT or EQUAL
    line: str  # for the start of a run: "cohort: 30 of 40 layers keep a state (1.2e-06 of the logits' spread off)"
    row_bytes: Mapping[int, RowBytes] = {}  # in the model's own cache, by bytes of an element, as far as known


def before_start(options: HFOptions, directory: Path) -> DecodePath:
    """Return the path for the model in a directory; measured in a process of its own, if config.json leaves it open and no earlier
    measurement is kept. Raises FitError if there is none."""
    where = config_directory(directory)
    if plain(where) and options.decode != COHORT:
        return DecodePath(SLOTS, "slots: every layer has full attention")
    return choose(options.decode, model_type(where), measured(where))


def measured(directory: Path) -> Mapping[str, Any]:
    """Return what probe.py found for the configuration in this directory."""
    try:
        changed_ns = (directory / "config.json").stat().st_mtime_ns
    except OSError:
        changed_ns = 0
    return _measured(directory, changed_ns)


@lru_cache(maxsize=64)
def _measured(directory: Path, changed_ns: int) -> Mapping[str, Any]:
    return probed(directory, NAME, MODULE)


def choose(wanted: str, kind: str, found: Mapping[str, Any]) -> DecodePath:
    """Return the fastest exact path, or the wanted one. Raises FitError if it is not exact."""
    off = found["off"]
    good = [name for name in (SLOTS, COHORT, EQUAL) if off.get(name, 1.0) <= LIMIT]
    taken = [name for name in good if wanted in ("auto", name.partition(",")[0])]
    if not taken:
        raise _refusal(wanted, kind, found, good)
    name = taken[0]
    why = f"{off[name]:.1g} of the logits' spread off"
    reason = "as engine.decode says" if wanted != "auto" else _reason(name, found)
    row_bytes = {int(element): RowBytes.of_record(record) for element, record in found["bytes"].items()}
    return DecodePath(name, f"{name.partition(',')[0]}: {reason} ({why})", {} if name == SLOTS else row_bytes)


def _reason(name: str, found: Mapping[str, Any]) -> str:
    layers: Mapping[str, int] = found["layers"]
    special = [
        f"{count} of {sum(layers.values())} layers {_LAYERS[kind]}" for kind, count in layers.items() if kind in _LAYERS
    ]
    if name == SLOTS:
        return "a cache of all keys and values is exact"
    reason = ", ".join(special) or "a cache of all keys and values is not exact"
    return reason + ("; only rows of one length are decoded together" if name == EQUAL else "")


def _refusal(wanted: str, kind: str, found: Mapping[str, Any], good: list[str]) -> FitError:
    tried = [name for name in (SLOTS, COHORT, EQUAL) if wanted in ("auto", name.partition(",")[0])]
    said = "; ".join(
        f"{name}: {_number(found, name)}" for name in tried if name in found["off"] or name in found["failed"]
    )
    if good:
        return FitError(
            f"engine.decode = {wanted!r} is not exact for {kind!r} models. On a small copy of the model its logits differ from a plain"
            f" forward pass by ({said}).",
            remedy=f"Leave engine.decode at auto, which takes {good[0].partition(',')[0]!r} ({_number(found, good[0])}).",
        )
    return FitError(
        f"engine 'hf' cannot decode {kind!r} models exactly. On a small copy of the model its logits differ from a plain forward pass by"
        f" ({said}), and at most {LIMIT:g} is allowed.",
        remedy=OTHER,
    )


def _number(found: Mapping[str, Any], name: str) -> str:
    if name in found["off"]:
        return f"{found['off'][name]:.1g} of the logits' spread"
    return str(found["failed"].get(name, "not measured"))


def model_type(directory: Path) -> str:
    """Return the type of the language model that config.json describes."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return str(config.get("model_type", "unknown"))
    except (OSError, ValueError, AttributeError):
        return "unknown"


def config_directory(directory: Path) -> Path:
    """Return the directory with config.json: for an adapter, that of its base model."""
    if (directory / "config.json").exists() or not (directory / "adapter_config.json").exists():
        return directory
    return base_of_adapter(directory)
