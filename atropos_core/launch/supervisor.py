"""One run from its plan to its end: the directory, the processes, the loop, signals, and printed lines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter

from atropos_core import console
from atropos_core.config.run_file import to_toml
from atropos_core.errors import (
    AtroposError,
    Interrupted,
    ProcessDied,
    RunRolledBack,
)
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.guards.endings import raise_first
from atropos_core.guards.exits import own_process
from atropos_core.health.watch import end_recorded, forget_after
from atropos_core.launch.awake import AwakeLoop
from atropos_core.launch.banner import paths
from atropos_core.launch.builder import build
from atropos_core.launch.memory_plan import plan_memory
from atropos_core.launch.memory_remedies import check_memory
from atropos_core.launch.model_checks import check_disk, check_model
from atropos_core.launch.picture import draw_at_end
from atropos_core.launch.plan import Plan
from atropos_core.launch.rolling_back import finish_rollback, refuse_hopeless_rollback
from atropos_core.launch.signals import interruptible, signals, watched
from atropos_core.launch.start import start
from atropos_core.launch.warmup import with_warmup
from atropos_core.observe.memory_usage import Peak, watched_memory
from atropos_core.observe.profile import Profile, ProfileRow
from atropos_core.storage.atomic import size_bytes
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.storage.file_permissions import private_files
from atropos_core.storage.run_directory import PATHS, RunDirectory
from atropos_core.storage.run_records import Rollback, rollbacks
from atropos_core.training.snapshot import Progress
from atropos_core.types import Metrics


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    directory: Path
    steps: int
    seconds: dict[str, float]  # of each stage, which add up to the whole
    times: list[ProfileRow]  # of each stage and each kind of call
    idle: dict[str, float]  # share of the time in which the trainer, and each engine, had no request
    before: Metrics  # the evaluation before the first step, empty without one
    after: Metrics
    syncs: int  # how often weights were published
    sync_s: float  # and how long that took in all
    peak_bytes: int  # of memory, over all processes
    checkpoint_bytes: int  # of the last checkpoint
    published_bytes: int  # on disk, for the last publishing
    paths: dict[str, str]  # which way of computing the model each engine and trainer took, and why
    rollbacks: list[Rollback] = field(default_factory=list)  # oldest first


def execute(plan: Plan, directory: Path, *, resume: bool = False) -> Summary:
    """Run `plan` in `directory` to the end. If one of its processes dies, restart from the last checkpoint, up to
    `plan.config.restarts` times. If a health check rolls the run back, continue from the checkpoint that it names.
    Raises AtroposError: FitError before anything starts if the run needs more memory than there is,
    Interrupted once everything is saved."""
    named, directory = directory, directory.absolute()  # a component may change the current directory
    run = RunDirectory(directory)
    try:
        if not resume:
            refuse_hopeless_rollback(plan.config)
        plan.check_files()
        check_model(plan, directory)
        if not plan.config.oversubscribe and not plan.spans_machines:
            check_memory(plan, directory, plan_memory(plan, directory))
            check_disk(plan, directory)
    except AtroposError:
        if not resume:
            run.remove_if_empty()
        raise
    with private_files(), run.locked(), end_recorded(directory):
        if not resume:
            run.write("config.toml", to_toml(plan.resolved()))
        left = plan.config.restarts
        while True:
            run.checkpoints.sweep()
            if resume:
                plan = finish_rollback(plan, run)
            checkpoint = run.checkpoints.latest(console.warn) if resume else None
            if checkpoint is None:
                forget_after(0, directory)
            began = asyncio.Event()
            try:
                with asyncio.Runner(loop_factory=AwakeLoop) as runner:
                    summary = replace(runner.run(_execute(plan, directory, checkpoint, began)), directory=named)
                _write_summary(run, summary)
                draw_at_end(directory, sum(summary.seconds.values()), plan.config.plot)
                return summary
            except asyncio.CancelledError:
                raise Interrupted("ended at once; what came after the last checkpoint is lost") from None
            except RunRolledBack:  # the check has reported why
                resume = True
            except ProcessDied as error:
                if not left or not began.is_set():  # what cannot start will not start the next time
                    raise
                resume = True
                left -= 1
                console.warn(f"{error}\nstarting again from the last checkpoint ({left} more times at most)")


def _write_summary(run: RunDirectory, summary: Summary) -> None:
    rows = asdict(summary)
    if not summary.rollbacks:
        del rows["rollbacks"]
    run.write("summary.json", json.dumps(rows, default=str, indent=1) + "\n")


async def _execute(plan: Plan, directory: Path, checkpoint: Checkpoint | None, began: asyncio.Event) -> Summary:
    started = perf_counter()
    stop = asyncio.Event()
    with signals(stop, began), blocked_loop_alarm(), own_process():
        async with watched_memory() as peak:
            return await _run(plan, directory, checkpoint, stop, began, started, peak)


async def _run(
    plan: Plan,
    directory: Path,
    checkpoint: Checkpoint | None,
    stop: asyncio.Event,
    began: asyncio.Event,
    started: float,
    peak: Peak,
) -> Summary:
    plan, warmup = await interruptible(stop, with_warmup(plan, 0 if checkpoint is None else checkpoint.step))
    parts = await interruptible(stop, build(plan, directory))
    parts.warmup = warmup
    try:
        starting = start(plan, parts, directory, checkpoint, stop)
        loop = await interruptible(stop, watched(starting, (), parts.workers))
        began.set()
        # A resume may have changed values. They are kept now that everything has opened.
        RunDirectory(directory).write("config.toml", to_toml(plan.resolved()))
        RunDirectory(directory).write(PATHS, json.dumps(taken := paths(plan, directory)) + "\n")
        parts.profile.began(perf_counter() - started)
        await watched(loop.run(), parts.children, parts.workers)
    except BaseException:
        for error in await parts.close():
            console.warn(f"while ending the run: {error}")
        raise
    raise_first(await parts.close())
    return _summary(loop.progress, parts.profile, directory, peak, taken)


def _summary(progress: Progress, profile: Profile, directory: Path, peak: Peak, paths: dict[str, str]) -> Summary:
    return Summary(
        directory,
        progress.step,
        profile.seconds(),
        profile.rows(),
        profile.idle(),
        dict(progress.first),
        dict(progress.last),
        progress.syncs,
        progress.sync_s,
        peak.size_bytes,
        size_bytes(directory / "checkpoints" / f"step-{progress.step:06d}"),
        progress.published_bytes,
        paths,
        rollbacks(directory),
    )
