"""Compute figures from the records of a run that has ended.

Both rates of an engine can be computed from a strictly on-policy run with one engine and one turn. All rollouts of a step begin
at once, so decode step j has n_j sequences: the rollouts of at least j tokens, which the records give. Each step gives three
equations:

- Its last group ends after sum_j (a + b n_j) + c seconds, which is `time/rollouts_s`.
- Its mean group ends `time/queue_mean_s` earlier.
- The engine had a request for sum_j (a + b n_j) seconds, which is `time/engine/sample_s`.

The unknowns are a (a decode step), b (a sequence in it) and c (time that no token explains). They are fitted by least squares
without negative values.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import RunDirectoryError
from atropos_core.storage.run_records import MetricTable, is_step
from atropos_records.rollout_records import RolloutRecords
from atropos_simulation.figures import Known

SKIPPED = 2  # steps at the start, in which many things happen for the first time
VARIED = 0.2  # minimum deviation / mean of a step's tokens, to separate a fixed from a proportional part
PER_GROUP = ("packing", "transform.", "teacher.", "sink.")  # stages whose time goes with the groups
NOT_THE_LOOP = ("start-up", "evaluation", "waiting", "trainer", "publishing")
Floats = NDArray[np.float64]


def from_run(directory: Path) -> Known:
    """Return a run's figures. Raises RunDirectoryError if the run has not ended or is too short."""
    records = RolloutRecords(directory)
    table = records.metrics()
    counted = table.steps > SKIPPED
    if records.finished_steps < 0 or counted.sum() < 2:
        raise RunDirectoryError(
            f"{directory} is not a finished run of at least {SKIPPED + 2} steps: figures come from the steps after the first {SKIPPED}.",
            remedy="Name a run that has a summary.json, or give the figures in a file: --figures FILE.",
        )
    known: dict[str, tuple[Any, str]] = {}
    notes: dict[str, str] = {}
    _shape(records, table, counted, known)
    _loop(records, known)
    _trainer(table, counted, known)
    _rollouts(records, table, counted, known, notes)
    notes["hub.group_s"] = (
        "a run does not record it; benchmarks/results/hub_limit.json has a measured value (hub_group_s)"
    )
    notes["worker.rollout_s"] = (
        "a run does not record it; if the loop itself is the only worker, the engine's figures include it: give 0"
    )
    where = f"{directory}: "
    return Known(
        {name: value for name, (value, _) in known.items()},
        {name: where + said for name, (_, said) in known.items()},
        notes,
    )


def _shape(
    records: RolloutRecords, table: MetricTable, counted: NDArray[np.bool_], known: dict[str, tuple[Any, str]]
) -> None:
    for name in ("groups_per_step", "group_size", "max_staleness", "refill_rounds"):
        known[f"run.{name}"] = _training(records, name), f"config.toml, training.{name}"
    leased = sum(_column(table, f"groups/{what}", 0.0)[counted].sum() for what in ("trained", "flat", "dropped"))
    trained = _column(table, "groups/trained", 0.0)[counted].sum()
    known["run.kept_share"] = (
        float(trained / leased) if leased else 1.0,
        "metrics.jsonl, groups/trained of all that were leased",
    )
    most = records.config.get("engine", {}).get("max_batch")
    if most is not None:
        known["engine.max_sequences"] = most, "config.toml, engine.max_batch"
    published = _column(table, "bridge/publish_s", 0.0)[counted]
    known["bridge.publish_s"] = float(published.mean()), "metrics.jsonl, mean of bridge/publish_s, its transfer in it"


def _loop(records: RolloutRecords, known: dict[str, tuple[Any, str]]) -> None:
    seconds = records.summary.get("seconds")
    if not isinstance(seconds, dict) or not all(
        isinstance(spent, int | float) and abs(spent) < 1e300 for spent in seconds.values()
    ):
        raise _lacking(records.directory / "summary.json", "seconds of each stage")
    steps = records.finished_steps
    groups = max(steps * _training(records, "groups_per_step"), 1)
    per_group = {name: spent for name, spent in seconds.items() if name.startswith(PER_GROUP)}
    rest = {name: spent for name, spent in seconds.items() if name not in per_group and name not in NOT_THE_LOOP}
    known["loop.group_s"] = sum(per_group.values()) / groups, "summary.json, seconds of " + ", ".join(per_group)
    known["loop.step_s"] = sum(rest.values()) / max(steps, 1), "summary.json, seconds of " + ", ".join(rest)


