"""The sink that writes metrics and rollouts as JSON lines in the run directory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from atropos_core import console
from atropos_core.builtin.config import JsonlOptions
from atropos_core.builtin.recording import rows, token_columns, tools_id
from atropos_core.interfaces import SettledGroup, Sink, StepRecord
from atropos_core.storage.atomic import cut_back, json_bytes, unwritable, write_whole
from atropos_core.storage.reading import numbered, open_file
from atropos_core.storage.run_records import TOOLS, json_rows
from atropos_core.storage.token_file import write_token_file
from atropos_core.types import Metrics, ScoredGroup

TEXTS, TOKENS = ".jsonl", ".safetensors"


class JsonlSink(Sink):
    """Writes `metrics.jsonl`, one object per step; `rollouts/step-000001.jsonl`, one line per episode; and the same name with
    `.safetensors`, which holds the values of each token.

    A resumed run cuts metrics.jsonl back to the checkpoint and removes the rollouts after it.
    """

    def __init__(self, options: JsonlOptions, directory: Path) -> None:
        self._metrics = directory / "metrics.jsonl"
        self._rollouts = directory / "rollouts"
        self._every = options.rollouts_every
        self._tokens = options.tokens
        self._most_bytes = int(options.tokens_max_mb * 1e6)
        self._tools_there: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._sizes: dict[Path, int] = {}  # of the files of tokens, oldest first
        self._said = False  # that some were removed
        self._file: IO[bytes] | None = None
        self._keep: Mapping[str, Any] = {"bytes": 0, "step": -1}
        self._last = -1

    async def open(self) -> None:
        try:
            self._rollouts.mkdir(exist_ok=True)
            for step, path in (found for kind in (TEXTS, TOKENS) for found in numbered(self._rollouts, "step-", kind)):
                if step > self._keep["step"]:
                    path.unlink()
                elif path.suffix == TOKENS:
                    self._sizes[path] = path.stat().st_size
            for row in json_rows(self._rollouts / TOOLS):  # of a run that is resumed
                self._tools_there[str(row.get("id"))] = row.get("tools", [])
            self._file = open_file(self._metrics, append=True)
            if (there := self._file.tell()) < self._keep["bytes"]:
                console.warn(
                    f"{self._metrics} is shorter ({there} bytes) than it was at the checkpoint ({self._keep['bytes']}): lines "
                    "of steps before it are gone."
                )
            cut_back(self._file, self._keep["bytes"])
        except OSError as error:
            raise unwritable(self._metrics, error) from error

    def wants_token_values(self, step: int) -> bool:
        return self._tokens and self._is_recorded(step)

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        await self.record(StepRecord(step, metrics, groups, [SettledGroup(group, None) for group in groups]))

    async def record(self, record: StepRecord) -> None:
        assert self._file is not None, "a sink is opened before it is used"
        line: dict[str, float | None] = {"step": record.step}
        line |= {name: value if math.isfinite(value) else None for name, value in record.metrics.items()}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._metrics, error) from error
        if record.settled and self._is_recorded(record.step):
            path = self._rollouts / f"step-{record.step:06d}{TEXTS}"
            try:
                self._write_rollouts(path, record)
            except OSError as error:
                raise unwritable(path, error) from error
        self._last = record.step

    def _is_recorded(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def _write_rollouts(self, path: Path, record: StepRecord) -> None:
        """Write the texts last, so that a reader who finds them also finds the tokens."""
        columns = token_columns(record) if self._tokens else None
        if columns is not None:
            beside = path.with_suffix(TOKENS)
            self._sizes[beside] = write_token_file(beside, columns)
            self._make_room()
        self._write_tools(record)
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows(record.settled, tokens=self._tokens))
        write_whole(path, json_bytes("".join(f"{line}\n" for line in lines)))

    def _write_tools(self, record: StepRecord) -> None:
        """Write each set of tools once per run, complete, before a row refers to it."""
        fresh = {tools_id(one.tools): one.tools for one in record.settled if one.tools}
        path = self._rollouts / TOOLS
        if not fresh.keys() - self._tools_there.keys():
            return
        self._tools_there |= fresh
        lines = (json.dumps({"id": name, "tools": tools}) for name, tools in self._tools_there.items())
        write_whole(path, json_bytes("".join(f"{line}\n" for line in lines)))

    def _make_room(self) -> None:
        """Remove the oldest files of tokens above the limit. The newest stays, whatever its size."""
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self._most_bytes:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
            if not self._said:
                self._said = True
                console.say(
                    f"{self._rollouts} holds more than {self._most_bytes / 1e6:g} MB of tokens: those of the oldest steps are "
                    f"removed from here on, first {oldest.name}; their texts stay (sink.jsonl.tokens_max_mb)."
                )

    async def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise unwritable(self._metrics, error) from error
            finally:
                self._file = None

    def state(self) -> Mapping[str, Any]:
        if self._file is None:
            return {"bytes": 0, "step": -1}
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._keep = state
        self._last = int(state["step"])
