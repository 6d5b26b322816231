"""A peft adapter on the engine's model. It changes the model's layers in place, so every holder of the model sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from atropos_core.errors import WeightsMismatch

WEIGHTS = "adapter_model.safetensors"
_FREE = ("base_model_name_or_path", "inference_mode", "revision", "peft_version")  # may differ in place


class Adapter:
    """The model's only adapter. A later one of the same shape is copied over it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._around: PeftModel | None = None
        self._settings: dict[str, Any] = {}

    def load(self, directory: Path) -> None:
        """Sample with the adapter in `directory` from now on.

        Raises WeightsMismatch if it is not an adapter for this model; after that, sampling is no longer allowed."""
        try:
            config = PeftConfig.from_pretrained(str(directory), local_files_only=True)
            weights = load_file(directory / WEIGHTS)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise WeightsMismatch(f"engine 'hf' cannot read an adapter from {directory}: {error}") from error
        settings = {key: value for key, value in config.to_dict().items() if key not in _FREE}
        if self._around is None or settings != self._settings:
            self._wrap(config, directory)
            self._settings = settings
        self._copy(weights, directory)

    def _wrap(self, config: PeftConfig, directory: Path) -> None:
        if self._around is not None:
            self._around.unload()
            self._around = None
        config.inference_mode = True
        try:
            around = get_peft_model(self._model, config)
        except ValueError as error:
            raise WeightsMismatch(f"the adapter in {directory} is none for this engine's model: {error}") from error
        assert isinstance(around, PeftModel), "it is only for mixed adapters that peft gives another class"
        self._around = around.eval()

    @torch.no_grad()
    def _copy(self, weights: dict[str, torch.Tensor], directory: Path) -> None:
        present: dict[str, torch.Tensor] = get_peft_model_state_dict(self._around, save_embedding_layers=False)
        for name in sorted(present.keys() | weights.keys()):
            here, there = (_kind(of.get(name)) for of in (present, weights))
            if here != there:
                raise WeightsMismatch(
                    f"adapter tensor {name!r} is {there} in {directory}, and {here} in the engine's model.",
                    remedy="Trainer and engine must open the same model directory.",
                )
        for name, tensor in present.items():
            tensor.copy_(weights[name])


def _kind(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
