"""Decode steps of fixed shapes, recorded once as a CUDA graph and replayed.

A step of eager torch launches some hundred kernels, which takes the host longer than a GPU needs for them. A replay launches all of
them at once. It reads and writes fixed addresses: `StepGraphs` keeps the rows' tokens, lengths, uniforms and sampling parameters on the
device, and each step leaves there what the next one needs. So the host uploads rows only when some have come or gone, and waits for the
device once, to fetch the sampled tokens with their probabilities.

Shapes are rounded up, so that few graphs serve all steps: see `rounded_rows` and `rounded_columns`. A graph reads weights at the
addresses that they had when it was recorded. New values written there are seen; if addresses change, the graphs are recorded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_core.errors import FitError
from atropos_engine_hf.decode_path import NO_GRAPHS, NOT_IN_SLOTS
from atropos_engine_hf.decoder import Decoder, SlotDecoder
from atropos_engine_hf.experts import Numbers, as_numbers
from atropos_engine_hf.sampler import BLOCK, Branches, SampledRows, Settings, cuts, sample, sampled_rows
from atropos_engine_hf.transfers import joined, packed, parts, set_bits, upload

# Of the device's state [rows, STATE], float64, which holds tokens and lengths exactly: the first columns of settings and of uniforms.
SETTINGS, UNIFORMS = 4, 8
STATE = UNIFORMS + BLOCK
# Token, length, sampled tokens, by how much both grow in a step; temperature, top_p, top_k, min_p. These write into column 0 of a slot
# that no row has.
PADDING = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0)


class Capture(Protocol):
    """Records what a function launches."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return what repeats it on the same memory and returns its result. Raises RuntimeError if it cannot be recorded."""


