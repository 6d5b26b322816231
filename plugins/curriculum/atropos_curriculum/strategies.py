"""The five ways to spread draws over tasks. A strategy sees cells of tasks, never single tasks, so it may change the weights
of all of them at every draw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Metrics
from atropos_curriculum import config

Floats = NDArray[np.float64]
LEVELS = 32


@dataclass(frozen=True)
class View:
    """The tasks of one environment by cell: first the levels of tried tasks, then the prior bins of untried ones, and last the
    bin of those without a prior."""

    counts: NDArray[np.int64]  # [C]
    success: Floats  # [C] estimated; of a tried cell its middle
    progress: Floats  # [C] estimated change of success
    tried: NDArray[np.bool_]  # [C]
    settled: int  # draws so far, of all environments
    prior: bool = False  # the last cell is of tasks whose prior was not read yet: they are left to `explore`


class Strategy(ABC):
    """`edges` divide the values of tasks into levels: level i is above edge i - 1, and at most edge i."""

    edges: Floats = np.arange(1, LEVELS) / LEVELS
    by_progress = False  # True if levels are of progress instead of success

    def __init__(self, explore: float) -> None:
        self._explore = explore

    def shares(self, view: View) -> Floats:
        """The share of the draws that each cell gets [C], 0 for cells without tasks; the sum is 1."""
        everyone = view.counts / view.counts.sum()
        mass = self._weights(view) * view.counts
        mass[-1] *= not view.prior
        total = mass.sum()
        if not total > 0:  # no task is preferred, so all are drawn alike
            return np.asarray(everyone)
        return np.asarray((1 - self._explore) * mass / total + self._explore * everyone)

    @abstractmethod
    def _weights(self, view: View) -> Floats:
        """The weight of one task of each cell [C]."""

    def metrics(self, view: View) -> Metrics:
        """Metrics of this strategy, in addition to those of every curriculum."""
        return {}


class EasyFirst(Strategy):
    """Weights that fall with the rank of difficulty among what is not solved yet: exp(-sharpness * share of the unsolved
    tasks that are easier)."""

    def __init__(self, options: config.EasyFirstOptions) -> None:
        super().__init__(options.explore)
        self._solved = options.solved
        self._sharpness = options.sharpness

    def _weights(self, view: View) -> Floats:
        unsolved = np.where(view.success > self._solved, 0, view.counts)
        easier, _ = _easier(view.success, unsolved)
        middle = (easier + unsolved / 2) / max(unsolved.sum(), 1)
        return np.where(unsolved > 0, np.exp(-self._sharpness * middle), 0.0)

    def metrics(self, view: View) -> Metrics:
        return {"solved": _share(view, view.tried & (view.success > self._solved))}


class Competence(Strategy):
    """Uniform over the easiest share c(t) of the tasks, c(t) = min(1, sqrt(t (1 - c0^2) / T + c0^2)): the square-root
    schedule of Platanios et al. 2019 (arXiv 1903.09848, eq. 7), t in settled draws. Unlike there, difficulty is the current
    estimate, and solved tasks are left out. If none remain, the easiest unsolved tasks are drawn."""

    def __init__(self, options: config.CompetenceOptions) -> None:
        super().__init__(options.explore)
        self._options = options

    def competence(self, settled: int) -> float:
        start = self._options.start
        return float(min(1.0, np.sqrt(settled * (1 - start**2) / self._options.draws + start**2)))

    def _weights(self, view: View) -> Floats:
        easier, order = _easier(view.success, view.counts)
        allowed = self.competence(view.settled) * view.counts.sum()
        weights = np.clip((allowed - easier) / np.maximum(view.counts, 1), 0, 1)  # the cell at the edge: in part
        weights[view.success > self._options.solved] = 0
        if (weights * view.counts).any():
            return np.asarray(weights)
        unsolved = [cell for cell in order if view.counts[cell] and view.success[cell] <= self._options.solved]
        weights[unsolved[:1]] = 1
        return np.asarray(weights)

    def metrics(self, view: View) -> Metrics:
        return {"competence": self.competence(view.settled)}


class LearningProgress(Strategy):
    """By the absolute change of success, a fast average against a slow one (Matiisen et al. 2017, arXiv 1707.00183;
    Portelas et al. 2019, arXiv 1910.07224). Tasks that are being forgotten come back like tasks that are being learned. With
    a prior, the progress is that of its bins, as in those papers, which have a few kinds of tasks; without, each task's own."""

    edges = (np.arange(1, LEVELS) / LEVELS) ** 1.5  # finer for small progress, which most tasks have
    by_progress = True

    def __init__(self, options: config.LearningProgressOptions) -> None:
        super().__init__(options.explore)
        self._power, self._floor = options.power, options.floor

    def _weights(self, view: View) -> Floats:
        return np.asarray((view.progress + self._floor) ** self._power)

    def metrics(self, view: View) -> Metrics:
        return {"progress": float((view.progress * view.counts).sum() / view.counts.sum())}


