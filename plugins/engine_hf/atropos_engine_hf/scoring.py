"""Logprobs of given tokens, by plain forward passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from atropos_core.types import Floats, Tokens

_LOGITS = 1 << 26  # [rows, tokens, vocabulary] held at once: 256 MB in float32


@torch.inference_mode()
def score(model: Any, sequences: Sequence[Tokens], temperature: float) -> list[Floats]:
    """Per sequence f32[T]; entry 0 is 0. Temperature 0 counts as 1, as in sampling."""
    longest = max(len(sequence) for sequence in sequences)
    ids = np.zeros((len(sequences), longest), dtype=np.int64)  # padded on the right: causal attention needs no mask
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    tokens = torch.from_numpy(ids).to(model.device)
    scored = torch.zeros(tokens.shape, dtype=torch.float32, device=model.device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    segment = max(1, _LOGITS // (len(sequences) * vocabulary))
    cache = DynamicCache(config=model.config) if segment < longest - 1 else None
    for start in range(0, longest - 1, segment):
        end = min(start + segment, longest - 1)
        logits = model(
            input_ids=tokens[:, start:end], past_key_values=cache, use_cache=cache is not None
        ).logits.float()
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        chosen = logits.gather(-1, tokens[:, start + 1 : end + 1, None])[..., 0]
        scored[:, start + 1 : end + 1] = chosen - logits.logsumexp(-1)
    found = scored.cpu().numpy()
    return [row[: len(sequence)].copy() for row, sequence in zip(found, sequences, strict=True)]
