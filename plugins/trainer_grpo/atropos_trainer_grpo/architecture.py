"""Measures on a small copy of a model what packed training has to provide: how the output of its head becomes logits, and what its
attention has beyond plain causal attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from atropos_core.errors import FitError
from atropos_torch_models.small_model import small_model

_RECORDING = "atropos_recording"  # among transformers' attention functions
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")
_CANNOT = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    KeyError,
)  # of a model that wants more than tokens
_CLOSE = 1e-5  # of the spread of logits, in float32


@dataclass(frozen=True)
class LogitForm:
    """How the output x of a model's head becomes logits: scale * x, and with a cap, cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def of(self, x: Tensor) -> Tensor:
        return x * self.scale if self.cap is None else self.cap * torch.tanh(x * self.scale / self.cap)


PLAIN = LogitForm()


@dataclass(frozen=True)
class Architecture:
    logits: LogitForm | None  # None: of no known form
    attention: frozenset[str]  # of: window, softcap, sinks, value width

    @property
    def plain_attention(self) -> bool:
        """Return true if FlashAttention's kernels compute it, at least for sequences that a window holds whole."""
        return self.attention <= {"window"}


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return what a model of this configuration asks for. Takes a tenth of a second, once for a configuration in a process."""
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(config)
    return _KNOWN[key]


def logit_form(config: PreTrainedConfig) -> LogitForm:
    """Return the form of a model's logits. Raises FitError if it is none of the known ones."""
    form = architecture_of(config).logits
    if form is None:
        raise FitError(f"it is not known how a {config.model_type!r} model makes logits from its head's output.")
    return form


def decoder(whole: Any) -> Any:
    """The body of a transformers model that maps tokens to hidden states; of a model that also sees images, its language part."""
    body = (
        whole.base_model if whole.base_model is not whole else whole.model
    )  # Llama 4 names that of its multimodal class
    return getattr(body, "language_model", body)


def as_read(whole: Any, tokens: Tensor) -> Tensor:
    """Return tokens as the decoder of this model reads them. Gemma 4 with images reads a token that stands for an image, a video or
    a sound as padding (transformers, `Gemma4Model.forward`), also one that was sampled."""
    config = whole.config
    if config.model_type not in ("gemma4", "gemma4_unified"):
        return tokens
    media = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    stands_for_media = torch.isin(tokens, torch.tensor([one for one in media if one is not None], device=tokens.device))
    return torch.where(stands_for_media, config.text_config.pad_token_id, tokens)


_KNOWN: dict[str, Architecture] = {}


def _measured(config: PreTrainedConfig) -> Architecture:
    model: Any = small_model(config)
    tokens = torch.arange(3, 35)[None]
    asked: set[str] = set()

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **rest: Any) -> Any:
        names = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
        asked.update(short for name, short in names.items() if rest.get(name) is not None)
        asked.update({"value width"} if value.shape[-1] != key.shape[-1] else ())
        kept = {name: rest[name] for name in ("scaling", "dropout") if name in rest}
        return sdpa_attention_forward(module, query, key, value, mask, **kept)

    with torch.no_grad():
        form = _logit_form(model, tokens, config.get_text_config(decoder=True))
        if model._supports_attention_backend:
            AttentionInterface.register(_RECORDING, record)
            model.set_attn_implementation(_RECORDING)
            try:
                model(input_ids=tokens, use_cache=False)
            except _CANNOT:
                asked.add("another function")
    return Architecture(form, frozenset(asked))


def _logit_form(model: PreTrainedModel, tokens: Tensor, config: Any) -> LogitForm | None:
    """Of the forms that this configuration may mean, the one that gives the logits of the small model, whose numbers are its own."""
    whole: Any = model
    small = whole.config.get_text_config(decoder=True)
    head = whole.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return None
    try:
        hidden = decoder(whole)(input_ids=tokens, use_cache=False).last_hidden_state
        logits, raw = whole(input_ids=tokens, use_cache=False).logits, head(hidden)
    except _CANNOT:
        return None
    close = _CLOSE * logits.std()
    for ours, form in zip(_forms(small), _forms(config), strict=True):
        if (ours.of(raw) - logits).abs().max() < close:
            return form
    return None


def _forms(config: Any) -> list[LogitForm]:
    numbers = [_number(config, name) for name in _SCALES]
    if _number(config, "dim_model_base"):  # MiniCPM 3
        numbers.append(config.dim_model_base / config.hidden_size)
    scales = [1.0, *(by for number in numbers if number for by in (number, 1 / number))]
    caps = [None, *(cap for name in _CAPS if (cap := _number(config, name)))]
    return [LogitForm(scale, cap) for cap in caps for scale in scales]


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else 0.0
