"""One run as the page sees it, read while the run may still be going."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from atropos_core.errors import RunDirectoryError
from atropos_core.storage.reading import read_text
from atropos_core.storage.run_records import METRICS
from atropos_records.rollout_records import RolloutRecords
from atropos_viewer.answers import SavedAnswers
from atropos_viewer.evaluation_table import evaluation_table
from atropos_viewer.findings import findings
from atropos_viewer.metrics_table import MetricsTable
from atropos_viewer.page_values import number
from atropos_viewer.step_rollouts import StepRollouts
from atropos_viewer.token_texts import TokenTexts

KEPT_STEPS = 3  # steps whose rollouts stay in memory


class ViewedRun:
    def __init__(self, directory: Path) -> None:
        """Raises RunDirectoryError if the directory does not exist."""
        if not directory.is_dir():
            raise RunDirectoryError(
                f"run directory {directory} does not exist.", remedy="`ls -t runs` shows the newest."
            )
        self._records = RolloutRecords(directory)
        self.directory = directory
        self._config = self._records.config
        self._metrics = MetricsTable(directory / METRICS)
        self._saved = SavedAnswers(directory)
        self._rollouts: dict[tuple[object, ...], StepRollouts] = {}

    def overview(self) -> dict[str, Any]:
        self._metrics.refresh()
        times = self._records.summary.get("times")
        return {
            "name": self.directory.resolve().name,
            "directory": str(self.directory),
            "living": self._records.run.is_locked(),
            "step": self._metrics.steps[-1] if self._metrics.steps else None,
            "steps": self._all_steps(),
            "max_staleness": number(self._training.get("max_staleness")) or 0,
            "model": str(self._config.get("model", "")),
            "rollouts": self._records.steps(),
            "evaluations": self._records.evaluation_steps(),
            "checkpoints": self._records.checkpoint_steps(),
            "times": [_time(row) for row in times if isinstance(row, dict)] if isinstance(times, list) else [],
            "config": self._config_text,
            "notices": self._metrics.notices(),
        }

    def _all_steps(self) -> float | None:
        """Return how many steps the run has, with those of a warm start."""
        steps, warmup = number(self._training.get("steps")), self._config.get("warmup")
        supervised = number(warmup.get("steps")) if isinstance(warmup, dict) else None
        return steps if steps is None else steps + (supervised or 0)

    def metrics_since(self, step: int, edition: int) -> dict[str, Any]:
        self._metrics.refresh()
        return self._metrics.since(step, edition) | {
            "findings": findings(self._records.health(), self._records.rollbacks())
        }

    def rollouts(self, step: int) -> StepRollouts:
        """Raises DataError."""
        recorded = self._records.step(step)
        key = (step, recorded.path.stat().st_mtime_ns, *self._saved.key())  # a resumed run writes the file again
        if key not in self._rollouts:
            self._metrics.refresh()
            version = self._metrics.version_before(step)
            self._rollouts[key] = StepRollouts(recorded, lambda: self._token_texts, version, self._saved)
            while len(self._rollouts) > KEPT_STEPS:
                del self._rollouts[next(iter(self._rollouts))]
        return self._rollouts[key]

    def evaluation(self, step: int) -> dict[str, Any]:
        """Raises DataError."""
        return evaluation_table(self._records.evaluation(step))

    @cached_property
    def _config_text(self) -> str:
        return read_text(self.directory / "config.toml")

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.directory, self._config)

    @property
    def _training(self) -> Mapping[str, Any]:
        section = self._config.get("training", {})
        return section if isinstance(section, dict) else {}


def _time(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the summary's times, with the types that the page expects."""
    figures = {name: number(row.get(name)) for name in ("seconds", "calls", "p50_s", "p95_s")}
    return (
        {"name": str(row.get("name")), "kind": str(row.get("kind"))} | figures | {"seconds": figures["seconds"] or 0.0}
    )
