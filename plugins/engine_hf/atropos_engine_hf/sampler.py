"""Sample tokens from logits. A row's token depends only on its own logits, seed and position, never on other rows.

The uniforms of a row are a Philox stream keyed by the row's seed, one per position. A token is picked by inverting the
cumulative probabilities, in float64 and in vocabulary order, so a rounding error in the logits rarely changes the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_engine_hf.transfers import download, packed, set_bits, upload

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


class Settings(NamedTuple):
    """How each of B rows is sampled: arrays on the host, or float64 tensors on the device."""

    uniform: Any  # in [0, 1)
    temperature: Any  # 0 is greedy
    top_p: Any  # 1 is all
    top_k: Any  # 0 is all
    min_p: Any  # 0 is none


class Branches(NamedTuple):
    """The parts of the computation that some row needs. The host decides this, so that the device need not be asked."""

    tempered: bool
    greedy: bool
    cut: bool

    @classmethod
    def of(cls, given: Settings) -> Branches:
        return cls(
            tempered=not (given.temperature == 1).all(),
            greedy=bool((given.temperature == 0).any()),
            cut=bool(cuts(given).any()),
        )


def cuts(given: Settings) -> NDArray[np.bool_]:
    """Return [B]: True for each row that keeps only some tokens."""
    cut: NDArray[np.bool_] = (given.top_p < 1) | (given.top_k > 0) | (given.min_p > 0)
    return cut


@torch.inference_mode()
def choose(logits: torch.Tensor, given: Settings) -> SampledRows:  # logits [B, V]
    """Choose a token for each row.

    Its logprob refers to the distribution that was sampled from, after temperature, min-p, top-k and top-p. For a greedy row it
    refers to the model's own distribution (temperature 1)."""
    on_device = Settings(*upload(np.stack(given).astype(np.float64, copy=False), logits.device))
    chosen, mask = sample(logits, on_device, Branches.of(given))
    if mask is None:
        return sampled_rows(download(chosen)[0], None, given)
    if logits.device.type == "cpu":
        places = mask[torch.from_numpy(cuts(given))].nonzero(as_tuple=True)
        return sampled_rows(chosen.numpy(), [one.numpy() for one in places], given)
    fetched, bits = download(chosen, packed(mask))
    return sampled_rows(fetched, set_bits(bits[cuts(given)]), given)


def sampled_rows(
    chosen: NDArray[np.float64], places: Sequence[NDArray[np.int64]] | None, given: Settings
) -> SampledRows:
    """Return what `sample` has chosen. `places`: row and id of each token that the rows that cut have kept; None: no row cuts."""
    return SampledRows(chosen[0].astype(np.int64), np.log(chosen[1]), _kept_ids(places, cuts(given)))


def _kept_ids(places: Sequence[NDArray[np.int64]] | None, cut: NDArray[np.bool_]) -> list[NDArray[np.int32] | None]:
    """Return the ids of the kept tokens of each row; None for a row that asks for no cut."""
    if places is None:
        return [None] * len(cut)
    row, ids = places
    split = iter(np.split(ids.astype(np.int32), np.searchsorted(row, np.arange(1, cut.sum()))))
    return [next(split) if one else None for one in cut.tolist()]


def sample(logits: torch.Tensor, given: Settings, needed: Branches) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [2, B] float64: token and probability; and a mask [B, V] of what was kept, if some row cuts. Waits for nothing."""
    rows = max(1, _ELEMENTS // logits.shape[-1])
    if len(logits) <= rows:
        return _sample(logits, given, needed)
    parts = [slice(at, at + rows) for at in range(0, len(logits), rows)]
    made = [_sample(logits[part], Settings(*(one[part] for one in given)), needed) for part in parts]
    masks = [mask for _, mask in made if mask is not None]
    return torch.cat([one for one, _ in made], dim=1), torch.cat(masks) if masks else None


def _sample(logits: torch.Tensor, given: Settings, needed: Branches) -> tuple[torch.Tensor, torch.Tensor | None]:
    scaled = logits.to(torch.float64)
    greedy = given.temperature == 0
    if needed.tempered:
        scaled = scaled / torch.where(greedy, 1.0, given.temperature)[:, None]
    p = torch.softmax(scaled, dim=-1)  # [B, V]
    kept: torch.Tensor | None = None
    if needed.cut:
        kept = _kept(p, given.top_p, given.top_k.to(torch.int64), given.min_p)
        p = p * kept
    cumulated = p.cumsum(-1)
    total = cumulated[:, -1]
    # Strictly below the total, so that the token has a probability above 0 however `u * total` rounds.
    at = torch.minimum(given.uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulated, at[:, None], right=True)
    if needed.greedy:
        token = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), token)
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