class Prioritized(Strategy):
    """P(i) proportional to priority^power (Schaul et al. 2016, arXiv 1511.05952, eq. 1). The priority is the learnability
    4 p (1 - p): the variance of a task's outcomes, on which the size of a group's advantages depends. There are no importance
    weights, because changing which tasks are trained is the purpose."""

    def __init__(self, options: config.PrioritizedOptions) -> None:
        super().__init__(options.explore)
        self._power, self._floor = options.power, options.floor

    def _weights(self, view: View) -> Floats:
        return np.asarray(np.maximum(4 * view.success * (1 - view.success), self._floor) ** self._power)


class Window(Strategy):
    """A pool of the tasks with low < p < high; the rest is retired. Tasks never tried are judged by their prior bin, and those
    without any information are in the pool. A share of the draws goes to retired tasks, which return as soon as their
    estimate does."""

    def __init__(self, options: config.WindowOptions) -> None:
        super().__init__(options.explore)
        self._low, self._high = options.low, options.high
        below = np.nextafter(options.high, 0.0)  # so that p = high is on the other side
        edges = np.unique([*Strategy.edges, options.low, below])
        self.edges = edges[(edges > 0) & (edges < 1)]

    def _weights(self, view: View) -> Floats:
        return np.where(self._retired(view), 0.0, 1.0)

    def shares(self, view: View) -> Floats:
        active, retired = (
            np.where(self._retired(view) == of, view.counts, 0).astype(np.float64) for of in (False, True)
        )
        if not active.any() or not retired.any():
            return np.asarray(view.counts / view.counts.sum())
        return np.asarray((1 - self._explore) * active / active.sum() + self._explore * retired / retired.sum())

    def _retired(self, view: View) -> NDArray[np.bool_]:
        retired = (view.success <= self._low) | (view.success >= self._high)
        retired[-1] = view.prior  # not read yet; without a prior nothing is known of any, so they stay in the pool
        return np.asarray(retired)

    def metrics(self, view: View) -> Metrics:
        return {
            "too_easy": _share(view, self._retired(view) & (view.success >= self._high)),
            "too_hard": _share(view, self._retired(view) & (view.success <= self._low)),
        }


def strategy_of(options: config.CurriculumOptions) -> Strategy:
    if isinstance(options, config.EasyFirstOptions):
        return EasyFirst(options)
    if isinstance(options, config.CompetenceOptions):
        return Competence(options)
    if isinstance(options, config.LearningProgressOptions):
        return LearningProgress(options)
    if isinstance(options, config.PrioritizedOptions):
        return Prioritized(options)
    assert isinstance(options, config.WindowOptions), "there are five"
    return Window(options)


def _easier(success: Floats, counts: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """The number of tasks in cells easier than each [C], and the cells from the easiest to the hardest."""
    order = np.argsort(-success, kind="stable")
    easier = np.empty(len(counts))
    easier[order] = np.cumsum(counts[order]) - counts[order]
    return easier, order


def _share(view: View, cells: NDArray[np.bool_]) -> float:
    return float(view.counts[cells].sum() / view.counts.sum())
