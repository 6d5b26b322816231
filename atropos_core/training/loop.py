"""THE loop: draw, roll out, score, transform, step, publish."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from atropos_core import console
from atropos_core.advantages import is_flat
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import Interrupted, Misaligned, NoProgress, NoSuchVersion, PluginError, RunPaused
from atropos_core.guards.opens import in_one_line
from atropos_core.health.alignment import EVIDENCE_NATS, MOVED, bound_of, largest_rounding, moved_column, owner
from atropos_core.health.rescoring import Rescoring
from atropos_core.health.watch import Health
from atropos_core.interfaces import ModelInfo, Outcome, SettledGroup, StepRecord
from atropos_core.rollouts.evaluation import Evaluation, evaluate, evaluated_tasks
from atropos_core.rollouts.policy_versions import refuse_versions_that_never_were
from atropos_core.rollouts.producer import PATIENCE
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.rollouts.source import Lease, Source
from atropos_core.storage.checkpoint import Checkpoint, Checkpoints, seconds_between, taking_up
from atropos_core.training.batch import to_batch
from atropos_core.training.metrics import (
    group_metrics,
    rescoring_difference,
    rescoring_gap,
    rounding_of,
    staleness,
    versions,
)
from atropos_core.training.parts import Parts
from atropos_core.training.probe import Probe
from atropos_core.training.step_state import Boundary, forget_evaluations_after, take_up
from atropos_core.types import Batch, Episode, Metrics, ScoredGroup, offsets_of

T = TypeVar("T")

KINDS_OF_FAILURE_SAID = 5  # of rollouts, in a run
OF_EVALUATION = frozenset(
    {*(f"evaluation.{name}" for name in ("problems", "samples", "temperature", "top_p", "top_k", "max_tokens"))}
    | {"sampling.max_tokens", "sampling.stop"}
)
UNUSUAL_STEPS, UNUSUAL_S = (
    5,
    60.0,
)  # a step that lasts as long as 5 of the slowest so far, and at least a minute, is shown as a wait
EMPTY_STEPS = 10  # in a row, before the run says that there is nothing to learn from


@dataclass
class Progress:
    """The progress of a run, saved with it."""

    step: int = 0
    version: int = 0
    empty_steps: int = 0  # in a row
    first: Metrics = field(default_factory=dict)  # the evaluation before the first step
    last: Metrics = field(default_factory=dict)
    syncs: int = 0  # how often weights were published
    sync_s: float = 0.0  # and how long that took in all
    published_bytes: int = 0  # on disk, for the last of them


@dataclass
class _Gathered:
    """The groups that a step trains, and what happened to other draws since the last step."""

    version: int  # the newest that these were sampled from
    leases: list[Lease] = field(default_factory=list)
    groups: list[ScoredGroup] = field(default_factory=list)  # with advantages: those that the transforms kept
    refused: list[Lease] = field(default_factory=list)  # with versions that never existed
    failed: Sequence[ScoredGroup] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause, before they were leased
    dropped_groups: Sequence[tuple[ScoredGroup, str]] = ()  # some of these, with their cause
    dropped_by: dict[int, str] = field(default_factory=dict)  # draw id -> the transform that left it out

    @property
    def raw(self) -> list[ScoredGroup]:
        """Return the groups as they were leased."""
        return [lease.group for lease in self.leases]

    def settled(self) -> tuple[list[ScoredGroup], list[SettledGroup]]:
        """Return the groups that were leased or failed, and the outcome of each, and of those that were dropped before."""
        starts = offsets_of([sum(_tokens(one) for one in group.episodes) for group in self.groups])
        trained = {group.draw.id: (group, int(at)) for group, at in zip(self.groups, starts[:-1], strict=True)}
        found = []
        for group in self.raw:
            if group.draw.id in trained:
                kept, at = trained[group.draw.id]
                changed = len(kept.rewards) == len(group.rewards) and (kept.rewards != group.rewards).any()
                scored = group.rewards if changed else None
                found.append(SettledGroup(kept, "trained", batch_start=at, scored=scored))
            else:
                found.append(SettledGroup(group, _outcome(group, ()), self.dropped_by.get(group.draw.id, "")))
        found += [SettledGroup(group, "failed", "training.min_group") for group in self.failed]
        leased_or_failed = [one.group for one in found]
        found += [SettledGroup(lease.group, "dropped", "no_such_version") for lease in self.refused]
        for group, cause in self.dropped_groups:
            stale = cause == "stale"
            found.append(
                SettledGroup(group, "stale" if stale else "dropped", "training.max_staleness" if stale else cause)
            )
        return leased_or_failed, found

    def worst_sequences(self, metrics: Metrics) -> dict[str, str]:
        """Remove the worst sequences of the batch from `metrics`. Return the owner of each, by the limit that it exceeds."""
        bounds = ("alignment/worst_fresh", "alignment/worst_stale", "alignment/worst_truncated")
        return {of: owner(self.groups, int(metrics.pop(of))) for of in bounds if of in metrics}


class Loop:
    """Runs to `config.training.steps`. `directory` is the run's own; `runner` runs the evaluation; `settings` are saved in every
    checkpoint, so that a resume can tell what has changed."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        source: Source,
        runner: RolloutRunner,
        model: ModelInfo,
        directory: Path,
        stop: asyncio.Event,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.progress = Progress()
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
        self._config = config
        self._parts = parts
        self._source = source
        self._runner = runner
        self._directory = directory
        self._stop = stop
        self._settings = settings or {}
        self._boundary = Boundary(parts, source)
        self._failures_said: set[str] = set()
        self._probe: Probe | None = None
        self._saved_step = -1
        self._slowest_s: float | None = None  # the longest step of this process
        self._saved_at: float | None = None  # of the event loop's clock; None: not in this process yet
        self._saving_s = 0.0  # and how long it took
        self._engines_at = 0  # the version that the engines sample from
        self._dtype = model.dtype
        self._evaluated: Mapping[str, str] | None = None  # digests of the tasks that are evaluated; None: not known yet
        self._max_diff = config.training.max_logprob_diff or largest_rounding(model.dtype)
        self._sampling = config.sampling.record()
        self._profile = parts.profile
        section = config.health
        rescoring = Rescoring(
            parts.rewards,
            parts.environments,
            every=section.rescore_every,
            groups=section.rescore_groups,
            deterministic=config.deterministic,
        )
        self._health = Health(section, directory, rescoring)

    async def run(self) -> None:
        """Run to the last step. If `stop` is set, save everything and raise Interrupted."""
        steps = self._config.training.steps
        try:
            forget_evaluations_after(self.progress.step, self._directory)
            self._boundary.mark(vars(self.progress))
            if self.progress.step == 0 and not self.progress.first:
                await self._first_evaluation()
                self._boundary.mark(vars(self.progress))
            while self.progress.step < steps:
                if self._stop.is_set():
                    raise Interrupted("stopped")
                began = asyncio.get_running_loop().time()
                await console.waited(f"step {self.progress.step + 1}", self._step(), after_s=unusual_s(self._slowest_s))
                self._slowest_s = max(self._slowest_s or 0.0, asyncio.get_running_loop().time() - began)
                self._boundary.mark(vars(self.progress))
                self._health.act()
                self._check_progress()
                if (self._is_save_due() or self._source.commit_due) and self.progress.step < steps:
                    await self.save()
            await self._source.stop()
            await self.save()
            self._say_if_nothing_was_trained()
        except (Interrupted, RunPaused):
            await self._source.stop()
            await self.save()
            raise
        finally:
            await self._source.stop()
            await self._source.close()

    def _say_if_nothing_was_trained(self) -> None:
        if not self.progress.step or self.progress.version:
            return
        alone = self._config.training.group_size == 1
        console.warn(
            f"nothing was trained in {self.progress.step} steps: no group was left (groups/flat, groups/dropped and groups/failed in the "
            "metrics), and the policy is what it was."
            + (" A group of one (training.group_size) has nothing to be compared with." if alone else "")
        )

    def _is_save_due(self) -> bool:
        every = self._config.checkpoint.every
        if every is not None:
            return every > 0 and self.progress.step % every == 0
        now = asyncio.get_running_loop().time()
        return self._saved_at is None or now - self._saved_at >= seconds_between(self._saving_s)

    async def save(self) -> None:
        """Save one durable checkpoint of everything; the groups that it holds are then settled for good."""
        if self._saved_step == self.progress.step:
            return
        began = asyncio.get_running_loop().time()
        probe = self._probe.state() if self._probe else None
        with self._profile.span("checkpoint"):
            state = self._boundary.state() | {
                "settings": self._settings,
                "evaluated": await self._evaluated_tasks(),
                "probe": probe,
                "health": self._health.state(),
                "profile": self._profile.state(),
            }
            await self.checkpoints.save(self.progress.step, state, self._parts.trainer.save)
            self._saved_step = self.progress.step
            await self._source.commit()
        self._saved_at = asyncio.get_running_loop().time()
        self._saving_s = self._saved_at - began

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Restore `checkpoint`. Called before `run`, once everything is connected and open. Raises CheckpointError for a state of
        another form."""
        state: Mapping[str, Any] = checkpoint.state
        named = f"the state in {checkpoint.directory}"
        await self._evaluated_tasks()  # of the environments: their errors are not the checkpoint's
        with taking_up(named):
            self.progress = _progress(state["progress"], checkpoint.step)
            changed = self.progress.first and await self._change_of_evaluation(state)
        if changed:
            console.warn(
                f"{changed} since the evaluation before the first step: it is not compared with those from here on."
            )
            self.progress.first = {}
        self._saved_step = self.progress.step
        with taking_up(named):
            self._probe = Probe.from_state(state["probe"]) if state["probe"] else None
            self._health.load(state.get("health", {"checks": {}}), checkpoint.step)
            if "profile" in state:
                self._profile.load(state["profile"])
            take_up(self._parts, state["parts"])
        bridge = self._parts.bridge
        async with bridge.writing(self.progress.version):
            await self._parts.trainer.restore(checkpoint.policy)
        self._engines_at = bridge.published.version if bridge.published else 0
        await self._source.publish(self._engines_at)

    # -- one step

    async def _step(self) -> None:
        """Gather, train, measure, settle, evaluate, record."""
        began = perf_counter()
        gathered = await self._gather(self.progress.version)
        ready = perf_counter()
        metrics = group_metrics(gathered.raw, gathered.failed) | await self._train(gathered)
        worst = gathered.worst_sequences(metrics)
        await self._measure_movement(gathered.raw, metrics)
        trained = perf_counter()
        self.progress.empty_steps = 0 if gathered.groups else self.progress.empty_steps + 1
        dropped = await self._settle(gathered)
        self.progress.step += 1
        metrics |= await self._evaluation_when_due()
        metrics |= self._figures(gathered, dropped) | _seconds(began, ready, trained, metrics)
        metrics |= self._parts.metrics() | self._times(gathered.leases)
        if self._parts.workers is not None:
            metrics |= self._parts.workers.step_ended(metrics)
        await self._look_and_record(gathered, metrics)
        await self._check_alignment(metrics, gathered.raw, worst)

    async def _train(self, gathered: _Gathered) -> Metrics:
        """Update and publish; without groups, do neither."""
        if not gathered.groups:
            return {"step/skipped": 1.0, "bridge/publish_s": 0.0, "bridge/bytes_copied": 0.0}
        metrics = await self._update(gathered.groups, self.progress.version + 1)
        metrics.setdefault("alignment/unchecked_share", 1.0)  # a trainer that compares nothing
        return metrics

    async def _measure_movement(self, raw: Sequence[ScoredGroup], metrics: Metrics) -> None:
        """Add to `metrics` how far the policy has moved, and how far the engine's logprobs are from the trainer's if the update
        compared none."""
        if self._probe and "step/skipped" in metrics:  # if there was an update, the engines rest already
            await self._rest_engines()
        with self._profile.span("probe"):
            at, keep = self.progress.version, self._config.training.max_staleness + 1
            shift = await self._probe.shift(self._parts.trainer, at, keep) if self._probe else 0.0
            metrics["policy/probe_shift_nats"] = shift
            if not metrics.get("alignment/fresh_tokens"):  # nothing was sampled under the version that was trained
                metrics.pop("alignment/max_abs_logprob_diff", None)
                if self._engines_at == self.progress.version:  # a bridge may publish only every so many versions
                    gap = await rescoring_gap(raw, self._parts.engine, self._parts.trainer)
                    metrics |= {} if gap is None else {"alignment/max_abs_logprob_diff": gap}

    async def _settle(self, gathered: _Gathered) -> Mapping[str, int]:
        """Report the outcome of each group. Return how many were not trained, by cause."""
        kept = {group.draw.id for group in gathered.groups}
        outcomes = [(lease, _outcome(lease.group, kept)) for lease in gathered.leases]
        await self._source.settle([*outcomes, *((lease, "dropped") for lease in gathered.refused)])
        lost = Counter(outcome for _, outcome in outcomes if outcome != "trained")
        return dict.fromkeys(("stale", "flat", "dropped"), 0) | lost + Counter(gathered.dropped)

    async def _evaluation_when_due(self) -> Metrics:
        step, config = self.progress.step, self._config.evaluation
        metrics: Metrics = {}
        last = step == self._config.training.steps
        if self._evaluates and (last or (config.every and step % config.every == 0)):
            if last and self._engines_at != self.progress.version:
                await self._unless_broken(self._parts.bridge.publish(self.progress.version))
                metrics |= await self._published()
            with self._profile.span("evaluation", config.problems):  # a stop waits for it: the step is not done without
                evaluation = await self._unless_broken(self._evaluate())
            metrics |= evaluation.metrics | {"eval/version": float(self._engines_at)}
            self.progress.last = evaluation.metrics
        return metrics

    def _figures(self, gathered: _Gathered, dropped: Mapping[str, int]) -> Metrics:
        refused = {"groups/no_such_version": float(len(gathered.refused))} if gathered.refused else {}
        return {
            "groups/trained": float(len(gathered.groups)),
            "groups/failed": float(len(gathered.failed)),
            **{f"groups/{cause}": float(count) for cause, count in dropped.items()},
            **refused,
            **staleness(gathered.groups, gathered.version),
            "policy/version": float(self.progress.version),
        }

    async def _look_and_record(self, gathered: _Gathered, metrics: Metrics) -> None:
        step, failed = self.progress.step, gathered.failed
        with self._profile.span("health"):
            metrics |= await self._health.look(step, metrics, gathered.raw, gathered.groups, failed)
        self._say_new_failures([*gathered.raw, *failed])
        groups, settled = gathered.settled()
        shown = [replace(one, tools=self._runner.tools_of(one.group)) for one in settled]
        await self._record(StepRecord(step, metrics, groups, shown))

    def _say_new_failures(self, groups: Sequence[ScoredGroup]) -> None:
        """Print why rollouts failed: the first of each kind, up to a limit. All failures are in the records."""
        for group in groups:
            for failed in group.failed:
                kind = f"{group.draw.environment} {failed.where} {failed.cause.partition(':')[0]}"
                if kind not in self._failures_said and len(self._failures_said) < KINDS_OF_FAILURE_SAID:
                    self._failures_said.add(kind)
                    console.warn(
                        f"a rollout of environment {group.draw.environment!r} failed: {failed.cause:.600} (others of this kind "
                        "are counted, not named again)"
                    )

    def _with_movement(self, batch: Batch, groups: Sequence[ScoredGroup]) -> Batch:
        """Add how far the policy has moved since each sequence was sampled, if the probe knows."""
        if self._probe is None:
            return batch
        now, moved = batch.version - 1, []
        for group in groups:
            for rollout in (rollout for episode in group.episodes for rollout in episode.rollouts):
                each = [self._probe.moved(int(one), now) for one in np.unique(rollout.policy_version[rollout.sampled])]
                known = [nats for nats in each if nats is not None]
                moved.append(max(known, default=0.0) if len(known) == len(each) else None)
        return replace(batch, columns={**batch.columns, MOVED: moved_column(moved)})

    async def _gather(self, version: int) -> _Gathered:
        """Return the groups of a step, of policy `version` at most."""
        training = self._config.training
        gathered = _Gathered(version)
        for _ in range(1 + training.refill_rounds):
            missing = training.groups_per_step - len(gathered.groups)
            if missing <= 0:
                break
            new: list[Lease] = []
            while len(new) < missing:
                new += await self._lease(missing - len(new), version, gathered.refused)
            new.sort(key=lambda lease: lease.group.draw.id)
            gathered.leases += new
            gathered.groups += await self._transform([lease.group for lease in new], gathered.dropped_by)
        lost = self._source.take_lost()
        gathered.failed, gathered.dropped, gathered.dropped_groups = lost.failed, lost.dropped, lost.dropped_groups
        return gathered

    async def _lease(self, n: int, version: int, refused: list[Lease]) -> list[Lease]:
        """Return `n` groups. Groups with versions that never existed are added to `refused`. Engines publish before a step ends, so
        `version` is the newest that a group leased for it can have."""
        training, found = self._config.training, []
        self._source.want(n + training.max_staleness * training.groups_per_step)
        leasing = self._source.lease(n, version, 2 * training.rollout_deadline_s + 60)
        ended = partial(self._profile.ended, "sample", "play", "score")
        with self._profile.span("waiting", n), self._health.waiting(self.progress.step + 1, ended):
            new = await self._unless_stopped(leasing)
        for lease in new:
            try:
                refuse_versions_that_never_were(lease.group, version)
                found.append(lease)
            except NoSuchVersion as error:
                refused.append(lease)
                if len(refused) >= PATIENCE * training.groups_per_step:
                    raise
                console.warn(f"refused, and not trained: {error}")
        return found

    async def _transform(self, groups: Sequence[ScoredGroup], dropped_by: dict[int, str]) -> Sequence[ScoredGroup]:
        """Return the groups that the transforms keep. For each other group, add the transform that left it out to `dropped_by`."""
        for name, teacher in self._parts.teachers.items():
            with self._profile.span(f"teacher.{name}", len(groups)), in_one_line(f"teacher {name!r} failed"):
                groups = await teacher.annotate(groups)
        for name, transform in self._parts.transforms.items():
            with self._profile.span(f"transform.{name}", len(groups)), in_one_line(f"transform {name!r} failed"):
                given, groups = groups, _made_by(name, await transform(groups))
            for group in groups:
                _check_advantages(group, name)
            left = {group.draw.id for group in groups}
            dropped_by |= {one.draw.id: f"transform.{name}" for one in given if one.draw.id not in left}
        return groups

    async def _update(self, groups: Sequence[ScoredGroup], version: int) -> Metrics:
        with self._profile.span("packing", len(groups)):
            batch = self._with_movement(to_batch(groups, version), groups)
        trainer, bridge = self._parts.trainer, self._parts.bridge
        await self._rest_engines()
        if self._probe is None:
            with self._profile.span("probe"):
                self._probe = await Probe.of(batch, trainer)

        def writing() -> AbstractAsyncContextManager[None]:
            return bridge.writing(version)

        start = perf_counter()
        metrics = await self._unless_broken(trainer.step(batch, writing))
        self.progress.version = version
        publishing_s = bridge.published.seconds if bridge.published else 0.0  # inside the step
        self._profile.add("trainer", perf_counter() - start - publishing_s, batch.sequences)
        return metrics | await self._published()

    async def _rest_engines(self) -> None:
        """Free engine memory: the trainer may share the engines' GPU and computes next. With max_staleness > 0 the engines keep
        sampling, so nothing is freed."""
        if self._config.training.max_staleness == 0:
            await self._unless_broken(self._parts.engine.release_cache())

    async def _published(self) -> Metrics:
        """Record what the bridge has just published, if anything."""
        published = self._parts.bridge.published
        if published is None:
            return {"bridge/publish_s": 0.0, "bridge/bytes_copied": 0.0, "bridge/bytes_on_disk": 0.0}
        self._profile.add("publishing", published.seconds)
        self._engines_at = published.version
        self.progress.syncs += 1
        self.progress.sync_s += published.seconds
        self.progress.published_bytes = published.bytes_on_disk
        await self._source.publish(self._engines_at)
        return {
            "bridge/publish_s": published.seconds,
            "bridge/bytes_copied": float(published.bytes_copied),
            "bridge/bytes_on_disk": float(published.bytes_on_disk),
        }

    # -- evaluation

    @property
    def _evaluates(self) -> bool:
        """True if there is something to evaluate: environments may only exist at remote workers."""
        return bool(self._config.evaluation.problems and self._parts.environments)

    async def _first_evaluation(self) -> None:
        if not self._evaluates:
            return
        with self._profile.span("evaluation", self._config.evaluation.problems):
            evaluation = await self._unless_stopped(self._evaluate())
        self.progress.first = evaluation.metrics
        await self._rest_engines()
        difference = await rescoring_difference(evaluation.groups, self._parts.trainer)
        metrics = evaluation.metrics | {
            **({} if difference is None else {"alignment/max_abs_logprob_diff": difference}),
            "policy/probe_shift_nats": 0.0,
            "bridge/publish_s": 0.0,
            "bridge/bytes_copied": 0.0,
            "time/step_s": evaluation.seconds,
            "tokens/s": evaluation.tokens / evaluation.seconds,
        }
        await self._record(StepRecord(0, metrics, []))
        await self._check_alignment(metrics, evaluation.groups)

    async def _evaluate(self) -> Evaluation:
        evaluation = await evaluate(
            self._runner, self._parts.environments, self._config.evaluation, self._sampling, seed=self._config.seed
        )
        self._check_one_version(evaluation.groups)
        evaluation.write(self._directory / "rollouts" / f"eval-{self.progress.step:06d}.jsonl")
        return evaluation

    async def _evaluated_tasks(self) -> Mapping[str, str]:
        if self._evaluated is None:
            given = self._parts.environments if self._evaluates else {}
            self._evaluated = await evaluated_tasks(given, self._config.evaluation)
        return self._evaluated

    async def _change_of_evaluation(self, state: Mapping[str, Any]) -> str:
        """Say why accuracies of this run are not comparable with those before `state` was saved; "" if they are."""
        had, now = state.get("settings") or {}, self._settings
        for path in sorted(had.keys() | now.keys()) if had and now else ():
            was, is_ = had.get(path), now.get(path)
            is_new = not (path in had and path in now)  # with another version of a component
            same = was == is_ or (_is_path(was) and _is_path(is_)) or (is_new and not path.endswith(".use"))
            if _affects_evaluation(path) and not same:
                return f"{path} has changed"
        known = state.get("evaluated", {})
        for name, digest in (await self._evaluated_tasks()).items():
            if digest and known.get(name, digest) != digest:
                return f"the held-out tasks of environment {name!r} have changed"
        return ""

    # -- what must hold

    async def _check_alignment(
        self, metrics: Metrics, groups: Sequence[ScoredGroup], worst: Mapping[str, str] | None = None
    ) -> None:
        """Raises Misaligned. `worst` names the owner of the sequence of `groups` that differs most."""
        worst = worst or {}
        impossible = metrics.get("alignment/impossible_nats", 0.0)
        if not impossible <= EVIDENCE_NATS:
            raise Misaligned(
                f"step {self.progress.step}: {worst.get('alignment/worst_stale', 'a rollout')} has logprobs that its tokens were "
                f"not sampled with: the trainer's own of the same tokens are {impossible:.4g} nats beyond what any earlier weights "
                f"of this policy explain; the bound is {EVIDENCE_NATS:.3g}.",
                remedy="Look at who sent it: another model or template behind its engine, another temperature than it says, "
                "top_p that it does not say, or made-up numbers. Logprobs that are not known are better left out.",
            )
        difference = metrics.get("alignment/max_abs_logprob_diff")
        excess = metrics.get("alignment/truncated_excess_nats", 0.0)
        await self._allow_for_rounding(max(difference or 0.0, excess), groups)
        if difference is not None and not difference <= self._max_diff:
            raise Misaligned(
                f"step {self.progress.step}: the engine does not sample from the weights that the trainer published. Their "
                f"logprobs of the same tokens differ by up to {difference:.3g} nats; the bound is {self._max_diff:g}."
                + (f" The most is in {where}." if (where := worst.get("alignment/worst_fresh")) else ""),
                remedy="Look at the bridge first, and with workers elsewhere at who sent it. If the difference is rounding, raise "
                "training.max_logprob_diff.",
            )
        if not excess <= self._max_diff:
            where = worst.get("alignment/worst_truncated", "a rollout")
            raise Misaligned(
                f"step {self.progress.step}: {where} was not sampled from the weights that the trainer published. It was sampled with "
                f"top_p or top_k, which only raise the logprobs of what they keep, and one of its tokens has {excess:.3g} nats less "
                f"than the trainer's own logprob; the bound is {self._max_diff:g}.",
                remedy="Check the bridge first; with workers elsewhere, check the worker that sent it.",
            )

    async def _allow_for_rounding(self, difference: float, groups: Sequence[ScoredGroup]) -> None:
        """Raise the limit if it is the default and this model rounds by more. Measured only after a difference exceeded the limit."""
        given = self._config.training.max_logprob_diff is not None
        if given or difference <= self._max_diff or not math.isfinite(difference):
            return
        rounding = await rounding_of(groups, self._parts.trainer)
        bound = bound_of(rounding, self._dtype)
        if rounding is not None and bound > self._max_diff:
            self._max_diff = bound
            console.say(
                f"step {self.progress.step}: from here on, engine and trainer may differ by {bound:.2g} nats. By measurement, "
                f"rounding moves this model's logprobs by {rounding:.2g} (training.max_logprob_diff is not set)"
            )

    def _check_one_version(self, groups: Sequence[ScoredGroup]) -> None:
        """Check that all tokens of an evaluation have the version that is reported with it, since nothing is published meanwhile."""
        if found := versions(groups) - {self._engines_at}:
            raise Misaligned(
                f"step {self.progress.step}: an evaluation of version {self._engines_at} was sampled from version "
                f"{', '.join(map(str, sorted(found)))} as well.",
                remedy="The engine must mark every token with the version that was published last: look at the engine first.",
            )

    def _check_progress(self) -> None:
        if self.progress.empty_steps < EMPTY_STEPS:
            return
        says = "Most often every rollout of a task gets the same reward"
        remedy = "Look at rollouts/ in the run directory: easier or harder tasks, a larger group_size or a finer reward help."
        if (blamed := self._health.blamed()) is not None:
            says, remedy = f"Since step {blamed.since}, {blamed.says}", blamed.remedy
        raise NoProgress(
            f"no group of the last {EMPTY_STEPS} steps was left to train on: the transforms dropped all of them. {says}.",
            remedy=remedy,
        )

    async def _unless_broken(self, work: Awaitable[T]) -> T:
        return await _first(work, self._source.broken)

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            return await _first(work, self._source.broken, stopping)
        finally:
            stopping.cancel()

    # -- keeping count

    def _times(self, leases: Sequence[Lease]) -> Metrics:
        """Return times of stages and calls since the last step's, which therefore include its sinks and checkpoint."""
        times = self._profile.step()
        times["time/disk_s"] = times.get("time/checkpoint_s", 0.0) + sum(
            spent for name, spent in times.items() if name.startswith("time/sink/")
        )
        waited = [lease.waited_s for lease in leases if lease.waited_s is not None]
        if waited:
            times |= {"time/queue_mean_s": sum(waited) / len(waited), "time/queue_max_s": max(waited)}
        return times

    async def _record(self, record: StepRecord) -> None:
        trained = any(one.batch_start is not None for one in record.settled)
        for name, sink in self._parts.sinks.items():
            with self._profile.span(f"sink.{name}"):
                if trained and not record.token_values and sink.wants_token_values(record.step):
                    record = replace(record, token_values=await self._parts.trainer.token_values())
                with in_one_line(f"sink {name!r} failed"):
                    await sink.record(record)


