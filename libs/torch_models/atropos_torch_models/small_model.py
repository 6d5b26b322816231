"""A small copy of a model's architecture: one layer of each kind, few and narrow, in which a mistake shows at once.

The architecture, not the weights, decides whether a way to compute is exact. A copy with weights of unit gain answers that in
a second. In a trained model of the same kind, rounding would hide a small leak.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 640
SPAN = 16  # tokens of a sliding window, of a chunk, and of a selection
MOST_LAYERS = 6
USUAL: Mapping[str, int] = MappingProxyType({})  # no size differs from those below

# Numbers that are set if a configuration has them. Products agree: 4 heads of 16 are the hidden size of 64, and 8 heads
# of 16 its double, which is the inner size of Mamba's layers.
_SIZES = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size": 64, "n_embd": 64, "d_model": 64, "ffn_dim": 96,
    "intermediate_size": 96, "intermediate_size_mlp": 96, "n_inner": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
    "moe_latent_size": 32, "router_hidden_size": 16, "word_embed_proj_dim": 64, "embedding_size": 64, "hidden_size_per_layer_input": 16,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "head_dim": 16, "attention_head_dim": 16, "global_head_dim": 32, "rotary_dim": 8,
    "attention_hidden_size": 64, "kv_channels": 16, "swa_head_dim": 16,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 12,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": SPAN, "laurel_rank": 8, "adapter_rank": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 16, "mamba_expand": 2, "expand": 2, "mamba_d_head": 16, "mamba_n_heads": 8, "n_mamba_heads": 8,
    "mamba_headdim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_d_ssm": 128, "ssm_state_size": 16, "state_size": 16, "mamba_dt_rank": 4, "time_step_rank": 4, "lru_width": 64,
    "mamba_chunk_size": SPAN, "chunk_size": SPAN, "block_size": SPAN, "sliding_window": SPAN, "attention_window_size": SPAN,
    "attention_chunk_size": SPAN, "floor_scale": SPAN,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_expert_groups": 2,
}  # fmt: skip
_AT_MOST = {
    "num_key_value_heads": 2, "num_kv_heads": 2, "num_global_key_value_heads": 2, "swa_num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "num_experts_per_tok": 2, "num_experts_per_token": 2, "top_k_experts": 2,
    "moe_k": 2, "moe_top_k": 2,
    "n_group": 2, "topk_group": 1, "mamba_n_groups": 2, "n_groups": 2, "mamba_ngroups": 2, "max_position_embeddings": 4096,
    "num_dense_layers": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1, "num_nextn_predict_layers": 0, "num_mtp_layers": 0,
    "num_hash_layers": 1, "zero_expert_num": 1,
}  # fmt: skip
_EVERY = ("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval",
          "moe_layer_frequency", "no_rope_layer_interval", "sliding_window_pattern", "hybrid_layer_interval")  # fmt: skip
_OFFSETS = ("attn_layer_offset", "expert_layer_offset")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")  # lists of one entry for each layer
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")


def small_config(config: PreTrainedConfig, sizes: Mapping[str, int] = USUAL) -> PreTrainedConfig:
    """Copy the configuration of a model's language part, with small widths, a vocabulary of 640, windows and chunks of 16 tokens, and
    one layer of each kind, at least two. The rest is as it was. `sizes` are used in place of the usual ones, for kernels that do
    not take those."""
    small: Any = copy.deepcopy(config.get_text_config(decoder=True))
    overrides = small._heterogeneity_spec.per_layer_overrides if getattr(small, "is_heterogeneous", False) else {}
    if overrides:
        small.per_layer_config = None
    whole = copy.copy(small)
    kept = _layers(small, overrides)
    _keep_layers(small, kept)
    for name, value in list(vars(small).items()):
        if (size := _small(name, value, sizes)) is not None:
            setattr(small, name, size)
    _keep_relations(small, whole)
    _shorten_rope(small)
    if overrides:
        small.per_layer_config = {
            at: {
                name: _small_override(small, name, getattr(whole, name, None), value)
                for name, value in overrides[layer].items()
            }
            for at, layer in enumerate(kept) if layer in overrides
        }  # fmt: skip
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, {"pad_token_id": 0, "bos_token_id": 1}.get(name, 2))
    small.dtype = torch.float32
    small._attn_implementation = None  # transformers' own choice, not what a trainer has set
    made: PreTrainedConfig = small
    return made


def _small(name: str, value: Any, sizes: Mapping[str, int] = USUAL) -> Any:
    """The small value of this setting; None if it stays."""
    if name in _SIZES:
        size = sizes.get(name, _SIZES[name])
        if isinstance(value, (list, tuple)) and all(_whole(one) for one in value):
            return [size] * len(value)
        return size if _whole(value) else None
    return min(value, sizes.get(name, _AT_MOST[name])) if name in _AT_MOST and _whole(value) else None


def _small_override(small: Any, name: str, usual: Any, value: Any) -> Any:
    """Return what one layer has instead of the usual value: twice or half of the small one, if it has more or less."""
    if not (_whole(value) and _whole(usual)) or _small(name, usual) is None:
        return value
    size = getattr(small, name)
    return size * 2 if value > usual else max(size // 2, 1) if value < usual else size


def _keep_relations(small: Any, whole: Any) -> None:
    """Settings that are equal, or the product of others, in the whole configuration stay so in the small one."""
    has = vars(whole)
    if _whole(has.get("num_key_value_heads")) and has.get("num_key_value_heads") == has.get("num_attention_heads"):
        small.num_key_value_heads = small.num_attention_heads
    if _whole(has.get("qk_rope_head_dim")) and has.get("head_dim") == has["qk_rope_head_dim"]:
        small.head_dim = small.qk_rope_head_dim
    if _whole(has.get("v_head_dim")) and has["v_head_dim"] == has.get("head_dim"):
        small.v_head_dim = small.head_dim
    if _whole(has.get("state_size")) and _whole(has.get("num_heads")):  # Mamba 2
        small.num_heads = 8
    if _whole(has.get("attention_hidden_size")) and has["attention_hidden_size"] == 2 * whole.hidden_size:  # Zamba 2
        small.attention_hidden_size = 2 * small.hidden_size
        small.attention_head_dim = small.attention_hidden_size // small.num_attention_heads


def small_model(config: PreTrainedConfig, seed: int = 0, sizes: Mapping[str, int] = USUAL) -> PreTrainedModel:
    """The model of `small_config(config, sizes)`: float32, on the CPU, in evaluation mode, without dropout. Every matrix has a gain of
    about one, so that a leak from another sequence changes logits by about their spread."""
    small = small_config(config, sizes)
    for name in DROPOUT:
        if hasattr(small, name):
            setattr(small, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        multiplied = float(getattr(small, "embedding_multiplier", None) or 1)
        with torch.no_grad():
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    _unit_gain(module, name, parameter)
            model.get_input_embeddings().weight /= multiplied
    made: PreTrainedModel = model.eval()
    return made


DROPOUT = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "activation_dropout",
    "ffn_dropout",
)


def _unit_gain(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if isinstance(module, nn.Embedding):
        parameter.normal_()
    elif parameter.dim() >= 2:
        parameter.normal_(
            std=parameter[0].numel() ** -0.5
            if parameter.dim() == 2 or isinstance(module, nn.Conv1d)
            else parameter.shape[-1] ** -0.5
        )
    elif name == "bias" or "sink" in name:
        parameter.normal_(std=0.5)


def _keep_layers(small: Any, kept: list[int]) -> None:
    """Keep these layers: of each list that has an entry for every layer, and of lists of the numbers of layers."""
    before = next(getattr(small, name) for name in _LAYERS if _number(small, name))
    for name, value in list(vars(small).items()):
        if isinstance(value, (list, tuple)) and len(value) == before:
            setattr(small, name, [value[layer] for layer in kept])
        elif (
            isinstance(value, list)
            and value
            and name.endswith(("_layers", "_idxs", "_indices", "layer_ids"))
            and all(type(one) is int for one in value)
        ):
            setattr(small, name, [at for at, layer in enumerate(kept) if layer in value])
    for name in _LAYERS:
        if _number(small, name):
            setattr(small, name, len(kept))
    if _number(small, "num_kv_shared_layers") and small.num_kv_shared_layers:
        small.num_kv_shared_layers = sum(layer >= before - small.num_kv_shared_layers for layer in kept)
    for name in _EVERY:
        if _number(small, name):
            setattr(small, name, min(getattr(small, name), 2))
    for name in _OFFSETS:
        if _number(small, name):
            setattr(small, name, getattr(small, name) and 1)


def _layers(config: Any, overrides: dict[int, Any]) -> list[int]:
    """The first layer of each kind, in order; two if there is one kind, or if rules by number decide about kinds."""
    count = next(int(getattr(config, name)) for name in _LAYERS if _number(config, name))
    lists = [
        kinds
        for name in _KINDS
        if isinstance(kinds := getattr(config, name, None), (list, tuple)) and len(kinds) == count
    ]
    numbers = [
        set(value) for name, value in vars(config).items() if name in ("moe_layers", "mlp_only_layers") and value
    ]
    shared = count - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    kinds = [
        (*(one[layer] for one in lists), *(layer in one for one in numbers), layer >= shared, layer in overrides)
        for layer in range(count)
    ]
    first = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:MOST_LAYERS]
    more = [layer for layer in range(count) if layer not in first]
    return sorted(first + more[: max(0, 2 - len(first))])


def _shorten_rope(small: Any) -> None:
    """Rotary settings that list something for every pair of a head's numbers get as many as the small head has."""
    width = getattr(small, "head_dim", None) or 16
    for settings in (getattr(small, "rope_parameters", None), getattr(small, "rope_scaling", None)):
        nested = (
            [one for one in (settings or {}).values() if isinstance(one, dict)] if isinstance(settings, dict) else []
        )
        for one in [settings, *nested] if isinstance(settings, dict) else []:
            pairs = (
                int(
                    width
                    * float(one.get("partial_rotary_factor") or getattr(small, "partial_rotary_factor", None) or 1)
                )
                // 2
            )
            for name in ("short_factor", "long_factor"):
                if name in one:
                    one[name] = list(one[name])[:pairs]
            if "mrope_section" in one:
                sections = [pairs // len(one["mrope_section"])] * len(one["mrope_section"])
                one["mrope_section"] = [pairs - sum(sections[1:]), *sections[1:]]


def _number(config: Any, name: str) -> bool:
    return _whole(getattr(config, name, None))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
