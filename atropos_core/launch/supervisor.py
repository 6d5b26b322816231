"""One run from its plan to its end: the directory, the processes, the loop, signals, and printed lines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from atropos_core import console
from atropos_core.config.run_file import ApiSection, flatten, to_toml
from atropos_core.console.waits import waiting
from atropos_core.errors import (
    AtroposError,
    FitError,
    Interrupted,
    ProcessDied,
    TokenizerMismatch,
)
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.guards.deadlines import within
from atropos_core.guards.endings import raise_first
from atropos_core.guards.exits import own_process
from atropos_core.guards.opens import MODEL_DEADLINE_S, opened
from atropos_core.health.watch import end_recorded, forget_after
from atropos_core.interfaces import Engine, ModelInfo, Trainer
from atropos_core.launch.awake import AwakeLoop
from atropos_core.launch.banner import banner
from atropos_core.launch.builder import build
from atropos_core.launch.memory_plan import plan_memory
from atropos_core.launch.memory_remedies import check_memory
from atropos_core.launch.model_checks import check_disk, check_model
from atropos_core.launch.picture import draw_at_end
from atropos_core.launch.plan import Plan
from atropos_core.launch.signals import interruptible, signals, watched
from atropos_core.launch.text_checks import warn_of_prompts
from atropos_core.observe.memory_usage import Peak, watched_memory
from atropos_core.observe.profile import Profile, ProfileRow
from atropos_core.plugins.services import ServeEngine
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.rollouts.source import LocalSource, Source, refuse_other_tasks
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.atomic import size_bytes
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.storage.private import private_files
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.training.loop import Loop
from atropos_core.training.parts import Parts
from atropos_core.training.snapshot import Progress
from atropos_core.types import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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


def execute(plan: Plan, directory: Path, *, resume: bool = False) -> Summary:
    """Run `plan` in `directory` to the end. If one of its processes dies, restart from the last checkpoint, up to
    `plan.config.restarts` times. Raises AtroposError: FitError before anything starts if the run needs more memory than there is,
    Interrupted once everything is saved."""
    named, directory = directory, directory.absolute()  # a component may change the current directory
    run = RunDirectory(directory)
    try:
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
        for left in range(plan.config.restarts, -1, -1):
            run.checkpoints.sweep()
            checkpoint = run.checkpoints.latest(console.warn) if resume else None
            if checkpoint is None:
                forget_after(0, directory)
            began = asyncio.Event()
            try:
                with asyncio.Runner(loop_factory=AwakeLoop) as runner:
                    summary = replace(runner.run(_execute(plan, directory, checkpoint, began)), directory=named)
                run.write("summary.json", json.dumps(asdict(summary), default=str, indent=1) + "\n")
                draw_at_end(directory, sum(summary.seconds.values()), plan.config.plot)
                return summary
            except asyncio.CancelledError:
                raise Interrupted("ended at once; what came after the last checkpoint is lost") from None
            except ProcessDied as error:
                if not left or not began.is_set():  # what cannot start will not start the next time
                    raise
                resume = True
                console.warn(f"{error}\nstarting again from the last checkpoint ({left - 1} more times at most)")
    raise AssertionError("the last attempt returns or raises")


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
    tokenizer = plan.tokenizer()
    parts = await interruptible(stop, build(plan, directory))
    try:
        preparing = _prepare(plan, parts, tokenizer, directory, checkpoint, stop)
        loop = await interruptible(stop, watched(preparing, (), parts.workers))
        began.set()
        # Of a resume, with what it changed, now that this has opened.
        RunDirectory(directory).write("config.toml", to_toml(plan.resolved()))
        parts.profile.began(perf_counter() - started)
        await watched(loop.run(), parts.children, parts.workers)
    except BaseException:
        for error in await parts.close():
            console.warn(f"while ending the run: {error}")
        raise
    raise_first(await parts.close())
    return _summary(loop.progress, parts.profile, directory, peak)


async def _prepare(
    plan: Plan,
    parts: Parts,
    tokenizer: ChatTokenizer,
    directory: Path,
    checkpoint: Checkpoint | None,
    stop: asyncio.Event,
) -> Loop:
    """Open all components, connect the bridge, and load the checkpoint."""
    settings = dict(flatten(plan.resolved())) | plan.code()
    plan = _with_workers(plan, parts)
    config = plan.config
    if checkpoint is not None and config.api is None:  # before a model is loaded
        state = checkpoint.state.get("source", {})
        await refuse_other_tasks(parts.environments, state, allowed=config.checkpoint.other_tasks)
    model, engines, *_ = await asyncio.gather(
        _open_model("trainer", parts.trainer),
        asyncio.gather(*(_open_model(one.label, part) for one, part in zip(plan.engines, parts.engines, strict=True))),
        asyncio.gather(*(opened(f"teacher {name!r}", one, MODEL_DEADLINE_S) for name, one in parts.teachers.items())),
    )
    for info in engines:
        _check_model(tokenizer, model, info)
    extensions = parts.bridge.extensions()
    if "trainer" in extensions:
        await parts.trainer.endpoint.load_extension(extensions["trainer"])
    if "engine" in extensions:
        await asyncio.gather(*(engine.endpoint.load_extension(extensions["engine"]) for engine in parts.engines))
    with waiting(f"bridge {config.bridge.use} to join trainer and engine"):
        await within(
            parts.bridge.connect(parts.trainer.endpoint, parts.engines),
            MODEL_DEADLINE_S,
            f"bridge {config.bridge.use}: connect()",
        )
    runner = RolloutRunner(
        parts.environments,
        parts.rewards,
        parts.engine,
        tokenizer,
        deadline_s=config.training.rollout_deadline_s,
        deterministic=config.deterministic,
        profile=parts.profile,
        vocabulary=model.vocabulary,
    )
    source = _source(plan, parts, runner, model, directory)
    parts.opened.append(source)
    await source.open(checkpoint.state.get("source") if checkpoint else None)
    for name, environment in parts.environments.items():
        warn_of_prompts(name, environment, tokenizer)
    loop = Loop(config, parts, source, runner, model, directory, stop, settings)
    if checkpoint is not None:
        with waiting(f"the checkpoint of step {checkpoint.step} to be taken up"):
            await loop.restore(checkpoint)
    if config.api is not None and plan.serve_engine is not None:
        await _let_in(config.api, plan.serve_engine, parts, source, model)
    for name, sink in parts.sinks.items():
        await opened(f"sink {name!r}", sink)
    console.facts(banner(plan, parts, parts.tasks, model, directory, checkpoint))
    return loop


def _with_workers(plan: Plan, parts: Parts) -> Plan:
    """Return the plan with the server of the launcher's workers instead of the one in the run file."""
    if (workers := parts.workers) is None or plan.config.api is None:
        return plan
    host = f"[{workers.host}]" if ":" in workers.host else workers.host
    found = {"url": workers.url, "token_file": workers.token_file, "engine_address": f"{host}:0"}
    api = plan.config.api.model_copy(update=found)
    return replace(plan, config=plan.config.model_copy(update={"api": api}))


