"""Open a causal language model for training, with its weights or as a skeleton that a bridge fills, and score tokens with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from atropos_core.errors import FitError, WeightsMismatch
from atropos_torch_models.model_directory import OWN_CODE_REMEDY, needs_own_code
from atropos_trainer_grpo.architecture import as_read, decoder, logit_form
from atropos_trainer_grpo.attention import NAME, attention_of, register
from atropos_trainer_grpo.kept_tokens import KeptRows
from atropos_trainer_grpo.layouts import PACKED, Layout
from atropos_trainer_grpo.logprobs import HeadAdapter, Scored, token_logprobs
from atropos_trainer_grpo.own_logits import own_logprobs
from atropos_trainer_grpo.packed_rows import Packing, pack
from atropos_trainer_grpo.padded_rows import PaddedRows, pad
from atropos_trainer_grpo.prefix_tree import Indices
from atropos_trainer_grpo.router_replay import replay_of

NEUTRAL = {  # settings with which the trained policy would not be the sampled one, or which training does not use
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0), "output_router_logits": False,
}  # fmt: skip


def open_model(
    directory: Path,
    *,
    dtype: str,
    device: str,
    with_weights: bool,
    at: str | None = None,
    attention: str = "auto",
    layout: Layout = PACKED,
) -> PreTrainedModel:
    """Open the model in evaluation mode (no dropout). Without weights its parameters are on the meta device and its buffers
    (rotary frequencies) on `device`. With weights all is on `device`, or for the time being on `at`. Of a model that also sees images, the
    language model is trained and the rest frozen. Raises FitError for a model that cannot be computed in this layout."""
    if (directory / "adapter_config.json").exists():
        raise FitError(
            f"{directory} holds an adapter, but training starts from a whole model.",
            remedy="Merge it first: AutoModelForCausalLM.from_pretrained(...), peft's merge_and_unload(), save_pretrained(...).",
        )
    register()
    logging.disable_progress_bar()
    config = neutral(config_of(directory))
    stored = torch.float32 if torch.device(device).type == "cpu" else config.dtype
    wanted: Any = stored if dtype == "auto" else getattr(torch, dtype)
    config.dtype = wanted
    if layout.name == "packed":
        attention_of(attention, config, device)  # refused before anything is loaded
    function = NAME if layout.name == "packed" else None  # transformers' choice: sdpa if the model has it, else eager
    model: Any  # transformers' own classes are typed in part
    if with_weights:
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=wanted, attn_implementation=function, trust_remote_code=False
        )
        model = model.to(at or device)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, attn_implementation=function)
        _fill_buffers(model, device)
    model.eval()
    lay_out(model, layout)
    _freeze_all_but_language(model)
    made: PreTrainedModel = model
    return made


def config_of(directory: Path) -> Any:
    """Read the configuration of a causal language model. Raises FitError if transformers does not know it as one."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if own := needs_own_code(directory):
            raise FitError(f"{own}.", remedy=OWN_CODE_REMEDY) from error
        raise
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise FitError(
            f"the installed transformers has no causal language model of type {config.model_type!r} (AutoModelForCausalLM).",
            remedy="Use a model of another type, such as qwen3, qwen3_5 or gemma3.",
        )
    return config


def neutral(config: Any) -> Any:
    """Switch off, in place, what would make another policy of the model in training."""
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for name, value in NEUTRAL.items():
            if hasattr(part, name) and (part.model_type, name) != (
                "phimoe",
                "router_jitter_noise",
            ):  # a threshold of its router
                setattr(part, name, value)
    return config


def lay_out(model: Any, layout: Layout) -> None:
    """Have `score` compute the model in this layout, with the attention function that it was opened with. Raises FitError if it cannot."""
    if layout.name == "packed" and not getattr(model, "_supports_attention_backend", False):
        raise FitError(f"{type(model).__name__} has its own attention code, which cannot be packed.")
    if not layout.own_logits and type(model.get_output_embeddings()) is not nn.Linear:
        raise FitError(f"{type(model).__name__} has no plain linear language-model head.")
    model.token_layout = layout


def layout_of_model(model: nn.Module) -> Layout:
    """The layout that `lay_out` chose; packed without it."""
    layout: Layout = vars(language_model(model)).get("token_layout", PACKED)
    return layout


def lay_out_tokens(
    model: nn.Module,
    tokens: NDArray[np.int32],
    lengths: Indices,
    device: str,
    *,
    share: bool,
    attention: str = "padded",
) -> Packing | PaddedRows:
    """Lay out sequences that stand end to end in `tokens`, as `pack` or `pad` does."""
    if layout_of_model(model).name == "rows":
        return pad(tokens, lengths, device)
    return pack(tokens, lengths, device, share=share, attention=attention)


def complete(model: nn.Module) -> None:
    """Tie what the architecture ties, and raise WeightsMismatch if a parameter has not arrived."""
    language_model(model).tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise WeightsMismatch(
            f"the bridge gave the trainer no weights for {len(missing)} parameters, such as {missing[0]!r}.",
            remedy="Engine and trainer must open the same model directory.",
        )


