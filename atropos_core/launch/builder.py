"""Build the components of a plan, and the processes that they run in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from atropos_core.config.component import ComponentOnDevices, RunReward
from atropos_core.config.resolve import ResolvedComponent
from atropos_core.console.waits import waiting
from atropos_core.guards.deadlines import within
from atropos_core.guards.endings import add_notes, raise_first
from atropos_core.guards.open_component import MODEL_DEADLINE_S, opened
from atropos_core.interfaces import Bridge, Engine, Environment, Reward, Sink, TaskSource, Trainer
from atropos_core.launch.plan import Plan
from atropos_core.launchers import Launcher
from atropos_core.models.model_size import cpu_threads
from atropos_core.observe.profile import Profile
from atropos_core.plugins.environment_methods import check_methods
from atropos_core.plugins.model_provider import EngineProvider
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import CALL_DEADLINE_S, Child
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.processes.local import LocalLauncher
from atropos_core.processes.proxies import HostedEngine, HostedReward, HostedTrainer
from atropos_core.processes.timing import TimedEngine, TimedTrainer
from atropos_core.rollouts.engine_router import EngineRouter
from atropos_core.rollouts.evaluation import require_test_tasks
from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.rollouts.runner import WeightedReward, check_named_tasks, task_count, warn_if_test_tasks_are_trained
from atropos_core.rollouts.task_weights import with_weight
from atropos_core.training.parts import CLOSE_DEADLINE_S, Closable, EvaluationParts, Parts, ScoringParts
from atropos_core.types import Split

T = TypeVar("T")


async def build(plan: Plan, directory: Path) -> Parts:
    """Build every component, processes in parallel. On failure, end everything that was started."""
    builder = Builder(plan, directory)
    return await _or_end(builder, builder.build())


async def build_for_evaluation(plan: Plan, directory: Path, engine: Engine | None = None) -> EvaluationParts:
    """Build for an evaluation: environments and rewards are open, the engine is not. `engine` replaces the plan's own."""
    builder = Builder(plan, directory)
    return await _or_end(builder, builder.build_for_evaluation(engine))


@asynccontextmanager
async def trainer_alone(plan: Plan, directory: Path) -> AsyncIterator[Trainer]:
    """Open only the trainer of a plan, with weights of its own, for the duration of the block."""
    builder = Builder(plan, directory)
    trainer: Trainer = await _or_end(builder, builder.build_trainer())
    try:
        yield trainer
    finally:
        await trainer.close()
        await builder.launcher.close()


@asynccontextmanager
async def scoring_parts(plan: Plan, directory: Path) -> AsyncIterator[ScoringParts]:
    """Open only the rewards, transforms and environments of a plan, for the duration of the block."""
    builder = Builder(plan, directory)
    made = await _or_end(builder, builder.build_for_scoring())
    try:
        yield made
    finally:
        closing = [within(part.close(), CLOSE_DEADLINE_S, f"{type(part).__name__}: close()") for part in builder.here]
        raise_first(await asyncio.gather(*closing, return_exceptions=True))


def contexts(plan: Plan, directory: Path) -> list[tuple[ResolvedComponent, RunContext]]:
    """Return engines, trainer, bridge, curriculum and teachers, each with the context that it would be built with."""
    builder = Builder(plan, directory)
    components = (*plan.engines, *plan.single.values(), *plan.named.get("teacher", {}).values())
    return [(one, builder.run_context(one)) for one in components]


def environments(plan: Plan, directory: Path) -> dict[str, Environment]:
    """Build the environments of a plan without opening them."""
    return Builder(plan, directory).environments()


async def tasks_of(
    plan: Plan, directory: Path, look: Callable[[str, Environment], None] = lambda name, environment: None
) -> dict[str, dict[Split, int]]:
    """Return the number of tasks of each environment of a plan, by split. Opens only the environments, and calls `look` with
    each of them. Raises DataError, ConfigError."""
    builder = Builder(plan, directory)
    made = builder.environments()

    async def opened() -> dict[str, dict[Split, int]]:
        sizes = await builder.opened_environments(made)
        for name, environment in made.items():
            look(name, environment)
        return sizes

    sizes = await _or_end(builder, opened())
    await asyncio.gather(
        *(within(one.close(), CLOSE_DEADLINE_S, f"environment {n!r}: close()") for n, one in made.items())
    )
    return sizes


async def _or_end(builder: Builder, building: Coroutine[Any, Any, T]) -> T:
    try:
        return await building
    except BaseException as error:
        started: list[Closable] = [*builder.children, *builder.here]
        closing = [within(part.close(), CLOSE_DEADLINE_S, f"{type(part).__name__}: close()") for part in started]
        ended = await asyncio.gather(*closing, return_exceptions=True)
        last = within(builder.launcher.close(), CLOSE_DEADLINE_S, "launcher: close()")
        ended += await asyncio.gather(last, return_exceptions=True)
        first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        add_notes(first, ended, "nor could what was started be ended")
        if first is not error:
            raise first from None
        raise


