"""The rows that are decoded together, as arrays over slots: a step takes the same Python work for 1 row and for 500.

Entry r of every array belongs to slot r of the decoder's cache. Rows have no gaps between them: when some end, the last rows
move into their slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import TrainingDiverged
from atropos_core.types import Completion, Kept, Sampling, Tokens
from atropos_engine_hf.decoder import Decoder, chunks
from atropos_engine_hf.experts import Numbers, RowExperts
from atropos_engine_hf.graphs import StepGraphs
from atropos_engine_hf.sampler import BLOCK, SampledRows, Settings, choose, uniforms

_ROWS = 16  # the number of slots grows in steps of this size, if memory allows


@dataclass(eq=False)
class SequenceState:
    """One reply of one call. `tokens` is current only while the sequence is not in the batch."""

    owner: Any
    index: int  # among the continuations of its call
    prompt: Tokens
    seed: int
    sampling: Sampling
    tokens: Tokens  # prompt and sampled tokens
    stop_ids: frozenset[int] = frozenset()  # those of its call, in addition to the model's
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # of the sampled tokens
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    kept: list[Tokens | None] = field(default_factory=list)  # of each sampled token; empty if the call cuts nothing
    experts: RowExperts | None = None  # of all positions that were computed, if they are recorded

    @property
    def end(self) -> int:
        """The number of tokens at which the sequence ends."""
        return len(self.prompt) + self.sampling.max_tokens

    def completion(self, stopped: bool) -> Completion:
        return Completion(
            tokens=self.tokens[len(self.prompt) :],
            logprobs=self.logprobs,
            policy_version=self.versions,
            finish="stop" if stopped else "length",
            temperature=self.sampling.temperature,
            truncated=self.sampling.truncated,
            kept=self._kept() if self.sampling.truncated else None,
            experts=None if self.experts is None else self.experts.record(len(self.tokens)),
        )

    def add_experts(self, first: int, numbers: Numbers) -> None:
        """Record the experts of the row's positions from `first` on."""
        if self.experts is None:
            self.experts = RowExperts(self.end, numbers)
        self.experts.add(first, numbers)

    def _kept(self) -> Kept:
        sizes = np.array([0 if ids is None else len(ids) for ids in self.kept], np.int32)
        return Kept(sizes, np.concatenate([np.zeros(0, np.int32), *(ids for ids in self.kept if ids is not None)]))


Finished = tuple[SequenceState, Completion]


