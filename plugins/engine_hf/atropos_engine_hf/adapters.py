"""peft adapters on the engine's model. They change the model's layers in place, so every holder of the model sees them.

A forward pass uses one of them or none, as `use` says before it. Layers that the chosen adapter leaves out, and all layers if none is
chosen, compute as without peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from atropos_core.errors import WeightsMismatch

WEIGHTS = "adapter_model.safetensors"
_FREE = ("base_model_name_or_path", "inference_mode", "revision", "peft_version")  # may differ in place


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as it was read from a directory."""

    directory: Path
    config: PeftConfig
    weights: dict[str, torch.Tensor]

    @property
    def settings(self) -> dict[str, Any]:
        """Two adapters with equal settings have tensors of the same names and meaning."""
        return {key: value for key, value in self.config.to_dict().items() if key not in _FREE}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())


def read_adapter(directory: Path) -> StoredAdapter:
    """Read an adapter. Raises WeightsMismatch if the directory holds none."""
    try:
        config = PeftConfig.from_pretrained(str(directory), local_files_only=True)
        config.inference_mode = True
        return StoredAdapter(directory, config, load_file(directory / WEIGHTS))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise WeightsMismatch(f"engine 'hf' cannot read an adapter from {directory}: {error}") from error


@dataclass(frozen=True)
class _Attached:
    key: str  # peft's name for it: users' names may have characters that names of modules must not have
    settings: dict[str, Any]
    size_bytes: int


class Adapters:
    """The adapters on one model, by name."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._around: PeftModel | None = None
        self._attached: dict[str, _Attached] = {}
        self._made = 0  # adapters so far, for names that peft has not had
        self._used: str | None = None
        self._disabled = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all adapters' weights."""
        return sum(one.size_bytes for one in self._attached.values())

    @property
    def _tuner(self) -> Any:
        """peft's object around the model, which peft types as a plain module."""
        assert self._around is not None, "only called with an adapter"
        return self._around.base_model

    def put(self, name: str, stored: StoredAdapter) -> None:
        """Attach an adapter. One of this name is replaced: in place, if the new one has the same settings.

        Raises WeightsMismatch if it is not an adapter for this model. Nothing of it, nor of one that it was to replace, then stays."""
        present = self._attached.get(name)
        if present is not None and present.settings != stored.settings:
            self.remove(name)
            present = None
        try:
            if present is None:
                present = self._attach(name, stored)
            self._copy(present.key, stored)
        except WeightsMismatch:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Take an adapter off the model and free its memory. Does nothing if there is none of this name."""
        removed = self._attached.pop(name, None)
        if removed is None or self._around is None:
            return
        if self._used == name:
            self._used = None
        if self._attached:
            self._around.delete_adapter(removed.key)
            self._used = None  # peft has chosen another one
        else:
            self._unwrap()

    def use(self, name: str | None) -> None:
        """Let the next forward passes use this adapter. None, or a name that has no adapter: the model without any."""
        if self._around is None:
            return
        if name is None or name not in self._attached:
            if not self._disabled:
                self._tuner.disable_adapter_layers()
                self._disabled = True
            return
        if self._disabled:
            self._tuner.enable_adapter_layers()
            self._disabled, self._used = False, None
        if self._used != name:
            self._tuner.set_adapter(self._attached[name].key, inference_mode=True)
            self._used = name

    def _attach(self, name: str, stored: StoredAdapter) -> _Attached:
        self._made += 1
        attached = _Attached(f"adapter_{self._made}", stored.settings, stored.size_bytes)
        self._attached[name] = attached  # also if it fails: `remove` then takes off what peft has added so far
        try:
            if self._around is None:
                self._around = _wrapped(self._model, stored.config, attached.key)
            else:
                self._around.add_adapter(attached.key, stored.config)
        except ValueError as error:
            raise WeightsMismatch(
                f"the adapter in {stored.directory} is not one for this engine's model: {error}"
            ) from error
        self._around.eval()  # the dropout of new layers is on
        self._tuner.enable_adapter_layers()  # new layers are; `use` needs all of them to agree
        self._disabled, self._used = False, None
        return attached

    def _unwrap(self) -> None:
        assert self._around is not None, "the last adapter was on it"
        self._around.unload()
        self._around, self._used, self._disabled = None, None, False

    @torch.no_grad()
    def _copy(self, key: str, stored: StoredAdapter) -> None:
        present: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self._around, save_embedding_layers=False, adapter_name=key
        )
        for name in sorted(present.keys() | stored.weights.keys()):
            here, there = (_kind(of.get(name)) for of in (present, stored.weights))
            if here != there:
                raise WeightsMismatch(
                    f"adapter tensor {name!r} is {there} in {stored.directory}, and {here} in the engine's model.",
                    remedy="Trainer and engine must open the same model directory.",
                )
        for name, tensor in present.items():
            tensor.copy_(stored.weights[name])


def _wrapped(model: Any, config: PeftConfig, key: str) -> PeftModel:
    around = get_peft_model(model, config, adapter_name=key)
    assert isinstance(around, PeftModel), "it is only for mixed adapters that peft gives another class"
    return around


def _kind(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