def _trainer(table: MetricTable, counted: NDArray[np.bool_], known: dict[str, tuple[Any, str]]) -> None:
    seconds = _column(table, "time/trainer_s")[counted]
    leased = sum(_column(table, f"groups/{what}", 0.0)[counted] for what in ("trained", "flat", "dropped"))
    share = _column(table, "groups/trained", 0.0)[counted] / np.maximum(leased, 1)
    tokens = _column(table, "tokens/sampled")[counted] * share
    there = np.isfinite(seconds) & (tokens > 0)
    seconds, tokens = seconds[there], tokens[there]
    if not len(tokens):
        return
    if tokens.std() > VARIED * tokens.mean():
        fixed, each = _least_squares(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
        how = f"time/trainer_s by sampled tokens, least squares over {len(tokens)} steps"
    else:
        fixed, each = 0.0, float(seconds.sum() / tokens.sum())
        how = "time/trainer_s by sampled tokens, in proportion: their number varies too little to tell a fixed part"
    known["trainer.step_s"], known["trainer.token_s"] = (
        (fixed, f"metrics.jsonl, {how}"),
        (each, f"metrics.jsonl, {how}"),
    )


def _rollouts(
    records: RolloutRecords,
    table: MetricTable,
    counted: NDArray[np.bool_],
    known: dict[str, tuple[Any, str]],
    notes: dict[str, str],
) -> None:
    """Add lengths and turns, and both rates of an engine if they can be computed from the run."""
    recorded = [step for step in table.steps[counted].tolist() if step in set(records.steps())]
    lengths: dict[int, dict[int, list[int]]] = {}
    turns: list[int] = []
    for step in recorded:
        groups: dict[int, list[int]] = defaultdict(list)
        for episode in records.step(step).episodes:
            if not episode.failed:
                groups[episode.draw].append(episode.sampled_tokens)
                turns.append(sum(message.get("role") == "assistant" for message in episode.messages))
        if groups:
            lengths[step] = groups
    if not turns:
        notes["rollout.tokens"] = (
            f"{records.directory / 'rollouts'} does not record these steps (sink.jsonl.rollouts_every)"
        )
        return
    every = [one for groups in lengths.values() for group in groups.values() for one in group]
    known["rollout.tokens"] = tuple(every), f"rollouts/, {len(every)} rollouts"
    known["rollout.turns"] = max(round(float(np.mean(turns))), 1), "rollouts/, messages of the policy, on average"
    replicas, staleness = records.config.get("engine", {}).get("replica", {}), _training(records, "max_staleness")
    engines = 1 + len(replicas) if isinstance(replicas, dict) else 1
    why = (
        f"the run had {engines} engines" if engines > 1
        else f"the run had training.max_staleness = {staleness}" if staleness
        else "its rollouts had several turns" if max(turns) > 1
        else "its steps were refilled" if _training(records, "refill_rounds")
        else ""
    )  # fmt: skip
    if why:
        said = f"{why}: only a run with one engine, one turn and max_staleness = 0 shows an engine's rates; or measure one separately"
        notes |= dict.fromkeys(
            ("engine.single_tokens_per_s", "engine.peak_tokens_per_s", "rollout.environment_s"), said
        )
        return
    step_s, sequence_s, rest_s = _decode_times(table, lengths)
    how = f"metrics.jsonl and rollouts/, fitted to {len(lengths)} steps"
    for name, token_s in (("single", step_s + sequence_s), ("peak", sequence_s)):
        path = f"engine.{name}_tokens_per_s"
        if token_s > 0:
            known[path] = 1 / token_s, how
        else:
            notes[path] = (
                f"{how}: the time did not depend on the {'tokens' if name == 'single' else 'number of sequences'}"
            )
    known["rollout.environment_s"] = rest_s, f"{how}: the time that does not depend on tokens"


def _decode_times(table: MetricTable, lengths: Mapping[int, Mapping[int, Sequence[int]]]) -> tuple[float, float, float]:
    rows, seconds = [], []
    took = dict(zip(table.steps.tolist(), _column(table, "time/rollouts_s"), strict=True))
    used = dict(zip(table.steps.tolist(), _column(table, "time/engine/sample_s"), strict=True))
    evaluated = dict(zip(table.steps.tolist(), _column(table, "time/evaluation_s", 0.0), strict=True))
    queued = dict(zip(table.steps.tolist(), _column(table, "time/queue_mean_s"), strict=True))
    for step, groups in lengths.items():
        every = np.concatenate([np.asarray(group) for group in groups.values()])
        most = int(every.max())
        sequences = len(every) - np.searchsorted(
            np.sort(every), np.arange(1, most + 1), side="left"
        )  # [most] in decode step j
        sampled = np.concatenate([[0], np.cumsum(sequences)])
        ends = np.array([max(group) for group in groups.values()])
        last = np.array([most])
        in_use = np.nan if evaluated[step] else used[step]  # what an evaluation samples is in it as well
        for at, when, rest in ((last, took[step], 1.0), (ends, took[step] - queued[step], 1.0), (last, in_use, 0.0)):
            if np.isfinite(when):
                rows.append([at.mean(), sampled[at].mean(), rest])
                seconds.append(when)
    a, b, c = _least_squares(np.array(rows), np.array(seconds))
    return a, b, c


def _least_squares(rows: Floats, values: Floats) -> list[float]:
    """Solve least squares without negative coefficients.

    Of all subsets of columns whose solution has no negative coefficient, take the best."""
    best, least = [0.0] * rows.shape[1], float((values**2).sum())
    for size in range(1, rows.shape[1] + 1):
        for some in itertools.combinations(range(rows.shape[1]), size):
            found = np.linalg.lstsq(rows[:, some], values, rcond=None)[0]
            error = float(((rows[:, some] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-12):
                least = error
                best = [0.0] * rows.shape[1]
                for column, value in zip(some, found, strict=True):
                    best[column] = float(value)
    return best


def _training(records: RolloutRecords, name: str) -> int:
    """Return a whole number of the section [training]. Raises RunDirectoryError."""
    value = records.config.get("training", {}).get(name)
    if not is_step(value):
        raise _lacking(records.directory / "config.toml", f"number training.{name}")
    return int(value)


def _lacking(path: Path, what: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} has no {what}: it is not what the run wrote.",
        remedy="Name another run, or give the figures in a file: --figures FILE.",
    )


def _column(table: MetricTable, name: str, otherwise: float = np.nan) -> Floats:
    found = table.columns.get(name, np.full(len(table.steps), np.nan))
    return np.nan_to_num(found, nan=otherwise) if np.isfinite(otherwise) else found
