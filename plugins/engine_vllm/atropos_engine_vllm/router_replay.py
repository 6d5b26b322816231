"""Start servers that record which experts computed each token, and read these from their answers."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import ConfigError, FitError, RemoteError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import RoutedExperts
from atropos_engine_vllm.config import VLLMOptions
from atropos_torch_models.model_directory import NO_REPLAY, check_experts

FLAG = "--enable-return-routed-experts"
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
ASKED = "trainer.router_replay = true asks engine 'vllm' which experts compute each token"
_FIELD = "routed_experts"


def records_experts(context: RunContext) -> bool:
    """Return True if the trainer wants to know the experts of each token."""
    return bool(context.announced.get("router_replay"))


def check_replay(options: VLLMOptions, context: RunContext) -> None:
    """Raise FitError or ConfigError if the trainer asks for experts that a server of these options would not record."""
    if not records_experts(context):
        return
    check_experts(context.model, "vllm")
    if options.url is not None:
        return
    if not options.prefix_caching:
        raise ConfigError(
            f"{ASKED}. vLLM keeps those of prompts with their cached keys and values, but {context.label or 'engine'}.prefix_caching is"
            " false.",
            remedy=f"--set {context.label or 'engine'}.prefix_caching=true, or {NO_REPLAY}",
        )
    if context.devices[0] == "cpu" and not has_triton_for_cpus():
        raise FitError(
            f"{ASKED}. On a CPU, vLLM records them only with a Triton that has a backend for CPUs, and none is installed here.",
            remedy=f"Use `--engine hf`, or {NO_REPLAY}. Or install a build of Triton with the backend 'cpu'.",
        )


def has_triton_for_cpus() -> bool:
    """Return True if a backend "cpu" is registered with Triton. Triton itself is not imported."""
    return any(one.name == "cpu" for one in entry_points(group="triton.backends"))


def routed_experts(choice: Mapping[str, Any], length: int) -> RoutedExperts:
    """Read those of prompt and reply, `length` tokens together, from a choice of vLLM's answer. The last token was not computed. There
    is an entry for each hidden layer, zeros for those without experts. Raises RemoteError if the server did not record them."""
    if (sent := choice.get(_FIELD)) is None:
        raise RemoteError(
            f"{ASKED}, and the server's answer does not say it: it runs without {FLAG}.",
            remedy=f"Start the server with {FLAG} and VLLM_USE_V2_MODEL_RUNNER=1 in its environment, or {NO_REPLAY}",
        )
    try:
        numbers: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(sent, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, TypeError, binascii.Error) as error:
        raise RemoteError(f"vLLM sent {_FIELD} that are not an array in base64: {error}") from error
    if numbers.ndim != 3 or len(numbers) != length - 1 or numbers.dtype not in (np.uint8, np.uint16):
        raise RemoteError(
            f"vLLM sent {_FIELD} of type {numbers.dtype} and shape {list(numbers.shape)} for a prompt and reply of {length} tokens, of"
            f" which it computed {length - 1}"
        )
    return RoutedExperts(np.arange(length) < length - 1, numbers)
