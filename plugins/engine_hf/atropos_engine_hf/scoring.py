"""Score given tokens by plain forward passes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from atropos_core.types import Floats, Tokens, TopK, offsets_of
from atropos_engine_hf.decoder import some_logits

_LOGITS = 1 << 26  # [rows, tokens, vocabulary] at once: 256 MB in float32


@torch.inference_mode()
def score(model: Any, sequences: Sequence[Tokens], temperature: float, *, resumes: bool = True) -> list[Floats]:
    """Return logprobs f32[T] for each sequence; entry 0 is 0. Temperature 0 counts as 1, as in sampling. `resumes`: a pass over some
    tokens can continue from keys and values of those before."""
    most = len(sequences) if resumes else _rows(model, sequences)
    if len(sequences) > most:
        return [
            row
            for at in range(0, len(sequences), most)
            for row in score(model, sequences[at : at + most], temperature, resumes=False)
        ]
    tokens = _padded(model, sequences)
    scored = torch.zeros(tokens.shape, dtype=torch.float32, device=model.device)
    for start, logits in _logits(model, tokens, temperature, resumes):
        end = start + logits.shape[1]
        chosen = logits.gather(-1, tokens[:, start + 1 : end + 1, None])[..., 0]
        scored[:, start + 1 : end + 1] = chosen - logits.logsumexp(-1)
    found = scored.cpu().numpy()
    return [row[: len(sequence)].copy() for row, sequence in zip(found, sequences, strict=True)]


@torch.inference_mode()
def likeliest(
    model: Any, sequences: Sequence[Tokens], k: int, temperature: float, *, resumes: bool = True
) -> list[TopK]:
    """Return the k most likely tokens (at most the vocabulary) at each position except the first, for each sequence.

    Temperature 0 counts as 1. For `resumes` see `score`."""
    most = len(sequences) if resumes else _rows(model, sequences)
    if len(sequences) > most:
        return [
            row
            for at in range(0, len(sequences), most)
            for row in likeliest(model, sequences[at : at + most], k, temperature, resumes=False)
        ]
    tokens = _padded(model, sequences)
    k = min(k, model.get_input_embeddings().weight.shape[0])
    ids = np.zeros((*tokens.shape, k), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    for start, logits in _logits(model, tokens, temperature, resumes):
        best = logits.topk(k)
        at = slice(start + 1, start + logits.shape[1] + 1)
        ids[:, at] = best.indices.cpu().numpy()
        logprobs[:, at] = (best.values - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    made = []
    for row, sequence in enumerate(sequences):
        counts = np.full(len(sequence), k, np.int64)
        counts[:1] = 0
        at = slice(1, len(sequence))
        made.append(TopK(offsets_of(counts), ids[row, at].reshape(-1), logprobs[row, at].reshape(-1)))
    return made


def _padded(model: Any, sequences: Sequence[Tokens]) -> Tensor:
    """Return the tokens as [S, T], padded on the right: no layer of a causal model looks ahead, so this needs no mask."""
    ids = np.zeros((len(sequences), max(len(sequence) for sequence in sequences)), dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(ids).to(model.device)


def _rows(model: Any, sequences: Sequence[Tokens]) -> int:
    """Return how many of the sequences have all their logits in one segment."""
    longest = max(len(sequence) for sequence in sequences)
    return max(1, _LOGITS // (longest * int(model.get_input_embeddings().weight.shape[0])))


def _logits(model: Any, tokens: Tensor, temperature: float, resumes: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield a start position and the logits [S, n, V] at the n positions from there. Entry i predicts token start + i + 1.

    A model that cannot resume reads the tokens before a segment again."""
    rows, longest = tokens.shape
    segment = max(1, _LOGITS // (rows * model.get_input_embeddings().weight.shape[0]))
    cache = DynamicCache(config=model.config) if resumes and segment < longest - 1 else None
    for start in range(0, longest - 1, segment):
        end = min(start + segment, longest - 1)
        if cache is not None:
            output = model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True)
        else:
            output = model(input_ids=tokens[:, :end], use_cache=False, **some_logits(model, end - start))
        logits = output.logits[:, start - end :].float()
        yield start, logits if temperature in (0.0, 1.0) else logits / temperature
