"""Sample tokens from logits. A row's token depends only on its own logits, seed and position, never on other rows.

The uniforms of a row are a Philox stream keyed by the row's seed, one per position. A token is picked by inverting the
cumulative probabilities, in float64 and in vocabulary order, so a rounding error in the logits rarely changes the token.
"""

from __future__ import annotations

from typing import NamedTuple

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


class SampledRows(NamedTuple):
    """The tokens sampled for each of B rows."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    kept: list[NDArray[np.int32] | None]  # ids of the tokens that a row kept; None: nothing was cut


@torch.inference_mode()
def choose(
    logits: torch.Tensor,  # [B, V]
    uniform: NDArray[np.float64],  # [B]
    temperature: NDArray[np.float64],  # [B] 0 is greedy
    top_p: NDArray[np.float64],  # [B]
    top_k: NDArray[np.int64],  # [B] 0 is all
    min_p: NDArray[np.float64],  # [B] 0 is none
) -> SampledRows:
    """Choose a token for each row.

    Its logprob refers to the distribution that was sampled from, after temperature, min-p, top-k and top-p. For a greedy row it
    refers to the model's own distribution (temperature 1)."""
    rows = max(1, _ELEMENTS // logits.shape[-1])
    parts = [
        _choose(logits[part], uniform[part], temperature[part], top_p[part], top_k[part], min_p[part])
        for part in (slice(at, at + rows) for at in range(0, len(logits), rows))
    ]
    # The one wait for the device, and a second one if something was cut.
    both = (torch.cat([part[0] for part in parts], dim=1) if len(parts) > 1 else parts[0][0]).cpu().numpy()
    cut = (top_p < 1) | (top_k > 0) | (min_p > 0)
    kept = [ids for at, part in enumerate(parts) for ids in _ids_of(part[1], cut[at * rows : (at + 1) * rows])]
    return SampledRows(both[0].astype(np.int64), np.log(both[1]), kept)


def _ids_of(mask: torch.Tensor | None, cut: NDArray[np.bool_]) -> list[NDArray[np.int32] | None]:
    """Return the ids of the kept tokens of each row of a mask [B, V]; None for a row that asks for no cut."""
    if mask is None:
        return [None] * len(cut)
    there = mask[torch.from_numpy(cut).to(mask.device)]
    row, ids = (column.cpu().numpy() for column in there.nonzero(as_tuple=True))
    split = iter(np.split(ids.astype(np.int32), np.searchsorted(row, np.arange(1, len(there)))))
    return [next(split) if one else None for one in cut.tolist()]


def _choose(
    logits: torch.Tensor,
    uniform: NDArray[np.float64],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # [2, B] float64: token, probability; and a mask [B, V] of what was kept
    device = logits.device
    greedy = temperature == 0
    scaled = logits.to(torch.float64)
    if not (temperature == 1).all():
        scaled = scaled / torch.from_numpy(np.where(greedy, 1.0, temperature)).to(device)[:, None]
    p = torch.softmax(scaled, dim=-1)  # [B, V]
    kept: torch.Tensor | None = None
    if (top_p < 1).any() or (top_k > 0).any() or (min_p > 0).any():
        kept = _kept(p, *(torch.from_numpy(one).to(device) for one in (top_p, top_k, min_p)))
        p = p * kept
    cumulated = p.cumsum(-1)
    total = cumulated[:, -1]
    # Strictly below the total, so that the token has a probability above 0 however `u * total` rounds.
    at = torch.minimum(torch.from_numpy(uniform).to(device) * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulated, at[:, None], right=True)
    if greedy.any():
        token = torch.where(torch.from_numpy(greedy).to(device)[:, None], logits.argmax(-1, keepdim=True), token)
    token = token.clamp_(max=p.shape[-1] - 1)  # only if a logit is NaN, which the caller reports
    return torch.stack([token[:, 0].to(torch.float64), p.gather(1, token)[:, 0] / total]), kept


def _kept(p: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, V], True for each token that is kept (`types.Sampling` has the order). A row that asks for nothing keeps all.

    Of equally likely tokens at the boundary, those with the lowest ids are kept."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    vocabulary = p.shape[-1]
    rank = torch.arange(vocabulary, device=p.device)
    ordered = ordered * (rank < torch.where(top_k > 0, top_k, vocabulary)[:, None])
    ordered = ordered * (ordered >= min_p[:, None] * ordered[:, :1])
    cumulated = ordered.cumsum(-1)
    # A row that asks for no top-p keeps all: `cumulated` may round to its total before the last token.
    enough = torch.where(top_p < 1, top_p * cumulated[:, -1], torch.inf)
    stays = (cumulated - ordered < enough[:, None]) & (ordered > 0)
    stays |= ((top_p >= 1) & (top_k == 0) & (min_p == 0))[:, None]  # also what has a probability of 0
    return torch.zeros_like(stays).scatter_(1, order, stays)