async def _open_model(named: str, part: Engine | Trainer) -> ModelInfo:
    """Open an engine or a trainer. One in a child process reports its own progress and errors, and has its own deadline."""
    is_here = isinstance(part.endpoint, LocalEndpoint)
    info: ModelInfo = await (opened(named, part, MODEL_DEADLINE_S) if is_here else part.open())
    return info


def _source(plan: Plan, parts: Parts, runner: RolloutRunner, model: ModelInfo, directory: Path) -> Source:
    """Return the source of groups: rollouts here, or the workers of a trajectory API."""
    if plan.open_source is None:
        return LocalSource(plan.config, runner, parts.curriculum)
    from atropos_core.models.model_size import context_tokens

    length = context_tokens(plan.model.directory)
    source: Source = plan.open_source(
        plan.config, parts.curriculum, model, directory, parts.profile, context_tokens=length
    )
    return source


async def _let_in(api: ApiSection, serve: ServeEngine, parts: Parts, source: Source, model: ModelInfo) -> None:
    """Serve the engines to remote workers, once the engines hold the run's own weights."""
    server = await serve(parts.engine, api.engine_address, api.token_file, model)
    parts.opened.insert(0, server)
    await source.add_engine(server.url)
    console.say(f"workers sample from {server.url}")
    if urlsplit(server.url).hostname in LOOPBACK and urlsplit(api.url).hostname not in LOOPBACK:
        console.warn(
            "workers on other machines cannot reach that: set api.engine_address to HOST:PORT, an address of this machine "
            "(`atropos train --engine-address HOST:PORT`)."
        )


def _check_model(tokenizer: ChatTokenizer, trainer: ModelInfo, engine: ModelInfo) -> None:
    for role, info in (("engine", engine), ("trainer", trainer)):
        if info.tokenizer != tokenizer.fingerprint:
            raise TokenizerMismatch(
                f"the {role}'s tokenizer ({info.tokenizer}) is not the policy's ({tokenizer.fingerprint}): its ids mean other text.",
                remedy="Serve and train one model directory.",
            )
        if tokenizer.vocabulary > info.vocabulary:
            raise TokenizerMismatch(
                f"the tokenizer has {tokenizer.vocabulary} ids, and the {role}'s model only {info.vocabulary} embeddings."
            )
    if engine.architecture != trainer.architecture or (
        None not in (engine.parameters, trainer.parameters) and engine.parameters != trainer.parameters
    ):
        raise FitError(
            f"the engine opened {engine.architecture} with {engine.parameters or 0:,} parameters, "
            f"the trainer {trainer.architecture} with {trainer.parameters or 0:,}."
        )


def _summary(progress: Progress, profile: Profile, directory: Path, peak: Peak) -> Summary:
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
    )
