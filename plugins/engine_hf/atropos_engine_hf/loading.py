"""Load a model from its directory onto its device, or say why it cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers.modeling_utils  # noqa: F401 - two thirds of the start-up; imported here, it runs in parallel with the trainer's
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from atropos_core.errors import ConfigError, FitError
from atropos_engine_hf.decode_path import config_directory
from atropos_torch_models.devices import refuse_missing
from atropos_torch_models.model_directory import OWN_CODE_REMEDY, needs_own_code
from atropos_torch_models.stop_ids import stop_ids


def load_model(directory: Path, dtype: str, device: str, quantization: str | None = None) -> Any:
    """Return the model in eval mode. If `directory` holds a peft adapter, this is its base model with the adapter.

    With `quantization`, the whole model is in host memory until it is packed. Raises FitError for a model that the decode
    loop does not support, ConfigError for a bad directory."""
    read_config(directory)
    refuse_missing(device, "engine 'hf'")
    logging.disable_progress_bar()
    chosen = "float32" if dtype == "auto" and device == "cpu" else dtype
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=chosen, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        if own := needs_own_code(config_directory(directory)):
            raise FitError(f"{own}.", remedy=OWN_CODE_REMEDY) from error
        raise ConfigError(f"engine 'hf' cannot load the model in {directory}: {error}") from error
    if quantization is not None:
        from atropos_engine_hf.quantization import quantize

        quantize(model, device, quantization)
    return model.to(device).eval().requires_grad_(False)


def read_config(directory: Path) -> Any:
    """Return the model's configuration. Raises ConfigError if there is none, FitError for one that is not of a causal model."""
    where = config_directory(directory)
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if own := needs_own_code(where):
            raise FitError(f"{own}.", remedy=OWN_CODE_REMEDY) from error
        raise ConfigError(f"engine 'hf' cannot read a model from {directory}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise FitError(
            f"engine 'hf' does not run {config.model_type!r} models: it is an encoder and a decoder, and the engine decodes causal"
            " models only.",
            remedy="Use a causal language model.",
        )
    return config


def media_tokens(config: Any) -> dict[str, int]:
    """Return the ids of tokens that stand for something other than text, by what that is. Only for models that also see or hear."""
    if config.get_text_config(decoder=True) is config:
        return {}
    names = {
        "images": ("image_token_id", "image_token_index"),
        "videos": ("video_token_id",),
        "audio": ("audio_token_id",),
    }
    return {
        what: found[0]
        for what, fields in names.items()
        if (found := [token for field in fields if isinstance(token := getattr(config, field, None), int)])
    }


def ends_of(directory: Path, model: Any) -> set[int]:
    """Return the ids of the tokens that end a reply of a loaded model."""
    return stop_ids(
        directory, model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    )