class Builder:
    """Builds components, and keeps what must be closed if one of them cannot be built."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.children: list[Child] = []  # if one of these ends, the run ends
        self.here: list[Closable] = []  # rewards and environments, which may have helpers
        self._launching: asyncio.Task[None] | None = None
        self._context = RunContext(
            directory=directory,
            model=plan.model.directory,
            steps=plan.config.training.steps,
            warmup_steps=plan.config.warmup_steps,
            seed=plan.config.seed,
            deterministic=plan.config.deterministic,
            today=plan.today,
            transport=plan.transports[0] if plan.transports else None,
            transports=plan.transports,
            is_trained=bool(plan.transports)
            or not plan.engines,  # without an engine it is a worker, of a trainer elsewhere
            max_staleness=plan.config.training.max_staleness,
            patience=plan.config.watch.patience(),
            announced={
                key: value
                for resolved in (
                    *plan.engines,
                    *(plan.single[kind] for kind in ("trainer", "bridge") if kind in plan.single),
                    *plan.named.get("transform", {}).values(),
                )
                for key, value in resolved.announced.items()
            },
        )
        launcher = plan.single.get("launcher")  # of a run; what is evaluated, served or audited is here
        self.launcher: Launcher = LocalLauncher() if launcher is None else self._build_in_process(launcher)
        self._context = dataclasses.replace(self._context, launcher=self.launcher)

    async def build(self) -> Parts:
        single, named = self.plan.single, self.plan.named
        workers = None
        if self.plan.hosted():
            await self._opened_launcher()
            starting_workers = self.launcher.start_workers(self.plan.for_launcher(self._context.directory))
            workers = await within(starting_workers, MODEL_DEADLINE_S, "launcher: start_workers()")
        async with asyncio.TaskGroup() as group:  # the two slow ones first, while the rest is built here
            starting = [group.create_task(self._hosted_or_here("engine", one)) for one in self.plan.engines]
            trainer = group.create_task(self.build_trainer())
            rewards = [group.create_task(self._reward(name, resolved)) for name, resolved in named["reward"].items()]
            await asyncio.sleep(0)
            environments = self.environments()
            tasks = group.create_task(self.opened_environments(environments))
            bridge: Bridge = self._build_in_process(single["bridge"])
            sinks: dict[str, Sink] = {
                name: self._build_in_process(resolved) for name, resolved in named["sink"].items()
            }
        profile = Profile()
        engines: list[Engine] = [
            TimedEngine(engine.result(), resolved.label, profile)
            for engine, resolved in zip(starting, self.plan.engines, strict=True)
        ]
        one = engines[0] if len(engines) == 1 else EngineRouter(engines, deterministic=self.plan.config.deterministic)
        return Parts(
            environments=environments,
            tasks=tasks.result(),
            rewards=[reward.result() for reward in rewards],
            engines=engines,
            engine=one,
            measured={
                resolved.label.replace(".", "/"): engine.result()
                for engine, resolved in zip(starting, self.plan.engines, strict=True)
                if isinstance(provider := resolved.offer.provider, EngineProvider)
                and provider.measures(resolved.options)
            },
            trainer=TimedTrainer(trainer.result(), profile),
            bridge=bridge,
            curriculum=self._build_in_process(single["curriculum"]),
            transforms={name: self._build_in_process(resolved) for name, resolved in named["transform"].items()},
            teachers={name: self._build_in_process(resolved) for name, resolved in named["teacher"].items()},
            sinks=sinks,
            children=self.children,
            launcher=self.launcher,
            workers=workers,
            profile=profile,
        )

    async def opened_environments(self, environments: Mapping[str, Environment]) -> dict[str, dict[Split, int]]:
        """Return how many tasks each environment has, by split. Runs while engines and trainer import, so that missing data end
        the run early. Raises DataError, ConfigError."""
        config = self.plan.config
        await self._open(environments)
        splits: tuple[Split, ...] = ("train", "test") if config.evaluation.problems else ("train",)
        with waiting("the tasks to be counted"):
            sizes = {
                name: {split: task_count(name, one, split) for split in splits} for name, one in environments.items()
            }
        from atropos_core.launch.model_checks import check_first_tasks

        for name, environment in environments.items():
            check_named_tasks(name, environment, "train")
            if "test" in splits:
                warn_if_test_tasks_are_trained(name, environment)
        check_first_tasks(environments, self.plan.tokenizer())
        if config.api is None and sizes:  # a run with only a warm start has none
            sources = {name: TaskSource(size["train"], config.environment[name].weight) for name, size in sizes.items()}
            with_weight(sources)
        if config.evaluation.problems and sizes:
            require_test_tasks(sum(size["test"] for size in sizes.values()))
        return sizes

    async def build_trainer(self) -> Any:
        return await self._hosted_or_here("trainer", self.plan.single["trainer"])

    async def build_for_evaluation(self, engine: Engine | None) -> EvaluationParts:
        named = self.plan.named
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._engine_or(engine))
            environments = self.environments()
            group.create_task(self._open(environments))
            rewards = [group.create_task(self._reward(name, one)) for name, one in named.get("reward", {}).items()]
        return EvaluationParts(
            environments=environments,
            rewards=[reward.result() for reward in rewards],
            engine=starting.result(),
            children=self.children,
            launcher=self.launcher,
        )

    async def build_for_scoring(self) -> ScoringParts:
        named = self.plan.named
        async with asyncio.TaskGroup() as group:
            environments = self.environments()
            group.create_task(self._open(environments))
            rewards = [group.create_task(self._reward(name, one)) for name, one in named.get("reward", {}).items()]
        transforms = {name: self._build_in_process(one) for name, one in named.get("transform", {}).items()}
        return ScoringParts(environments, [reward.result() for reward in rewards], transforms)

    async def _engine_or(self, engine: Engine | None) -> Engine:
        found: Engine = engine or await self._hosted_or_here("engine", self.plan.engines[0])
        return found

    async def _open(self, environments: Mapping[str, Environment]) -> None:
        self.here += environments.values()
        await asyncio.gather(*(opened(f"environment {name!r}", one) for name, one in environments.items()))

    def run_context(self, resolved: ResolvedComponent) -> RunContext:
        if not isinstance(resolved.component, ComponentOnDevices):
            return dataclasses.replace(self._context, label=resolved.label)
        threads = resolved.component.threads or cpu_threads(self._context.model)
        context = dataclasses.replace(
            self._context, label=resolved.label, devices=resolved.component.devices, threads=threads
        )
        context = dataclasses.replace(context, machines=len(resolved.roles))
        if resolved in self.plan.engines and self.plan.transports:
            context = dataclasses.replace(context, transport=self.plan.transports[self.plan.engines.index(resolved)])
        return context

    def environments(self) -> dict[str, Environment]:
        """Build the environments without opening them."""
        made: dict[str, Environment] = {}
        for name, resolved in self.plan.named.get("environment", {}).items():
            with waiting(f"environment {name} to be made"):
                made[name] = self._build_in_process(resolved)
            check_methods(type(made[name]), name, made[name])
        return made

    def _build_in_process(self, resolved: ResolvedComponent) -> Any:
        return resolved.build(self.run_context(resolved))

    async def _hosted_or_here(self, kind: str, resolved: ResolvedComponent) -> Any:
        if resolved.offer.provider.runs_in == "here":
            built = self._build_in_process(resolved)
            built.endpoint = getattr(built, "endpoint", None) or LocalEndpoint(built)
            return built
        starting = [self._child(resolved, machine) for machine in range(len(resolved.roles))]
        started = await asyncio.gather(*starting, return_exceptions=True)
        raise_first(started)
        child, *others = cast(list[Child], started)
        if others:
            leaders = await child.peer.call("lead", deadline_s=CALL_DEADLINE_S)
            following = zip(others, leaders, strict=True)
            await asyncio.gather(*(one.peer.call("follow", to, deadline_s=CALL_DEADLINE_S) for one, to in following))
        return HostedEngine(child) if kind == "engine" else HostedTrainer(child, others)

    async def _reward(self, name: str, resolved: ResolvedComponent) -> WeightedReward:
        component = cast(RunReward, resolved.component)
        deadline_s = component.deadline_s
        reward: Reward
        if (component.runs_in or resolved.offer.provider.runs_in) == "here":
            reward = self._build_in_process(resolved)
        else:
            reward = HostedReward(
                lambda: resolved.start(self.run_context(resolved), f"reward-{name}", 1), deadline_s, f"reward {name!r}"
            )
        if isinstance(reward, Closable):
            self.here.append(reward)
        await opened(f"reward {name!r}", reward)
        if getattr(reward, "queues", False):  # a stuck call costs its deadline before the next has its turn
            training, problems = self.plan.config.training, self.plan.config.evaluation.problems
            deadline_s *= 1 + max(training.groups_per_step * (1 + training.max_staleness), problems)
        return WeightedReward(name, reward, component.weight, deadline_s, GoldTasks.of(component.gold))

    async def _child(self, resolved: ResolvedComponent, machine: int) -> Child:
        await self._opened_launcher()
        context = dataclasses.replace(self.run_context(resolved), machine=machine)
        role = resolved.roles[machine]
        child = await resolved.start(context, role, context.threads, needed=True, launcher=self.launcher)
        self.children.append(child)
        return child

    async def _opened_launcher(self) -> None:
        """Open the launcher once; later callers wait for the first."""
        if self._launching is None:
            self._launching = asyncio.create_task(self._open_launcher())
        await asyncio.shield(self._launching)

    async def _open_launcher(self) -> None:
        """Open the launcher for all processes that it will start. Raises FitError before any is started."""
        named = f"launcher {self.plan.config.launcher.use}" if "launcher" in self.plan.single else "launcher local"
        await opened(named, self.launcher)
        roles = list(self.plan.roles())
        with waiting(f"{named} to find room for {', '.join(roles)}"):
            await within(self.launcher.check(roles), MODEL_DEADLINE_S, f"{named}: check()")
