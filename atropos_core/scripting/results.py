"""The results that calls from Python return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import FitError
from atropos_core.storage.run_records import RunRecords

if TYPE_CHECKING:
    import pandas

    from atropos_core.interfaces import Finding
    from atropos_core.launch.supervisor import Summary
    from atropos_core.rollouts.evaluation import Share
    from atropos_core.types import Metrics


@dataclass(frozen=True)
class RunResult:
    """A run that has finished or was paused."""

    directory: Path
    exit_reason: Literal["finished", "paused"]  # "paused": by Ctrl-C, with everything saved; resume() continues it
    summary: Summary | None = field(default=None, repr=False)  # of a run that has finished

    @cached_property
    def metrics(self) -> Mapping[str, NDArray[np.float64]]:
        """[n] each, by the names of metrics.jsonl, and "step". One value per recorded step, starting with the evaluation before
        training (step 0); NaN if a step has none. Empty if the run has no sink `jsonl`."""
        table = RunRecords(self.directory).metrics()
        return {"step": table.steps.astype(np.float64), **table.columns} if len(table.steps) else {}

    @property
    def steps(self) -> int:
        """The number of trained steps."""
        if self.summary is not None:
            return self.summary.steps
        return int(self.metrics["step"][-1]) if self.metrics else 0

    @property
    def before(self) -> Metrics:
        """The evaluation before the first step, by names such as "eval/accuracy"; empty if there was none."""
        return dict(self.summary.before) if self.summary is not None else self._evaluated(0)

    @property
    def after(self) -> Metrics:
        """The last evaluation."""
        return dict(self.summary.after) if self.summary is not None else self._evaluated(-1)

    @property
    def policy(self) -> Path:
        """The model directory of the last checkpoint, which `model=` accepts."""
        return self.directory / "checkpoints" / f"step-{self.steps:06d}" / "policy"

    def plot(self, out: Path | str | None = None) -> Picture:
        """Draw rewards, held-out evaluations and health findings as a PNG: plot.png in the run directory, or `out`. Raises FitError
        if matplotlib is not installed, DataError if no step was recorded."""
        from atropos_core.launch.picture import draw

        return Picture(draw(self.directory, None if out is None else Path(out)))

    def frame(self) -> pandas.DataFrame:
        """Return the metrics, one row per step. Raises FitError if pandas is not installed."""
        frame = _pandas().DataFrame(dict(self.metrics))
        return frame.astype({"step": int}).set_index("step") if len(frame) else frame

    def _evaluated(self, at: int) -> Metrics:
        evaluations = {name: values for name, values in self.metrics.items() if name.startswith("eval/")}
        if not evaluations:
            return {}
        evaluated = np.flatnonzero(np.isfinite(np.stack(list(evaluations.values()))).any(axis=0))
        if not len(evaluated):
            return {}
        row = evaluated[at]
        return {name: float(values[row]) for name, values in evaluations.items() if np.isfinite(values[row])}


@dataclass(frozen=True)
class Picture:
    """A PNG that a notebook displays."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation on held-out problems."""

    metrics: Metrics  # "eval/accuracy", "eval/pass@4", ...
    intervals: Mapping[str, Share]  # those that are accuracies, with their 95 % interval
    seconds: float
    tokens: int | None  # sampled; None: the server of --model-url does not say
    figures: Path | None  # the files with the results, if they were written
    replies: Path | None


@dataclass(frozen=True)
class Exported:
    """A data set that was exported."""

    path: Path
    form: str
    written: int  # rows
    left_out: Mapping[str, int]  # reason -> episodes, or groups if the reason says so
    without_tokens: Mapping[str, int]  # of the form `parquet`: episodes whose row has no tokens, by the reason
    url: str | None = None  # on the hub, if it was pushed


@dataclass(frozen=True)
class ExportedPolicy:
    """A policy that was exported as a model directory."""

    path: Path
    step: int
    kind: str  # "model", "adapter", or "merged adapter"
    files: tuple[str, ...]
    size_bytes: int
    url: str | None = None  # on the hub, if it was pushed


@dataclass(frozen=True)
class CheckResult:
    """The findings of a component's contract tests."""

    kind: str
    findings: Sequence[Finding]

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.ok is False]

    @property
    def ok(self) -> bool:
        return not self.broken


class View(Protocol):
    """A page that is served on this machine until `close()`, or until this process ends. Also a context manager."""

    url: str  # with the token that opens it

    @property
    def is_open(self) -> bool: ...
    def close(self) -> None: ...  # may be called twice
    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class InstalledComponent:
    kind: str
    name: str
    summary: str
    distribution: str
    version: str


@dataclass(frozen=True)
class InstalledPlugins:
    components: Sequence[InstalledComponent]
    broken: Mapping[str, Exception]  # plugins that do not load

    def names(self, kind: str) -> list[str]:
        return [component.name for component in self.components if component.kind == kind]


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise FitError(
            "frame() gives a frame of pandas, which is not installed.",
            remedy="pip install pandas; result.metrics has the same as arrays of numpy.",
        ) from error
    return pandas
