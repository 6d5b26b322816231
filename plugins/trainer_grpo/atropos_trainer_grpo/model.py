"""Open a causal language model for packed training, with its weights or as a skeleton that a bridge fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from atropos_core.errors import FitError, WeightsMismatch
from atropos_torch_models.model_directory import OWN_CODE_REMEDY, needs_own_code
from atropos_trainer_grpo.architecture import logit_form
from atropos_trainer_grpo.attention import NAME, attention_of, register
from atropos_trainer_grpo.kept_tokens import KeptRows
from atropos_trainer_grpo.logprobs import Scored, token_logprobs
from atropos_trainer_grpo.packed_rows import Packing, pack

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def open_model(
    directory: Path, *, dtype: str, device: str, with_weights: bool, at: str | None = None, attention: str = "auto"
) -> PreTrainedModel:
    """Open the model in evaluation mode (no dropout). Without weights its parameters are on the meta device and its buffers
    (rotary frequencies) on `device`. With weights all is on `device`, or for the time being on `at`. Raises FitError
    for a model that cannot be trained packed."""
    if (directory / "adapter_config.json").exists():
        raise FitError(
            f"{directory} holds an adapter, but training starts from a whole model.",
            remedy="Merge it first: AutoModelForCausalLM.from_pretrained(...), peft's merge_and_unload(), save_pretrained(...).",
        )
    register()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if own := needs_own_code(directory):
            raise FitError(f"{own}.", remedy=OWN_CODE_REMEDY) from error
        raise
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)  # with dropout the trained policy would not be the sampled one
    _check(config, directory)
    stored = torch.float32 if torch.device(device).type == "cpu" else config.dtype
    wanted: Any = stored if dtype == "auto" else getattr(torch, dtype)
    config.dtype = wanted
    attention_of(attention, config, device)  # refused before anything is loaded
    model: Any  # transformers' own classes are typed in part
    if with_weights:
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=wanted, attn_implementation=NAME, trust_remote_code=False
        )
        model = model.to(at or device)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, attn_implementation=NAME)
        _fill_buffers(model, device)
    if not getattr(model, "_supports_attention_backend", False):
        raise FitError(
            f"{type(model).__name__} has its own attention code, which this trainer cannot pack: use another model."
        )
    if type(model.get_output_embeddings()) is not nn.Linear:
        raise FitError(f"{type(model).__name__} has no plain linear language-model head, which this trainer needs.")
    model.eval()
    made: PreTrainedModel = model
    return made


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
    packing: Packing,
    predicts: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    chunk: int,
    others: Tensor | None = None,
    kept: KeptRows | None = None,
) -> Scored:
    """One forward pass over a packing: logprobs of `targets` [R], and of `others` [R, K], at the packed positions `predicts`
    [R] before them; of the distribution over the `kept` tokens of each."""
    if isinstance(model, Scorer):
        return model.scored(packing, predicts, targets, temperature, chunk, others, kept)
    whole = language_model(model)
    hidden = whole.base_model(
        input_ids=packing.tokens, position_ids=packing.positions, use_cache=False, packing=packing
    ).last_hidden_state[0]
    head = whole.get_output_embeddings()
    if "logit_form" not in vars(whole):
        whole.logit_form = logit_form(whole.config)
    form = whole.logit_form
    return token_logprobs(hidden.index_select(0, predicts), head, targets, temperature, chunk, others, kept, form)


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
    tokens = np.zeros(2, np.int32)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    scored = score(model, pack(tokens, np.array([2]), device), one, one, None, 1)
    return (scored.logprobs * 0.0).sum()


def vocabulary_of(model: nn.Module) -> int:
    """The number of tokens that its head distinguishes."""
    whole: Any = language_model(model)
    return int(whole.config.get_text_config(decoder=True).vocab_size)


def language_model(model: Any) -> Any:
    """The transformers model itself, even if an adapter library or `Scorer` has wrapped it. (Neither is fully typed.)"""
    model = model.model if isinstance(model, Scorer) else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check(config: Any, directory: Path) -> None:
    other = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if other:
        raise FitError(
            f"{directory}: layers of kind {sorted(other)} would mix packed sequences; this trainer supports only attention."
        )
    logit_form(config)


def _fill_buffers(model: PreTrainedModel, device: str) -> None:
    """Fill buffers, which are not weights: they follow from the configuration, and each module can compute its own."""
    with torch.no_grad():
        for module in model.modules():
            waiting = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            if not waiting:
                continue
            for name, buffer in waiting.items():
                setattr(module, name, torch.full_like(buffer, float("nan"), device=device))
            model._init_weights(module)
            if any(torch.isnan(getattr(module, name)).any() for name in waiting):
                raise FitError(
                    f"{type(model).__name__}: {type(module).__name__} does not compute its buffers {sorted(waiting)}."
                )
