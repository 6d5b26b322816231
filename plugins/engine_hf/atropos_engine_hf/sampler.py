"""Sample tokens from logits. A row's token depends only on its own logits, seed and position, never on other rows.

The uniforms of a row are a Philox stream keyed by the row's seed, one per position. A token is picked by inverting the
cumulative probabilities, in float64 and in vocabulary order, so a rounding error in the logits rarely changes the token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256  # uniforms of a row that are drawn at once
_PER_COUNT = 4  # Philox4x64: one step of the counter gives four doubles
_KEYS = 1 << 128
_ELEMENTS = 1 << 24  # of [rows, vocabulary] float64 at once: 128 MB


def uniforms(seed: int, block: int) -> NDArray[np.float64]:
    """Return [BLOCK] numbers in [0, 1) for positions from `block * BLOCK` on."""
    return np.random.Generator(np.random.Philox(key=seed % _KEYS, counter=block * BLOCK // _PER_COUNT)).random(BLOCK)


@torch.inference_mode()
def choose(
    logits: torch.Tensor,  # [B, V]
    uniform: NDArray[np.float64],  # [B]
    temperature: NDArray[np.float64],  # [B] 0 is greedy
    top_p: NDArray[np.float64],  # [B]
    top_k: NDArray[np.int64],  # [B] 0 is all
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a token and its logprob for each row.

    The logprob refers to the distribution that was sampled from, after temperature, top-p and top-k. For a greedy row it
    refers to the model's own distribution (temperature 1)."""
    rows = max(1, _ELEMENTS // logits.shape[-1])
    parts = [
        _choose(logits[part], uniform[part], temperature[part], top_p[part], top_k[part])
        for part in (slice(at, at + rows) for at in range(0, len(logits), rows))
    ]
    both = (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).cpu().numpy()  # the one wait for the device
    return both[0].astype(np.int64), np.log(both[1])


def _choose(
    logits: torch.Tensor,
    uniform: NDArray[np.float64],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
) -> torch.Tensor:  # [2, B] float64: token, probability
    device = logits.device
    greedy = temperature == 0
    scaled = logits.to(torch.float64)
    if not (temperature == 1).all():
        scaled = scaled / torch.from_numpy(np.where(greedy, 1.0, temperature)).to(device)[:, None]
    p = torch.softmax(scaled, dim=-1)  # [B, V]
    if (top_p < 1).any() or (top_k > 0).any():
        p = p * _kept(p, torch.from_numpy(top_p).to(device), torch.from_numpy(top_k).to(device))
    cumulated = p.cumsum(-1)
    total = cumulated[:, -1]
    # Strictly below the total, so that the token has a probability above 0 however `u * total` rounds.
    at = torch.minimum(torch.from_numpy(uniform).to(device) * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulated, at[:, None], right=True)
    if greedy.any():
        token = torch.where(torch.from_numpy(greedy).to(device)[:, None], logits.argmax(-1, keepdim=True), token)
    token = token.clamp_(max=p.shape[-1] - 1)  # only if a logit is NaN, which the caller reports
    return torch.stack([token[:, 0].to(torch.float64), p.gather(1, token)[:, 0] / total])


def _kept(p: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, V], 1 for each token that is kept.

    Of the `top_k` most likely tokens, keep the fewest that hold `top_p` of their joint probability."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    vocabulary = p.shape[-1]
    rank = torch.arange(vocabulary, device=p.device)
    ordered = ordered * (rank < torch.where(top_k > 0, top_k, vocabulary)[:, None])
    cumulated = ordered.cumsum(-1)
    # A row that asks for no top-p keeps all: `cumulated` may round to its total before the last token.
    enough = torch.where(top_p < 1, top_p * cumulated[:, -1], torch.inf)
    stays = (cumulated - ordered < enough[:, None]) & (ordered > 0)
    return torch.zeros_like(p).scatter_(1, order, stays.to(p.dtype))