class RunningBatch:
    """Rows enter by `admit` and leave by ending, by `remove` or by `evict`."""

    def __init__(
        self,
        decoder: Decoder,
        stop_ids: Collection[int],
        max_rows: int,
        max_bytes: float,
        prefill_tokens: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        """`graphs`: the decoder's steps, if they are to have fixed shapes."""
        self.rows: list[SequenceState] = []
        self._decoder = decoder
        self._graphs = graphs
        self._on_device = False  # True if the device has the rows as they are
        self._stops = np.array(sorted(stop_ids), dtype=np.int64)
        self._max_rows = max_rows
        self._max_bytes = self._free_bytes = max_bytes
        self._prefill_tokens = prefill_tokens
        self._before: tuple[int, int] | None = None  # slots and columns that were released
        self._columns: dict[str, NDArray[Any]] = {
            "length": np.zeros(max_rows, np.int64),  # tokens, of which the cache holds all but the last
            "start": np.zeros(max_rows, np.int64),  # tokens of the prompt
            "end": np.zeros(max_rows, np.int64),
            "has_stop_ids": np.zeros(max_rows, np.bool_),
            "temperature": np.zeros(max_rows),
            "top_p": np.zeros(max_rows),
            "top_k": np.zeros(max_rows, np.int64),
            "min_p": np.zeros(max_rows),
            "uniform": np.zeros((max_rows, BLOCK)),
            "tokens": np.zeros((max_rows, 0), np.int64),
            "logprobs": np.zeros((max_rows, 0), np.float32),
            "versions": np.zeros((max_rows, 0), np.int32),
        }

    def fits(self, row: SequenceState) -> bool:
        """Return True if the row fits into memory as the only one."""
        return self._decoder.bytes_for(1, row.end, kept=False) <= self._max_bytes

    def take(self, waiting: Sequence[SequenceState], elsewhere: int = 0) -> int:
        """Return how many of the waiting rows, counted from the first, fit now. `elsewhere`: bytes that other batches hold."""
        self._free_bytes = self._max_bytes - elsewhere
        end = max((row.end for row in self.rows), default=0)
        for count, row in enumerate(waiting):
            rows, end = len(self.rows) + count + 1, max(end, row.end)
            if rows > self._max_rows or self._bytes(rows, end) > self._free_bytes:
                return count
        return len(waiting)

    def admit(self, rows: Sequence[SequenceState], version: int) -> list[Finished]:
        """Prefill each distinct history once and sample one token of every row."""
        self._reserve(len(self.rows) + len(rows), max(row.end for row in rows))
        sharing: dict[bytes, list[SequenceState]] = {}
        for row in rows:
            sharing.setdefault(row.tokens.tobytes(), []).append(row)
        groups = list(sharing.values())
        for chunk in chunks([len(group[0].tokens) for group in groups], self._prefill_tokens):
            chosen = [groups[index] for index in chunk]
            first = len(self.rows)
            logits = self._decoder.prefill(
                [group[0].tokens for group in chosen], [len(group) for group in chosen], first
            )
            for group, numbers in zip(chosen, self._decoder.experts, strict=bool(self._decoder.experts)):
                for row in group:
                    row.add_experts(0, numbers)
            for row in (row for group in chosen for row in group):
                self._load(len(self.rows), row)
                self.rows.append(row)
            entered = slice(first, len(self.rows))
            self._append_tokens(choose(logits, self._settings(entered)), entered, version)
        return self._finish()

    def step(self, version: int) -> list[Finished]:
        """Sample one more token for every row."""
        slots = slice(0, len(self.rows))
        last = self._columns["length"][slots] - 1
        tokens = self._columns["tokens"][np.arange(len(last)), last]
        given = self._settings(slots)
        if self._graphs is None:
            sampled, experts = choose(self._decoder.decode(tokens, last), given), self._decoder.experts
        else:
            if not self._on_device:
                self._graphs.load(tokens, last, self._sampled(slots), given, self._columns["uniform"][slots])
                self._on_device = True
            sampled, experts = self._graphs.step(int(last.max()) + 1, given)
        if experts:
            for row, position, numbers in zip(self.rows, last.tolist(), experts, strict=True):
                row.add_experts(position, numbers)
        self._append_tokens(sampled, slots, version)
        return self._finish()

    def remove(self, owner: Any) -> None:
        """Drop the rows of this owner."""
        self._close([slot for slot, row in enumerate(self.rows) if row.owner is owner])

    def evict(self) -> list[SequenceState]:
        """Take every row out with its tokens so far. A row that is admitted again continues from there."""
        for slot in range(len(self.rows)):
            self._store(slot)
        rows, self.rows = self.rows, []
        self._decoder.forget()
        return rows

    @property
    def size_bytes(self) -> int:
        """Bytes that are now allocated for keys and values."""
        return self._decoder.bytes_for(0, 0, kept=True)

    def release(self) -> None:
        """Free the memory. Only call it without rows.

        The next batch takes the same size at once, because growing a cache copies it."""
        self._before = self._decoder.capacity or self._before
        self._release()

    def clear(self) -> None:
        """Drop all rows and free the memory."""
        self.rows = []
        self._release()

    def weights_moved(self) -> None:
        """Call this if weights may have other addresses, or the model other layers."""
        if self._graphs is not None:
            self._graphs.weights_moved()

    def close(self) -> None:
        """Drop all rows and the model."""
        self.clear()
        self._decoder.model = None

    # -- inside

    def _release(self) -> None:
        self._decoder.release()
        if self._graphs is not None:
            self._graphs.forget()

    def _reserve(self, rows: int, columns: int) -> None:
        if not self.rows and self._decoder.bytes_for(rows, columns, kept=True) > self._free_bytes:
            self._release()  # an earlier batch was of another shape
        if self._before is not None:
            before, self._before = self._before, None
            if self._bytes(*(most := (max(rows, before[0]), max(columns, before[1])))) <= self._free_bytes:
                self._decoder.reserve(*most)
        more = min(-(-rows // _ROWS) * _ROWS, self._max_rows)  # otherwise each new row would copy all others
        self._decoder.reserve(more if self._bytes(more, columns) <= self._free_bytes else rows, columns)
        for name in ("tokens", "logprobs", "versions"):
            old = self._columns[name]
            if old.shape[1] < columns:
                self._columns[name] = np.zeros((len(old), columns), old.dtype)
                self._columns[name][:, : old.shape[1]] = old

    def _bytes(self, rows: int, columns: int) -> int:
        return self._decoder.bytes_for(rows, columns, kept=bool(self.rows))

    def _load(self, slot: int, row: SequenceState) -> None:
        self._on_device = False
        columns, start, length = self._columns, len(row.prompt), len(row.tokens)
        columns["start"][slot], columns["length"][slot], columns["end"][slot] = start, length, row.end
        columns["has_stop_ids"][slot] = bool(row.stop_ids)
        columns["temperature"][slot] = row.sampling.temperature
        cut = row.sampling.truncated
        columns["top_p"][slot], columns["min_p"][slot] = (row.sampling.top_p, row.sampling.min_p) if cut else (1.0, 0.0)
        columns["top_k"][slot] = row.sampling.most_kept
        columns["uniform"][slot] = uniforms(row.seed, (length - start) // BLOCK)
        columns["tokens"][slot, :length] = row.tokens
        columns["logprobs"][slot, start:length] = row.logprobs
        columns["versions"][slot, start:length] = row.versions

    def _store(self, slot: int) -> None:
        row, columns = self.rows[slot], self._columns
        start, length = len(row.prompt), int(columns["length"][slot])
        row.tokens = columns["tokens"][slot, :length].astype(np.int32)
        row.logprobs = columns["logprobs"][slot, start:length].copy()
        row.versions = columns["versions"][slot, start:length].copy()

    def _sampled(self, slots: slice) -> NDArray[np.int64]:
        """Return how many tokens each row has sampled."""
        sampled: NDArray[np.int64] = self._columns["length"][slots] - self._columns["start"][slots]
        return sampled

    def _settings(self, slots: slice) -> Settings:
        """Return how the next token of these rows is sampled."""
        columns, sampled = self._columns, self._sampled(slots)
        at = np.arange(slots.start, slots.stop)
        if (fresh := (sampled % BLOCK == 0) & (sampled > 0)).any():
            for slot in at[fresh]:
                columns["uniform"][slot] = uniforms(self.rows[slot].seed, int(sampled[slot - slots.start]) // BLOCK)
            self._on_device = False
        uniform = columns["uniform"][at, sampled % BLOCK]
        return Settings(uniform, *(columns[name][slots] for name in ("temperature", "top_p", "top_k", "min_p")))

    def _append_tokens(self, chosen: SampledRows, slots: slice, version: int) -> None:
        tokens, logprobs, kept = chosen
        columns = self._columns
        length = columns["length"][slots]  # a view: advanced in place below
        at = np.arange(slots.start, slots.stop)
        if not np.isfinite(logprobs).all():
            raise TrainingDiverged.in_logits(version)
        columns["tokens"][at, length] = tokens
        columns["logprobs"][at, length] = logprobs
        columns["versions"][at, length] = version
        length += 1
        for row, ids in zip(self.rows[slots], kept, strict=True):
            if row.sampling.truncated:
                row.kept.append(ids)

    def _finish(self) -> list[Finished]:
        count, columns = len(self.rows), self._columns
        length = columns["length"][:count]
        last = columns["tokens"][np.arange(count), length - 1]
        stopped = np.isin(last, self._stops)
        for slot in np.flatnonzero(columns["has_stop_ids"][:count]).tolist():
            stopped[slot] |= int(last[slot]) in self.rows[slot].stop_ids
        ended = np.flatnonzero(stopped | (length >= columns["end"][:count]))
        done = []
        for slot in ended.tolist():
            self._store(slot)
            done.append((self.rows[slot], self.rows[slot].completion(bool(stopped[slot]))))
        self._close(ended.tolist())
        return done

    def _close(self, slots: Sequence[int]) -> None:
        """Drop the rows in these slots, and move the last rows into the gaps."""
        if not slots:
            return
        self._on_device = False
        count = len(self.rows)
        left = count - len(slots)
        gone = set(slots)
        target = np.array([slot for slot in slots if slot < left], dtype=np.int64)
        source = np.array([slot for slot in range(left, count) if slot not in gone], dtype=np.int64)
        to = np.arange(count)
        to[list(slots)] = -1
        to[source] = target
        self._decoder.move(to, self._columns["length"][:count] - 1)
        if len(source):
            for column in self._columns.values():
                column[target] = column[source]
            for moved, slot in zip(source, target, strict=True):
                self.rows[slot] = self.rows[moved]
        del self.rows[left:]