def _progress(saved: Mapping[str, Any], step: int) -> Progress:
    """Restore progress. Raises KeyError, TypeError, ValueError."""
    made = Progress(**saved)
    for name, usual in vars(Progress()).items():
        values = [*value.values()] if isinstance(value := getattr(made, name), dict) else [value]
        if isinstance(value, dict) != isinstance(usual, dict) or not all(type(one) in (int, float) for one in values):
            raise TypeError(f"progress.{name} is {value!r:.100}")
        if isinstance(usual, int) and (not isinstance(value, int) or value < 0):
            raise ValueError(f"progress.{name} is {value!r:.100}")
    if made.step != step or made.version > step:
        raise ValueError(f"it is of step {made.step} and version {made.version}, in the checkpoint of step {step}")
    return made


def _made_by(transform: str, groups: object) -> Sequence[ScoredGroup]:
    """Raises PluginError for anything but a list of groups."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, ScoredGroup) for group in groups):
        raise PluginError(
            f"transform {transform!r} returned {type(groups).__name__}, not a list of groups.",
            remedy="Return the groups to be trained, or an empty list if there are none.",
        )
    return groups


def _check_advantages(group: ScoredGroup, transform: str) -> None:
    """Raises PluginError for advantages that are not [G]."""
    if group.advantages is not None and np.shape(group.advantages) != (wanted := (len(group.episodes),)):
        raise PluginError(
            f"transform {transform!r} gave the group of task {group.task.id!r} advantages of shape "
            f"{np.shape(group.advantages)}, and it has {wanted[0]} episodes.",
            remedy=f"Give one advantage for each episode, shape {wanted}: group.with_advantages(...).",
        )


def unusual_s(slowest_s: float | None) -> float | None:
    """Return after how many seconds a step is shown as waited for, given the slowest step so far. None: at once, for the first step
    of a process. Each later step has a progress line."""
    return None if slowest_s is None else max(UNUSUAL_STEPS * slowest_s, UNUSUAL_S)


def _affects_evaluation(path: str) -> bool:
    """Return True if a setting of a run changes what its evaluations measure."""
    section, _, name = path.partition(".")
    if section in ("environment", "reward"):
        return not name.endswith(".weight") or section == "reward"
    return path in OF_EVALUATION


def _is_path(value: Any) -> bool:
    """True for a path: files may be moved, and changes of their contents are found by the digests of the tasks."""
    return isinstance(value, str) and value.startswith("/") and ":" not in value


def _tokens(episode: Episode) -> int:
    return sum(len(rollout.tokens) for rollout in episode.rollouts)


def _outcome(group: ScoredGroup, kept: Collection[int]) -> Outcome:
    return "trained" if group.draw.id in kept else "flat" if is_flat(group.rewards) else "dropped"


def _seconds(began: float, ready: float, trained: float, metrics: Metrics) -> Metrics:
    """Return the times of a step, without its evaluation and recording."""
    seconds = trained - began
    return {
        "time/step_s": seconds,
        "time/rollouts_s": ready - began,
        "time/training_s": trained - ready,
        "tokens/s": metrics["tokens/sampled"] / seconds,
        "trajectories/s": metrics["rollouts/count"] / seconds,
    }


async def _first(work: Awaitable[T], *breaks: asyncio.Future[Any]) -> T:
    """Await `work`, unless one of `breaks` ends first: its error is raised, and its result means stop."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *breaks}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:  # also if this wait itself was cancelled
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    for future in breaks:
        if future.done():
            future.result()
    raise Interrupted("stopped")
