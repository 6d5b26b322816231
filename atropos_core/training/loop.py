"""THE loop: draw, roll out, score, transform, step, publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from atropos_core import console
from atropos_core.config.run_file import RunConfig
from atropos_core.console.waits import waited
from atropos_core.errors import Interrupted, NoProgress, RunPaused
from atropos_core.guards.open_component import in_one_line
from atropos_core.health.check import Settings
from atropos_core.health.gold_reward import GoldComparison
from atropos_core.health.reward_rescoring import Rescoring
from atropos_core.health.rollback import RollbackPlanner
from atropos_core.health.watch import Health, measured_before_training
from atropos_core.interfaces import ModelInfo, StepRecord
from atropos_core.rollouts.evaluation import Evaluation
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.rollouts.source import Source
from atropos_core.storage.checkpoint import Checkpoint, Checkpoints, seconds_between, taking_up
from atropos_core.training.alignment_check import AlignmentCheck, rescoring_difference, rescoring_gap
from atropos_core.training.batch import to_batch
from atropos_core.training.evaluations import Evaluations
from atropos_core.training.gather import GatheredGroups, GroupGatherer
from atropos_core.training.metrics import group_metrics, stage_times, staleness, step_speed
from atropos_core.training.parts import Parts
from atropos_core.training.probe import Probe
from atropos_core.training.snapshot import Progress, Snapshot, restore_parts
from atropos_core.training.warm_start import check_state, state_of
from atropos_core.types import Metrics, ScoredGroup

T = TypeVar("T")

KINDS_OF_FAILURE_SAID = 5  # of rollouts, in a run
# A step that lasts as long as 5 of the slowest so far, and at least a minute, is shown as a wait.
UNUSUAL_STEPS, UNUSUAL_S = 5, 60.0
EMPTY_STEPS = 10  # in a row, before the run says that there is nothing to learn from


class Loop:
    """Runs to `config.all_steps`. `directory` is the run's own; `runner` runs the evaluation; `settings` are saved in every
    checkpoint, so that a resume can tell what has changed; `context_tokens` is the model's, 0 if unknown."""

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
        context_tokens: int = 0,
    ) -> None:
        self.progress = Progress()
        rolls_back = config.health.rolls_back
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep, for_rollback=rolls_back)
        self._config = config
        self._parts = parts
        self._source = source
        self._runner = runner
        self._stop = stop
        self._settings = settings or {}
        self._snapshot = Snapshot(parts, source)
        self._failures_said: set[str] = set()
        self._probe: Probe | None = None
        self._saved_step = -1
        self._slowest_s: float | None = None  # the longest step of this process
        self._saved_at: float | None = None  # of the event loop's clock; None: not in this process yet
        self._saving_s = 0.0  # and how long it took
        self._engines_at = 0  # the version that the engines sample from
        self._evaluations = Evaluations(config, parts.environments, runner, directory)
        self._alignment = AlignmentCheck(config.training.max_logprob_diff, model.dtype, parts.trainer)
        self._profile = parts.profile
        section = config.health
        rescoring = Rescoring(
            parts.rewards,
            parts.environments,
            every=section.rescore_every,
            groups=section.rescore_groups,
            deterministic=config.deterministic,
        )
        shown = Settings.of(config, context_tokens)
        formats = {name: environment.answer_format for name, environment in parts.environments.items()}
        self._health = Health(
            section,
            directory,
            rescoring,
            shown,
            formats,
            GoldComparison.of(parts.rewards, self._settings),
            RollbackPlanner(config, directory, self.checkpoints) if rolls_back else None,
        )
        self._gatherer = GroupGatherer(config.training, parts, source, self._health, self._unless_stopped)

    async def run(self) -> None:
        """Run to the last step. If `stop` is set, save everything and raise Interrupted."""
        steps = self._config.all_steps
        try:
            self._evaluations.forget_after(self.progress.step)
            self._snapshot.take(self.progress)
            if self.progress.step == 0 and not self.progress.first:
                await self._first_evaluation()
                self._snapshot.take(self.progress)
                self._health.act()
            while self.progress.step < steps:
                if self._stop.is_set():
                    raise Interrupted("stopped")
                began = asyncio.get_running_loop().time()
                in_warmup = self.progress.step < self._config.warmup_steps
                step = self._supervised_step() if in_warmup else self._step()
                await waited(f"step {self.progress.step + 1}", step, after_s=unusual_s(self._slowest_s))
                self._slowest_s = max(self._slowest_s or 0.0, asyncio.get_running_loop().time() - began)
                self._snapshot.take(self.progress)
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
        if self.progress.step <= self._config.warmup_steps or self.progress.version > self._config.warmup_steps:
            return
        alone = self._config.training.group_size == 1
        console.warn(
            f"nothing was trained in {self.progress.step - self._config.warmup_steps} steps: no group was left (groups/flat, "
            "groups/dropped and groups/failed in the metrics), and the policy is what it was."
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
            state = self._snapshot.state() | {
                "settings": self._settings,
                "evaluated": await self._evaluations.tasks(),
                "probe": probe,
                "health": self._health.state(),
                "profile": self._profile.state(),
                "warmup": state_of(self._parts.warmup, self._config.warmup_steps),
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
        check_state(state.get("warmup", {}), self._parts.warmup, self._config.warmup_steps, checkpoint.step)
        await self._evaluations.tasks()  # of the environments: their errors are not the checkpoint's
        with taking_up(named):
            self.progress = Progress.restored(state["progress"], checkpoint.step)
            changed = self.progress.first and await self._evaluations.changes(state, self._settings)
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
            restore_parts(self._parts, state["parts"])
        bridge = self._parts.bridge
        async with bridge.writing(self.progress.version):
            await self._parts.trainer.restore(checkpoint.policy)
        self._engines_at = bridge.published.version if bridge.published else 0
        await self._source.publish(self._engines_at)

    # -- one step

    async def _step(self) -> None:
        """Gather, train, measure, settle, evaluate, record."""
        began = perf_counter()
        gathered = await self._gatherer.gather(self.progress.step + 1, self.progress.version)
        ready = perf_counter()
        metrics = group_metrics(gathered.raw, gathered.failed) | await self._train(gathered.kept)
        worst = gathered.worst_sequences(metrics)
        await self._measure_movement(gathered.raw, metrics)
        trained = perf_counter()
        self.progress.empty_steps = 0 if gathered.kept else self.progress.empty_steps + 1
        await self._source.settle(gathered.outcomes())
        self.progress.step += 1
        metrics |= await self._evaluation_when_due()
        metrics |= gathered.counts() | staleness(gathered.kept, gathered.version)
        metrics |= {"policy/version": float(self.progress.version)} | step_speed(began, ready, trained, metrics)
        metrics |= self._parts.metrics() | await self._unless_broken(self._parts.engine_metrics())
        metrics |= stage_times(self._profile, gathered.leased)
        if self._parts.workers is not None:
            metrics |= self._parts.workers.step_ended(metrics)
        await self._look_and_record(gathered, metrics)
        await self._alignment.check(self.progress.step, metrics, gathered.raw, worst)

    async def _supervised_step(self) -> None:
        """Take one step of the warm start. The engines keep the weights that they have, and get the new ones after the last step."""
        warmup, trainer = self._parts.warmup, self._parts.trainer
        assert warmup is not None, "it is only missing once it is done"
        began, step = perf_counter(), self.progress.step + 1
        await self._unless_broken(self._parts.engine.release_cache())
        batch = warmup.batch(step)
        start = perf_counter()
        trained = await self._unless_broken(trainer.supervised_step(batch, warmup.rate(step)))
        ended = perf_counter()
        self._profile.add("trainer", ended - start, batch.sequences)
        self.progress.step, self.progress.version = step, batch.version
        metrics = trained | await warmup.held_out_loss(step, trainer)
        metrics |= {"warmup/rows": float(batch.sequences), "policy/version": float(self.progress.version)}
        metrics |= {"time/step_s": ended - began, "tokens/s": len(batch.tokens) / (ended - start)}
        if step == warmup.rows.steps:
            await self._unless_broken(self._parts.bridge.publish(self.progress.version))
            metrics |= await self._published()
        metrics |= await self._evaluation_when_due()
        await self._record(StepRecord(step, metrics | stage_times(self._profile, ()), []))

    async def _train(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Update and publish; without groups, do neither."""
        if not groups:
            return {"step/skipped": 1.0, "bridge/publish_s": 0.0, "bridge/bytes_copied": 0.0}
        metrics = await self._update(groups, self.progress.version + 1)
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

    async def _evaluation_when_due(self) -> Metrics:
        metrics: Metrics = {}
        if self._evaluations.is_due(self.progress.step):
            is_last = self.progress.step == self._config.all_steps
            if is_last and self._engines_at != self.progress.version:
                await self._unless_broken(self._parts.bridge.publish(self.progress.version))
                metrics |= await self._published()
            # A stop waits for it: the step is not done without.
            with self._profile.span("evaluation", self._config.evaluation.problems):
                evaluating = self._evaluations.run(self.progress.step, self._engines_at)
                evaluation = await self._unless_broken(evaluating)
            metrics |= evaluation.metrics | {"eval/version": float(self._engines_at)}
            self.progress.last = evaluation.metrics
            if self.progress.step == self._config.warmup_steps:  # what was published has not been compared yet
                metrics |= await self._compared(evaluation)
                await self._alignment.check(self.progress.step, metrics, evaluation.groups)
        return metrics

    async def _look_and_record(self, gathered: GatheredGroups, metrics: Metrics) -> None:
        step, failed = self.progress.step, gathered.failed
        with self._profile.span("health"):
            metrics |= await self._health.look(step, metrics, gathered.raw, gathered.kept, failed)
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

    async def _update(self, groups: Sequence[ScoredGroup], version: int) -> Metrics:
        with self._profile.span("packing", len(groups)):
            batch = to_batch(groups, version)
            if self._probe is not None:
                batch = self._probe.with_movement(batch, groups)
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

    async def _first_evaluation(self) -> None:
        warmup = self._parts.warmup
        supervised = await warmup.held_out_loss(0, self._parts.trainer) if warmup is not None else {}
        if not self._evaluations.enabled:
            if supervised:
                await self._record(StepRecord(0, supervised, []))
            return
        with self._profile.span("evaluation", self._config.evaluation.problems):
            evaluation = await self._unless_stopped(self._evaluations.run(0, self._engines_at))
        self.progress.first = evaluation.metrics
        measured = group_metrics([group for group in evaluation.groups if group.episodes])
        metrics = measured_before_training(evaluation.groups, measured) | evaluation.metrics
        metrics |= {
            **supervised,
            **await self._compared(evaluation),
            **await self._unless_broken(self._parts.engine_metrics()),
            "policy/probe_shift_nats": 0.0,
            "bridge/publish_s": 0.0,
            "bridge/bytes_copied": 0.0,
            "time/step_s": evaluation.seconds,
            "tokens/s": evaluation.tokens / evaluation.seconds,
        }
        await self._record(StepRecord(0, metrics, []))
        self._health.look_before_training(metrics, evaluation.groups)
        await self._alignment.check(0, metrics, evaluation.groups)

    async def _compared(self, evaluation: Evaluation) -> Metrics:
        """Return how far the engine's logprobs of an evaluation are from the trainer's, if that can be known."""
        await self._rest_engines()
        difference = await rescoring_difference(evaluation.groups, self._parts.trainer)
        return {} if difference is None else {"alignment/max_abs_logprob_diff": difference}

    def _check_progress(self) -> None:
        if self.progress.empty_steps < EMPTY_STEPS:
            return
        says = "Most often every rollout of a task gets the same reward"
        remedy = "Look at rollouts/ in the run directory: easier or harder tasks, a larger group_size or a finer reward help."
        if (blamed := self._health.blamed()) is not None:
            says, remedy = f"{blamed.when.capitalize()}, {blamed.says}", blamed.remedy
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

    async def _record(self, record: StepRecord) -> None:
        trained = any(one.batch_start is not None for one in record.settled)
        for name, sink in self._parts.sinks.items():
            with self._profile.span(f"sink.{name}"):
                if trained and not record.token_values and sink.wants_token_values(record.step):
                    record = replace(record, token_values=await self._parts.trainer.token_values())
                with in_one_line(f"sink {name!r} failed"):
                    await sink.record(record)


def unusual_s(slowest_s: float | None) -> float | None:
    """Return after how many seconds a step is shown as waited for, given the slowest step so far. None: at once, for the first step
    of a process. Each later step has a progress line."""
    return None if slowest_s is None else max(UNUSUAL_STEPS * slowest_s, UNUSUAL_S)


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
