"""Rows in the model's own cache, for models whose layers remember something other than all keys and values: a window of them, a state
that each token changes, both.

Such a cache has rows of one length. Shorter ones are padded on the left, and `attention_mask` and `position_ids` say so. Each distinct
prompt is prefilled once; its rows are copies of that. A cache grows by concatenation, so each step copies all keys and values, which
the slots of cache.py do not.

Rows that enter later get a cache of their own in the prefill, which is then joined with the present one: it is padded on the left
too, and is decoded in the same passes from then on. Caches of a class that is not known here are not joined. Their rows are a cohort
of their own, decoded in turn with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from atropos_core.types import Tokens
from atropos_engine_hf.decode_path import RowBytes
from atropos_engine_hf.decoder import Decoder, Logits, some_logits
from atropos_engine_hf.experts import Numbers

KNOWN = tuple(
    getattr(cache_utils, name)
    for name in (
        "DummyLayer",
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)  # older releases of transformers lack some
)


@dataclass
class Cohort:
    """Rows that are decoded in one pass. Row i of the cache is slot `slots[i]`, in ascending order."""

    cache: Any
    slots: NDArray[np.int64]
    columns: int  # tokens of each row in the cache, padding included


class CohortDecoder(Decoder):
    """Rows in caches of the model's own. With `equal_lengths`, no row is ever padded: for models in which padding changes results."""

    def __init__(self, model: Any, *, equal_lengths: bool = False) -> None:
        super().__init__(model)
        self.cohorts: list[Cohort] = []
        self.row_bytes = RowBytes()
        self._equal_lengths = equal_lengths
        # Models without attention call their cache so. They know no positions, and take a mask only for the prompt.
        self._recurrent = "cache_params" in self.takes

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Tokens], copies: Sequence[int], first: int) -> Logits:
        slots = np.split(np.arange(first, first + sum(copies)), np.cumsum(copies)[:-1])
        lengths = np.array([len(prompt) for prompt in prompts])
        order, parts = [], []
        experts: dict[int, Numbers] = {}
        for length in np.unique(lengths) if self._equal_lengths else [lengths.max()]:
            chosen = np.flatnonzero(lengths == length) if self._equal_lengths else np.arange(len(prompts))
            logits, cache = self._read([prompts[int(index)] for index in chosen], int(length))
            if self.routers is not None:
                rows = self.routers.taken(len(chosen))
                experts |= {int(at): row[-lengths[at] :] for at, row in zip(chosen, rows, strict=True)}
            source = self.put(np.repeat(np.arange(len(chosen)), np.asarray(copies)[chosen]))
            select(cache, source)
            own = np.concatenate([slots[int(index)] for index in chosen])
            order.append(own - first)
            parts.append(logits[source])
            self._add(Cohort(cache, own, int(length)))
        self.experts = [experts[at] for at in sorted(experts)]
        return _in_order(parts, order)

    def _read(self, prompts: Sequence[Tokens], columns: int) -> tuple[Logits, Any]:
        """Return the logits after each prompt, and the cache that the model made of them."""
        ids = np.zeros((len(prompts), columns), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, columns - len(prompt) :], mask[row, columns - len(prompt) :] = prompt, 1
        arguments = some_logits(self.model, 1)
        if not self._recurrent or not mask.all():
            arguments["attention_mask"] = self.put(mask)
        if "position_ids" in self.takes:
            arguments["position_ids"] = self.put(np.maximum(mask.cumsum(1) - 1, 0))
        if self.routers is not None:
            self.routers.start()
        output = self.model(input_ids=self.put(ids), use_cache=True, **arguments)
        cache = output.cache_params if self._recurrent else output.past_key_values
        if cache is None:
            raise ValueError("the model keeps what it remembers inside itself, and returns no cache")
        return output.logits[:, -1], cache

    @torch.inference_mode()
    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        made = []
        experts: dict[int, Numbers] = {}
        for cohort in self.cohorts:
            made.append(self.step(cohort, tokens[cohort.slots], lengths[cohort.slots]))
            if self.routers is not None:
                experts |= zip(cohort.slots.tolist(), self.routers.taken(len(cohort.slots)), strict=True)
        self.experts = [experts[slot] for slot in sorted(experts)]
        return _in_order(made, [cohort.slots for cohort in self.cohorts])

    def step(self, cohort: Cohort, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        arguments: dict[str, Any] = {"cache_params" if self._recurrent else "past_key_values": cohort.cache}
        cohort.columns += 1
        if not self._recurrent:
            arguments["attention_mask"] = self._mask(cohort.columns, lengths + 1)
        if "position_ids" in self.takes:
            arguments["position_ids"] = self.put(lengths)[:, None]
        if self.routers is not None:
            self.routers.start()
        logits: torch.Tensor = self.model(input_ids=self.put(tokens)[:, None], use_cache=True, **arguments).logits
        return logits[:, -1]

    def _mask(self, columns: int, lengths: NDArray[np.int64]) -> torch.Tensor:
        """Return [rows, columns]: 1 for a row's tokens, 0 for its padding on the left."""
        return self.put((np.arange(columns) >= columns - lengths[:, None]).astype(np.int64))

    @torch.inference_mode()
    def move(self, to: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        left = []
        for cohort in self.cohorts:
            new = to[cohort.slots]
            rows = np.flatnonzero(new >= 0)
            rows = rows[np.argsort(new[rows])]
            if not len(rows):
                continue
            if len(rows) < len(new) or (np.diff(rows) < 0).any():
                select(cohort.cache, self.put(rows))
                if is_known(cohort.cache):
                    longest = int(lengths[cohort.slots[rows]].max())
                    _cut(cohort.cache, cohort.columns - longest)
                    cohort.columns = longest
            cohort.slots = new[rows]
            left.append(cohort)
        self.cohorts = left

    def forget(self) -> None:
        self.cohorts = []

    def reserve(self, slots: int, columns: int) -> None:
        """Do nothing: the caches grow with their rows."""

    def bytes_for(self, slots: int, columns: int, *, kept: bool) -> int:
        there = self._allocated() if kept and not slots else 0
        return max(slots * self.row_bytes.of(columns), there)

    def _allocated(self) -> int:
        return sum(tensor.nbytes for cohort in self.cohorts for tensor in tensors_of(cohort.cache))

    @property
    def capacity(self) -> tuple[int, int] | None:
        return None

    def release(self) -> None:
        self.cohorts = []

    def measure(self) -> None:
        self.row_bytes = measured_bytes(self.cohorts[0].cache, self.cohorts[0].columns)

    def another(self) -> CohortDecoder:
        made = CohortDecoder(self.model, equal_lengths=self._equal_lengths)
        made.row_bytes, made.routers = self.row_bytes, self.routers
        return made

    def _add(self, new: Cohort) -> None:
        """Join the cohort with one that it can be decoded with."""
        for one in self.cohorts:
            equal = one.columns == new.columns
            if (equal or not self._equal_lengths) and can_join(one.cache, new.cache):
                join(one.cache, new.cache, max(one.columns, new.columns))
                one.slots = np.concatenate([one.slots, new.slots])
                one.columns = max(one.columns, new.columns)
                return
        self.cohorts.append(new)


def select(cache: Any, rows: torch.Tensor) -> None:
    """Make row i of the cache a copy of its row `rows[i]`."""
    own = (
        type(cache).batch_select_indices is not Cache.batch_select_indices
    )  # a cache that reorders only part of itself otherwise
    (cache.batch_select_indices if own else cache.reorder_cache)(rows)


def _in_order(parts: Sequence[Logits], order: Sequence[NDArray[np.int64]]) -> Logits:
    """Return the parts as one, row i of which is the one that `order` gives number i."""
    if len(parts) == 1:
        return parts[0]  # whose rows are in order
    return torch.cat(list(parts))[torch.from_numpy(np.argsort(np.concatenate(order))).to(parts[0].device)]


def is_known(cache: Any) -> bool:
    return type(cache) is DynamicCache and all(type(layer) in KNOWN for layer in cache.layers)


def can_join(one: Any, other: Any) -> bool:
    """Return True if the rows of both caches can be in one."""
    return is_known(one) and is_known(other) and list(map(_filled, one.layers)) == list(map(_filled, other.layers))


def _filled(layer: Any) -> tuple[Any, ...]:
    """Return what the layer holds anything in."""
    keys = getattr(layer, "keys", None) is not None
    if not isinstance(layer, LinearAttentionLayer):
        return (keys,)
    return keys, layer.is_conv_states_initialized, layer.is_recurrent_states_initialized


def join(one: Any, other: Any, columns: int) -> None:
    """Add the other cache's rows to the first, layer by layer. Both then have this many columns, zeros on the left."""
    for mine, its in zip(one.layers, other.layers, strict=True):
        if isinstance(mine, DynamicLayer) and mine.keys is not None and mine.values is not None:
            kept = columns
            if isinstance(mine, DynamicSlidingWindowLayer):
                kept = min(columns, mine.sliding_window - 1)
                mine.cumulative_length = columns
            mine.keys = torch.cat([_padded(mine.keys, kept), _padded(its.keys, kept)])
            mine.values = torch.cat([_padded(mine.values, kept), _padded(its.values, kept)])
            its.keys = its.values = None
        if isinstance(mine, LinearAttentionLayer):
            for states, new in ((mine.conv_states, its.conv_states), (mine.recurrent_states, its.recurrent_states)):
                for index, state in states.items():
                    if state is not None:
                        states[index] = torch.cat([state, new[index]])
                        new[index] = None


def _padded(stored: torch.Tensor, columns: int) -> torch.Tensor:
    return pad(stored, (0, 0, columns - stored.shape[2], 0))


def _cut(cache: Any, columns: int) -> None:
    """Drop this many columns from the left, in which all rows have padding only."""
    for layer in cache.layers if columns else ():
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length -= columns
                kept = min(layer.keys.shape[2], layer.cumulative_length)
            else:
                kept = layer.keys.shape[2] - columns
            layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]


def measured_bytes(cache: Any, columns: int) -> RowBytes:
    """Return the bytes of a row, measured in a cache of rows with `columns` tokens. In a class of cache that is not known here, a
    tensor grows with the tokens if one of its dimensions is their number."""
    found, counted = RowBytes(), set()
    for layer in getattr(cache, "layers", ()):
        if (
            type(layer) in KNOWN
            and isinstance(layer, DynamicLayer)
            and layer.keys is not None
            and layer.values is not None
        ):
            size = (layer.keys.nbytes + layer.values.nbytes) // max(1, layer.keys.shape[0] * layer.keys.shape[2])
            if isinstance(layer, DynamicSlidingWindowLayer):
                most = layer.sliding_window - 1
                found.windows[most] = found.windows.get(most, 0) + size
            else:
                found.token += size
            counted |= {id(layer.keys), id(layer.values)}
        if type(layer) in KNOWN and isinstance(layer, LinearAttentionLayer):
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                if state is not None:
                    found.state += state.nbytes // state.shape[0]
                    counted.add(id(state))
    for tensor in tensors_of(cache):
        if tensor.dim() > 1 and id(tensor) not in counted:
            size = tensor.nbytes // tensor.shape[0]
            found.state += 0 if columns in tensor.shape[1:] else size
            found.token += size // columns if columns in tensor.shape[1:] else 0
    return found


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that a cache holds, in whatever lists, dictionaries and layers."""
    waiting, seen = [cache], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif type(one).__module__.startswith("transformers.") and hasattr(one, "__dict__"):
            waiting.extend(vars(one).values())
