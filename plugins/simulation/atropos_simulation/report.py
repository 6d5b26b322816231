"""Report a simulation: a table by number of engines, and the part that each fleet waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atropos_simulation.figures import FailureFigures, Figures, Known
from atropos_simulation.loop_model import ClusterSize, Outcome, simulate

BATCH = "the batch (groups_per_step)"
GAIN = 0.05  # relative gain in tokens/s if a part is twice as fast; with less, the part is not a bottleneck
FULL = 0.9  # of a server's time
COLUMNS = (
    "engines", "workers", "trajectories/s", "tokens/s", "step s", "engines idle", "of their peak", "sequences each", "trainer idle",
    "hub busy", "workers busy", "after failures",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    outcome: Outcome
    gains: Mapping[str, float]  # what -> more tokens/s were it twice as fast, or twice as large
    useful: float  # share of the time that no failure or checkpoint takes

    @property
    def cells(self) -> tuple[str, ...]:
        one = self.outcome
        return (
            f"{one.fleet.engines}", f"{one.fleet.workers}", f"{one.trajectories_per_s:,.1f}", f"{one.tokens_per_s:,.0f}",
            f"{one.step_s:.2f}", f"{one.engine_idle:.0%}", f"{one.engine_load:.0%}", f"{one.sequences:.1f}", f"{one.trainer_idle:.0%}",
            f"{one.hub_busy:.1%}", f"{one.worker_busy:.1%}", f"{self.useful:.1%}",
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        """The run's bottlenecks in words, and the gain from a larger batch."""
        one = self.outcome
        parts = sorted(((gain, what) for what, gain in self.gains.items() if what != BATCH), reverse=True)
        said = [f"{what} {gain:+.0%}" for gain, what in parts[:3] if gain >= GAIN]
        full = [name for name, busy in (("the hub", one.hub_busy), ("a worker", one.worker_busy)) if busy >= FULL]
        return (
            f"{one.fleet.engines} engine{'s' * (one.fleet.engines > 1)}: "
            + (", then ".join(said) if said else "no single part: none brings 5 % if it is twice as fast")
            + (f"; {BATCH} twice as large {self.gains[BATCH]:+.0%}" if self.gains[BATCH] >= GAIN else "")
            + (f"; {' and '.join(full)} saturated" if full else "")
        )


def rows(
    figures: Figures, fleets: Sequence[ClusterSize], *, grows: bool = False, rollouts: int = 20_000, seed: int = 0
) -> Iterator[Prediction]:
    """Yield a prediction for each fleet. If the batch `grows`, groups_per_step is per engine."""
    for fleet in fleets:
        of = _changed(figures, "run", groups_per_step=figures.run.groups_per_step * fleet.engines) if grows else figures
        outcome = simulate(of, fleet, rollouts=rollouts, seed=seed)
        gains = {
            what: simulate(faster, fleet, rollouts=rollouts, seed=seed).tokens_per_s / outcome.tokens_per_s - 1
            for what, faster in _variants(of, fleet).items()
        }
        yield Prediction(outcome, gains, useful_share(figures.failures, fleet.engines + 1))


def _variants(figures: Figures, fleet: ClusterSize) -> dict[str, Figures]:
    """Return the figures with each part in turn twice as fast, and with the batch twice as large."""
    f, engine = figures, figures.engine
    made = {
        "the engines' peak rate": _changed(f, "engine", peak_tokens_per_s=1 / (engine.sequence_s / 2),
                                           single_tokens_per_s=1 / (engine.step_s + engine.sequence_s / 2)),
        "the time of one decode step": _changed(f, "engine", single_tokens_per_s=1 / (engine.step_s / 2 + engine.sequence_s)),
        "the trainer": _changed(f, "trainer", step_s=f.trainer.step_s / 2, token_s=f.trainer.token_s / 2),
        "the hub": _changed(f, "hub", group_s=f.hub.group_s / 2),
        "the bridge": _changed(f, "bridge", publish_s=f.bridge.publish_s / 2, bytes=f.bridge.bytes / 2),
        "the workers' processors": _changed(f, "worker", rollout_s=f.worker.rollout_s / 2),
        "the environment": _changed(f, "rollout", environment_s=f.rollout.environment_s / 2),
        "the loop's own work": _changed(f, "loop", step_s=f.loop.step_s / 2, group_s=f.loop.group_s / 2),
        BATCH: _changed(f, "run", groups_per_step=2 * f.run.groups_per_step),
    }  # fmt: skip
    return {what: faster for what, faster in made.items() if faster != figures}


def _changed(figures: Figures, section: str, **values: float) -> Figures:
    return figures.model_copy(update={section: getattr(figures, section).model_copy(update=values)})


def useful_share(failures: FailureFigures | None, processes: int) -> float:
    """Return the share of the time that neither failures nor checkpoints take.

    This is the work T between two checkpoints, divided by its expected time M e^(R/M) (e^((T+C)/M) - 1). Failures are
    exponential with mean M for all processes together, also during a restart R; a checkpoint takes C. See J. T. Daly, A higher
    order estimate of the optimum checkpoint interval for restart dumps, 2006, eq. 13."""
    if failures is None:
        return 1.0
    mean = failures.process_mtbf_s / processes
    try:
        expected = (
            mean
            * math.exp(failures.restart_s / mean)
            * math.expm1((failures.checkpoint_every_s + failures.checkpoint_s) / mean)
        )
    except OverflowError:
        return 0.0
    return failures.checkpoint_every_s / expected


def figure_rows(known: Known) -> list[tuple[str, str, str]]:
    """Return (name, value, source) for each figure."""
    return [(path, _short(value), known.origins[path]) for path, value in sorted(known.values.items())]


def _short(value: object) -> str:
    if isinstance(value, (tuple, list)) and len(value) > 4:
        return f"{len(value)} values, mean {sum(value) / len(value):.1f}, {min(value)} to {max(value)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def conclusions(figures: Figures, made: Sequence[Prediction]) -> list[str]:
    """Return lines with the bottleneck of each fleet, and the number of engines that saturate the hub."""
    lines = [
        "what saturates first: tokens/s gained if a part is twice as fast",
        *(f"  {row.verdict}" for row in made),
    ]
    if figures.hub.group_s:
        groups_per_s = figures.hub.servers / figures.hub.group_s
        tokens = figures.run.group_size * figures.rollout.mean_tokens
        engines = groups_per_s * tokens / figures.engine.peak_tokens_per_s
        lines.append(
            f"the hub can take {groups_per_s:,.0f} groups/s ({figures.hub.servers} server{'s' * (figures.hub.servers > 1)}) of "
            f"{tokens:,.0f} sampled tokens each, which {engines:,.0f} engines sample at their peak"
        )
    if figures.failures is None:
        lines.append("[failures] is not given: nothing fails")
    return lines
