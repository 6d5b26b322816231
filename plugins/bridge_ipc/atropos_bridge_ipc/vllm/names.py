"""Every name inside vLLM that is not its published interface, in one place, and looked for before it is needed."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from atropos_core.errors import FitError

SUPPORTED = SpecifierSet(">=0.32,<0.33")
INSTEAD = "Install a vLLM {0}, or publish by `--bridge checkpoint`."

_LAYERS = "vllm.model_executor.layers."
_WANTED = {
    "platform": "vllm.platforms:current_platform",
    "factory": "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory",
    "linear_base": _LAYERS + "linear:LinearBase",
    "qkv_linear": _LAYERS + "linear:QKVParallelLinear",
    "merged_linear": _LAYERS + "linear:MergedColumnParallelLinear",
    "plain_linear_method": _LAYERS + "linear:UnquantizedLinearMethod",
    "embedding": _LAYERS + "vocab_parallel_embedding:VocabParallelEmbedding",
    "plain_embedding_method": _LAYERS + "vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    "rotary": _LAYERS + "rotary_embedding.base:RotaryEmbeddingBase",
    "mapper": "vllm.model_executor.models.utils:WeightsMapper",
    "begin_reload": "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "end_reload": "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
}
# Attributes that are set on instances or read by name show only in the source: (key of the above, member, text).
_WRITTEN = (
    ("plain_linear_method", "process_weights_after_loading", '"_cpu_skip_gemm_dispatch"'),
    ("plain_linear_method", "process_weights_after_loading", "layer.cpu_linear = "),
    ("qkv_linear", "__init__", "self.output_sizes = "),
    ("merged_linear", "__init__", "self.output_sizes = "),
    ("embedding", "__init__", "self.org_vocab_size = "),
    ("rotary", "__init__", '"cos_sin_cache"'),
    ("rotary", "__init__", "self.rotary_dim = "),
    ("mapper", "_map_name_with_shard", "orig_to_new_stacked"),
)


@dataclass(frozen=True)
class Names:
    """vLLM's own classes and functions; typed nowhere, since vLLM need not be installed."""

    version: str
    platform: Any
    factory: Any
    linear_base: Any
    qkv_linear: Any
    merged_linear: Any
    plain_linear_method: Any
    embedding: Any
    plain_embedding_method: Any
    rotary: Any
    mapper: Any
    begin_reload: Any
    end_reload: Any


def find() -> Names:
    """Look up all of them. Raises FitError, which names the vLLM version and the name, if one is missing."""
    version = importlib.import_module("vllm").__version__
    if not SUPPORTED.contains(version, prereleases=True):
        raise FitError(
            f"bridge 'ipc' touches parts of vLLM that were looked up in {SUPPORTED}, and this is vLLM {version}.",
            remedy=INSTEAD.format(SUPPORTED),
        )
    found = {key: _look_up(dotted, version) for key, dotted in _WANTED.items()}
    for key, where, text in _WRITTEN:
        member = getattr(found[key], where, None)
        if member is None or text not in inspect.getsource(member):
            raise _missing(version, f"{_WANTED[key]}.{where} with {text}")
    return Names(version=version, **found)


def _look_up(dotted: str, version: str) -> Any:
    module, _, name = dotted.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise _missing(version, dotted) from error


def _missing(version: str, what: str) -> FitError:
    return FitError(
        f"vLLM {version} has no {what}, which bridge 'ipc' needs to share its weights.",
        remedy=INSTEAD.format(SUPPORTED),
    )
