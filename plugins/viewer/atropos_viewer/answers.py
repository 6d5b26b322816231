"""Results of `atropos rescore --save` and `atropos replay --save`, next to the rollouts that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Floats
from atropos_records.rollout_records import EpisodeRecord
from atropos_records.saved_results import ReplayedStep, RescoredStep, SavedResult, checksum, saved_results
from atropos_records.step_tokens import TokenFile
from atropos_viewer.page_values import number, numbers

MOST_SHOWN = 8  # results of each kind, the newest first


class SavedAnswers:
    """The saved results of one run. One that is damaged, or was made from other records, is a notice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, tuple[int, SavedResult | DataError]] = {}

    def key(self) -> tuple[object, ...]:
        """A value that changes with the results."""
        return tuple((path, path.stat().st_mtime_ns) for path in self._paths())

    def of_step(self, step: int, episodes: Sequence[EpisodeRecord], tokens: TokenFile | None) -> StepAnswers:
        made = StepAnswers(step, episodes, tokens)
        for path in self._paths():
            result = self._result(path)
            try:
                if isinstance(result, DataError):
                    raise result
                made.add(path, result)
            except DataError as error:
                made.notices.append(Exception.__str__(error))
        return made

    def _paths(self) -> list[Path]:
        return [path for kind in ("rescored", "replayed") for path in saved_results(self._directory, kind)[:MOST_SHOWN]]

    def _result(self, path: Path) -> SavedResult | DataError:
        written = path.stat().st_mtime_ns
        if path not in self._read or self._read[path][0] != written:
            try:
                self._read[path] = (written, SavedResult(path))
            except DataError as error:
                self._read[path] = (written, error)
        return self._read[path][1]


class StepAnswers:
    """The saved results that are of one step."""

    def __init__(self, step: int, episodes: Sequence[EpisodeRecord], tokens: TokenFile | None) -> None:
        self._step, self._episodes, self._tokens = step, episodes, tokens
        self._rescored: dict[str, RescoredStep] = {}
        self._replayed: dict[str, ReplayedStep] = {}
        self.notices: list[str] = []

    def add(self, path: Path, result: SavedResult) -> None:
        """Raises DataError for a result that does not fit the records."""
        other = DataError(
            f"{path.parent.name}/{path.name} is not shown: it was made from other records of step {self._step}."
        )
        if path.parent.name == "rescored":
            rows = result.rescored(self._step)
            if not len(rows.lines):
                return
            if not 0 <= rows.lines.min() <= rows.lines.max() < len(self._episodes):
                raise other
            there = [self._episodes[line] for line in rows.lines]
            before = np.array([np.nan if one.scored_reward is None else one.scored_reward for one in there], np.float32)
            draws = [one.draw for one in there]
            if not np.array_equal(before, rows.rewards_before, equal_nan=True) or draws != rows.draws.tolist():
                raise other
            self._rescored[path.stem] = rows
        elif (tokens := result.replayed(self._step)) is not None:
            if self._ids != tokens.ids or len(tokens.before) != (self._tokens.tokens if self._tokens else 0):
                raise other
            self._replayed[path.stem] = tokens

    @cached_property
    def _ids(self) -> int | None:
        ids = None if self._tokens is None else self._tokens.column("ids")
        return None if ids is None else checksum(ids)

    def table(self) -> dict[str, Any]:
        """Columns over the step's rollouts, for each rescoring; nothing if there is none."""
        if not self._rescored:
            return {}
        return {
            "rescored": [
                {
                    "name": name,
                    "reward": self._column(rows, rows.rewards),
                    "advantage": self._column(rows, rows.advantages),
                    "turned": [bool(one) for one in self._column(rows, rows.turned.astype(np.float32))],
                }
                for name, rows in self._rescored.items()
            ]
        }

    def _column(self, rows: RescoredStep, values: Floats) -> list[float | None]:
        made: list[float | None] = [None] * len(self._episodes)
        for line, value in zip(rows.lines.tolist(), values.tolist(), strict=True):
            made[line] = number(value)
        return made

    def of_rollout(self, line: int) -> dict[str, Any]:
        """The new scores of one rollout."""
        if not self._rescored:
            return {}
        made = []
        for name, rows in self._rescored.items():
            for at in np.flatnonzero(rows.lines == line).tolist():
                turned = bool(rows.turned[at])
                values = {"reward": number(float(rows.rewards[at])), "advantage": number(float(rows.advantages[at]))}
                made.append({"name": name, **values, "turned": turned})
        return {"rescored": made}

    def of_sequence(self, sequence: int) -> dict[str, Any]:
        """The logprobs of one sequence before and after each replayed update, and by how much they moved."""
        if not self._replayed or self._tokens is None:
            return {}
        begin, end = (int(at) for at in self._tokens.offsets[sequence : sequence + 2])
        made = []
        for name, of in self._replayed.items():
            before, after = of.before[begin:end], of.after[begin:end]
            changed = None if of.changed is None else of.changed[begin:end]
            made.append(
                {
                    "name": name,
                    "replay_before": numbers(before),
                    "replay_after": numbers(after),
                    "replay_moved": numbers(after - before),
                    "replay_changed": numbers(changed),
                    "replay_changed_moved": numbers(None if changed is None else changed - before),
                }
            )
        return {"replays": made}