def only_used_rows(model: Any) -> None:
    """Have a tied embedding give a gradient only of the rows that were looked up, instead of a mostly zero matrix for every
    micro-batch. It is added to the head's gradient, which is whole."""
    embedding = model.get_input_embeddings()
    if embedding.weight is model.get_output_embeddings().weight and embedding.weight.dtype == torch.float32:
        embedding.sparse = True


def score(
    model: nn.Module,
    packing: Packing | PaddedRows,
    predicts: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    chunk: int,
    others: Tensor | None = None,
    kept: KeptRows | None = None,
) -> Scored:
    """One forward pass over laid out sequences: logprobs of `targets` [R], and of `others` [R, K], at the places `predicts` [R] before
    them; of the distribution over the `kept` tokens of each."""
    if isinstance(model, Scorer):
        return model.scored(packing, predicts, targets, temperature, chunk, others, kept)
    whole = language_model(model)
    body = decoder(whole)
    if (replay := replay_of(whole)) is not None:
        replay.recorded = packing.experts
    tokens = as_read(whole, packing.tokens)
    if isinstance(packing, PaddedRows):  # positions are the model's own
        made = body(input_ids=tokens, use_cache=False)
    else:
        made = body(input_ids=tokens, position_ids=packing.positions, use_cache=False, packing=packing)
    hidden = made.last_hidden_state.flatten(0, 1).index_select(0, predicts)
    if layout_of_model(whole).own_logits:
        return own_logprobs(whole, hidden, vocabulary_of(whole), targets, temperature, chunk, others, kept)
    if "logit_form" not in vars(whole):
        whole.logit_form = logit_form(whole.config)
    head, form = whole.get_output_embeddings(), whole.logit_form
    return token_logprobs(hidden, head, targets, temperature, chunk, others, kept, form, _adapter_of(head, hidden))


def _adapter_of(head: Any, hidden: Tensor) -> HeadAdapter | None:
    """Return what the active adapter adds to the head, if peft has wrapped it and the adapter includes it."""
    inner = getattr(head, "lora_A", None)
    name = None if inner is None or head.disable_adapters else head.active_adapters[0]
    if inner is None or name not in inner:
        return None
    return HeadAdapter(inner[name](hidden) * head.scaling[name], head.lora_B[name].weight.to(hidden.dtype))


class Scorer(nn.Module):
    """`score` as a module, for a model whose parameters exist only while a module around them runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Scored:
        return score(self.model, *arguments)

    def scored(self, *arguments: Any) -> Scored:
        made: Scored = self(*arguments)
        if not torch.is_grad_enabled():
            self.reshard()  # FSDP leaves that to the backward pass; without one, a later update would not be seen
        return made

    def reshard(self) -> None:
        """Reshard the model, if FSDP wraps it."""


def score_empty(model: nn.Module, device: str) -> Tensor:
    """A pass for a rank without work: its result is zero, with a gradient of zeros for every parameter."""
    laid_out = lay_out_tokens(model, np.zeros(2, np.int32), np.array([2]), device, share=False)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    scored = score(model, laid_out, one, one, None, 1)
    return (scored.logprobs * 0.0).sum()


def vocabulary_of(model: nn.Module) -> int:
    """The number of tokens that its head distinguishes."""
    whole: Any = language_model(model)
    return int(whole.config.get_text_config(decoder=True).vocab_size)


def language_model(model: Any) -> Any:
    """The transformers model itself, even if an adapter library or `Scorer` has wrapped it. (Neither is fully typed.)"""
    model = model.model if isinstance(model, Scorer) else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _freeze_all_but_language(model: Any) -> None:
    """Freeze the parts of a model that only images reach, which a run without images cannot train."""
    if decoder(model) is model.base_model:
        return
    head = model.get_output_embeddings()
    trained = {id(one) for part in (decoder(model), head) if part is not None for one in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def _fill_buffers(model: PreTrainedModel, device: str) -> None:
    """Fill buffers, which are not weights: they follow from the configuration. Most modules can compute their own; otherwise they are
    taken from a second model, whose constructor has computed them."""
    owner: Any = model  # the nearest model above a module, such as the part that sees images: it knows its own modules
    constructed: dict[str, Tensor] | None = None
    with torch.no_grad():
        for path, module in model.named_modules():  # a model comes before its parts
            owner = module if isinstance(module, PreTrainedModel) else owner
            waiting = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            if not waiting:
                continue
            for name, buffer in waiting.items():
                setattr(module, name, torch.full_like(buffer, _unlikely(buffer.dtype), device=device))
            owner._init_weights(module)
            for name in waiting:
                if _is_unlikely(getattr(module, name)).any():
                    constructed = _constructed_buffers(model) if constructed is None else constructed
                    setattr(module, name, constructed[f"{path}.{name}"].to(device))


def _constructed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers of the same model as its constructor leaves them. Its parameters have no memory but one at a time."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter if parameter is None else nn.Parameter(parameter.to("meta")))

    nn.Module.register_parameter = without_memory  # type: ignore[assignment]
    try:
        with no_init_weights():
            made = type(model)(model.config)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return dict(made.named_buffers())


def _unlikely(dtype: torch.dtype) -> float | int:
    """A value that no buffer has."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_unlikely(buffer: Tensor) -> Tensor:
    return torch.isnan(buffer) if buffer.dtype.is_floating_point else buffer == torch.iinfo(buffer.dtype).min