class CudaCapture:
    """Records CUDA graphs. Those of one object share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._present: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if not self._present:  # torch takes no pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = function()
        self._present.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return made

        return replay


class Shape(NamedTuple):
    """The sizes and branches that decide which kernels a step launches."""

    rows: int
    columns: int
    needed: Branches


class SampledStep(NamedTuple):
    sampled: SampledRows
    experts: list[Numbers]  # as `Decoder.experts`


def rounded_rows(count: int, most: int) -> int:
    """Return 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, ...: at least `count`, and at most `most`."""
    power = 1 << (count - 1).bit_length()
    step = power if power <= 16 else max(16, power // 4)
    return min(-(-count // step) * step, most)


def rounded_columns(count: int, most: int) -> int:
    """Return a multiple of 128, and above 1024 of an eighth of the next power of two: at least `count`, and at most `most`."""
    step = max(128, (1 << (count - 1).bit_length()) // 8)
    return min(-(-count // step) * step, most)


class StepGraphs:
    """The steps of one batch. `load` before the first step, and whenever rows have come, gone or moved."""

    def __init__(self, decoder: SlotDecoder, capture: Capture) -> None:
        self._decoder = decoder
        self._capture = capture
        self.replayed = 0  # steps so far
        self._graphs: dict[Shape, Callable[[], torch.Tensor]] = {}
        self._layouts: dict[Shape, list[torch.Tensor]] = {}  # of the results, without memory
        self._allocations = -1  # of the cache, when `_state` was made
        self._state: torch.Tensor
        self._rows: NDArray[np.float64] | None = None  # to upload before the next step
        # The weights that graphs read: kept, so that nothing else gets their addresses.
        self._weights: list[tuple[int, torch.UntypedStorage]] = []

    def load(self, token: Any, length: Any, sampled: Any, given: Settings, uniforms: NDArray[np.float64]) -> None:
        """Set the rows: each one's last token, the tokens before it, how many were sampled, and the uniforms of their block."""
        count = len(token)
        rows = np.zeros((rounded_rows(count, self._decoder.cache.place.slots), STATE))
        rows[:, :UNIFORMS] = PADDING
        values = (token, length, sampled, 1.0, given.temperature, given.top_p, given.top_k, given.min_p)
        for place, value in enumerate(values):
            rows[:count, place] = value
        rows[:count, UNIFORMS:] = uniforms
        self._rows = rows

    @torch.inference_mode()
    def step(self, longest: int, given: Settings) -> SampledStep:
        """Sample one token for each row. `longest`: tokens of the longest row, the new one not included."""
        place, count = self._decoder.cache.place, len(given.uniform)
        if self._allocations != place.allocations:
            self.forget()
            self._state = torch.zeros(place.slots, STATE, dtype=torch.float64, device=self._decoder.device)
            self._allocations = place.allocations
        rows = rounded_rows(count, place.slots)
        shape = Shape(rows, rounded_columns(longest, place.columns), Branches.of(given))
        if self._rows is not None:
            self._state[:rows].copy_(upload(self._rows, self._decoder.device), non_blocking=True)
            self._rows = None
        # Not at the first step of a shape: it makes what is made lazily, such as workspaces.
        if shape in self._layouts and shape not in self._graphs:
            self._record(shape)
        if replay := self._graphs.get(shape):
            made = replay()
            self.replayed += 1
        else:
            made = self._compute(shape)
        return self._fetched(made, shape, given)

    def weights_moved(self) -> None:
        """Drop the graphs if the model has weights at other addresses than those that they read."""
        if self._weights and [at for at, _ in self._weights] != [at for at, _ in self._present()]:
            self._graphs, self._layouts, self._weights = {}, {}, []

    def forget(self) -> None:
        """Drop all graphs and rows, and their memory."""
        self._graphs, self._layouts, self._weights = {}, {}, []
        self._allocations = -1
        self._state = torch.empty(0)

    # -- inside

    def _present(self) -> list[tuple[int, torch.UntypedStorage]]:
        model = self._decoder.model
        return [(one.data_ptr(), one.untyped_storage()) for one in (*model.parameters(), *model.buffers())]

    def _record(self, shape: Shape) -> None:
        self._weights = self._weights or self._present()
        before = self._state.clone()
        try:
            self._graphs[shape] = self._capture(lambda: self._compute(shape))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            kind = self._decoder.model.config.model_type
            raise FitError(
                f"engine 'hf' cannot record a decode step of this {kind!r} model as a CUDA graph: {error}",
                remedy=NO_GRAPHS,
            ) from error
        self._state.copy_(before)  # for a capture that computes what it records

    def _compute(self, shape: Shape) -> torch.Tensor:
        """Compute a step from the state, and change that for the next one. Returns its results as bytes."""
        decoder, state = self._decoder, self._state[: shape.rows]
        token, length, sampled, grows = state[:, :SETTINGS].unbind(1)
        if decoder.routers is not None:
            decoder.routers.start()
        logits = decoder.decode_on_device(token.to(torch.int64), length.to(torch.int64), shape.columns)
        at = (sampled % BLOCK).to(torch.int64)
        uniform = state[:, UNIFORMS:].gather(1, at[:, None])[:, 0]
        chosen, mask = sample(logits, Settings(uniform, *state[:, SETTINGS:UNIFORMS].unbind(1)), shape.needed)
        results = [chosen]
        if mask is not None:
            results.append(packed(mask))
        if decoder.routers is not None:
            results.append(decoder.routers.taken_on_device(shape.rows))
        self._layouts[shape] = [torch.empty_like(one, device="meta") for one in results]
        token.copy_(chosen[0])
        length.add_(grows)
        sampled.add_(grows)
        return joined(results)

    def _fetched(self, made: torch.Tensor, shape: Shape, given: Settings) -> SampledStep:
        count = len(given.uniform)
        chosen, *others = parts(made.cpu().numpy(), self._layouts[shape])  # the one wait for the device
        places = set_bits(others.pop(0)[:count][cuts(given)]) if shape.needed.cut else None
        experts = [as_numbers(one)[:count] for one in others]
        return SampledStep(sampled_rows(chosen[:, :count], places, given), list(experts[0]) if experts else [])


def check_recording(decoder: Decoder, capture: Capture) -> None:
    """Record a step of one empty row. Raises FitError if the decoder has other steps than `StepGraphs` records, or a model that cannot be
    recorded."""
    if not isinstance(decoder, SlotDecoder):
        raise FitError(NOT_IN_SLOTS.format(kind=decoder.model.config.model_type), remedy=NO_GRAPHS)
    decoder.reserve(1, 1)
    graphs = StepGraphs(decoder, capture)
    one = np.zeros(1)
    given = Settings(one, one + 1, one + 1, one, one)
    graphs.load(one, one, one, given, np.zeros((1, BLOCK)))
    for _ in range(2):  # the second one is recorded
        graphs.step(1, given)
    graphs.forget()
    decoder.release()
