"""RunConfig -> components that fit: first a Plan, which is cheap and may be refused, then the components themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from atropos_core import console
from atropos_core.config.component import Component, ComponentOnDevices, RewardComponent
from atropos_core.config.resolve import WITH_EVERY_ENGINE, ResolvedComponent, resolve_component
from atropos_core.config.run_file import NAMED, SINGLE, RunConfig, dump, flatten, left_out, to_toml
from atropos_core.errors import ConfigError, FitError, UnknownComponent
from atropos_core.guards.deadlines import within
from atropos_core.guards.endings import add_notes, raise_first
from atropos_core.guards.opens import MODEL_DEADLINE_S, opened
from atropos_core.interfaces import Bridge, Engine, Environment, Reward, Sink, TaskSource, Trainer, Transport
from atropos_core.launch.instrumented import TimedEngine, TimedTrainer
from atropos_core.launchers import Launcher, PlannedRun
from atropos_core.models.model_size import cpu_threads
from atropos_core.observe.profile import Profile
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import (
    BridgeProvider,
    Offer,
    ResolvedModel,
    RunContext,
    TeacherProvider,
    TrainerProvider,
)
from atropos_core.plugins.requirements import check_core_api, check_requires
from atropos_core.plugins.services import OpenSource, ServeEngine
from atropos_core.processes.child import CALL_DEADLINE_S, Child
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.processes.local import LocalLauncher
from atropos_core.processes.proxies import HostedEngine, HostedReward, HostedTrainer
from atropos_core.rollouts.engine_router import EngineRouter
from atropos_core.rollouts.evaluation import require_test_tasks
from atropos_core.rollouts.runner import WeightedReward, check_named_tasks, task_count
from atropos_core.rollouts.task_weights import with_weight
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.parts import CLOSE_DEADLINE_S, Closable, EvaluationParts, Parts
from atropos_core.types import Split

T = TypeVar("T")

ONE_MACHINE: frozenset[Transport] = frozenset({"in_process", "posix_shm", "cuda_ipc", "copy"})
ONE_ENGINE: frozenset[Transport] = frozenset({"posix_shm", "cuda_ipc"})  # the first engine owns what the trainer maps


@dataclass(frozen=True)
class Plan:
    """A run that is possible: every name was found, every option is valid, and the components fit."""

    config: RunConfig
    model: ResolvedModel
    engines: Sequence[ResolvedComponent]  # [engine] first, then its replicas; none for what samples elsewhere
    single: Mapping[str, ResolvedComponent]  # trainer, bridge, curriculum
    named: Mapping[str, Mapping[str, ResolvedComponent]]  # environment, reward, transform, teacher, sink
    transports: tuple[Transport, ...]  # to each engine; empty if nothing is trained
    serve_engine: ServeEngine | None = None  # if remote workers run the environments
    open_source: OpenSource | None = None  # of the workers' groups

    @property
    def today(self) -> str:
        """The date for chat templates that ask for it."""
        return str(self.config.date or "")

    def tokenizer(self) -> ChatTokenizer:
        """Return the policy's tokenizer."""
        return ChatTokenizer(self.model.directory, self.today)

    @property
    def spans_machines(self) -> bool:
        """True if engines and trainer may be on other machines."""
        return "launcher" in self.single and self.single["launcher"].has_machines

    def hosted(self) -> list[ResolvedComponent]:
        """Return the engines and the trainer that run in child processes."""
        components = [*self.engines, *(one for kind, one in self.single.items() if kind == "trainer")]
        return [one for one in components if one.offer.provider.runs_in == "process"]

    def roles(self) -> dict[str, tuple[str, ...]]:
        """Return the devices of each process that the launcher will start."""
        found = {role: one.devices for one in self.hosted() for role in one.roles}
        for one in self.named.get("teacher", {}).values():
            if isinstance(one.offer.provider, TeacherProvider):
                found |= one.offer.provider.roles(one.options, one.label)
        return found

    def code(self) -> dict[str, str]:
        """Return a digest of each file that an option names code by, `./file.py:Name`, so that a resume can tell if it changed."""
        digests = {}
        for path, value in flatten(self.resolved()):
            where = value.rpartition(":")[0] or value if isinstance(value, str) else ""
            if where.endswith(".py"):
                with suppress(OSError):
                    digests[f"{path}.code"] = hashlib.sha256(Path(where).read_bytes()).hexdigest()[:12]
        return digests

    def resolved(self) -> dict[str, Any]:
        """Return the configuration with every option of every component, defaults included, and `use = "none"` for each default
        component that is left out."""
        values = dump(self.config)
        for section, absent in left_out(self.config).items():
            values[section] |= absent
        for section, resolved in (("engine", self.engines[0]), *self.single.items()):
            values[section] = {**values[section], **dump(resolved.options)}
        for section, several in self.named.items():
            values[section] |= {
                name: {**values[section][name], **dump(resolved.options)} for name, resolved in several.items()
            }
        return values

    def notes(self) -> list[tuple[str, str]]:
        """Name and text of the values that are used and that `resolved` does not show."""
        if (trainer := self.single.get("trainer")) is None or not isinstance(trainer.offer.provider, TrainerProvider):
            return []
        return list(trainer.offer.provider.notes(trainer.options, self.transports).items())


def planned(plan: Plan, directory: Path) -> PlannedRun:
    """Return the description of the run for a launcher."""
    return PlannedRun(
        directory.absolute(),
        to_toml(plan.resolved()),
        plan.roles(),
        list(plan.config.environment),
        plan.config.api is not None,
    )


def make_plan(
    config: RunConfig,
    model: ResolvedModel,
    plugins: Plugins,
    *,
    training: bool = True,
    rollouts: bool = True,
    sampling: bool = True,
    warns: bool = True,
) -> Plan:
    """Plan a run. Raises ConfigError, UnknownComponent, PluginError or FitError. Builds nothing and imports nothing heavy.

    A process that does only part of a run leaves components out: `training` needs trainer and bridge, `rollouts` needs
    environments and rewards, `sampling` needs an engine. With an [api], workers run the environments, and those that are not
    installed here are left out. `warns`: print warnings about options without effect."""
    by_workers = training and config.api is not None
    if not config.environment and rollouts and not by_workers:
        raise ConfigError(
            f"there is no environment to {'train on' if training else 'run'}.",
            remedy="Name one: --env gsm8k, or [environment.gsm8k] in the run file.",
        )
    if training and not config.sampling.temperature:
        raise ConfigError(
            "sampling.temperature is 0: the likeliest token would be taken each time, so that all rollouts of a task are one "
            "and nothing is learnt.",
            remedy="Sample what is trained, e.g. at temperature 1. The evaluation has its own: evaluation.temperature.",
        )
    instances = config.engine.instances() if training else {"engine": config.engine} if sampling else {}
    engines = [resolve_component(plugins.registry, "engine", label, one) for label, one in instances.items()]
    single = {
        kind: resolve_component(plugins.registry, kind, kind, getattr(config, kind))
        for kind in SINGLE
        if training and kind != "engine"
    }
    named = {
        kind: {
            name: resolve_component(plugins.registry, kind, f"{kind}.{name}", component)
            for name, component in getattr(config, kind).items()
            if not (kind == "environment" and by_workers) or _is_installed(name, component, plugins)
        }
        for kind in (NAMED if training else ("environment", "reward") if rollouts else ())
    }
    if training:
        _refuse_idle_launcher([*engines, single["trainer"]], single["launcher"])
        _refuse_machines_that_are_not_there(single["trainer"], single["launcher"])
        if config.training.group_size == 1:
            _refuse_groups_of_one(named["transform"], config.api is not None)
    refuse_second_advantages(named.get("transform", {}))
    _refuse_second_writers(named.get("sink", {}))
    transports = _fit(engines, single, plugins) if training else ()
    config = config.model_copy(
        update={kind: _on_devices_of(getattr(config, kind), one) for kind, one in _engine_and_trainer(engines, single)}
    )
    for resolved in (*engines, *single.values()) if warns else ():
        for line in resolved.idle():
            console.warn(line)
    elsewhere = (plugins.engine_server(), plugins.source()) if by_workers else ()
    if config.date is None:
        config = config.model_copy(update={"date": date.today()})
    return Plan(config, model, engines, single, named, transports, *elsewhere)


def _refuse_second_writers(sinks: Mapping[str, ResolvedComponent]) -> None:
    """Raise ConfigError if two sinks would write one file."""
    writers: dict[str, tuple[str, str]] = {}
    for name, one in sinks.items():
        said = _announcements(one)
        if (place := said.get("writes")) is None:
            continue
        place, option = os.path.normpath(place), str(said.get("named_by", ""))
        first, option_of_first = writers.setdefault(place, (name, option))
        if first == name:
            continue
        chosen, by = (name, option) if option else (first, option_of_first)
        remedy = f"Set sink.{chosen}.{by} to another name, or leave one out" if by else "Leave one out"
        unwanted = first if name == one.component.use else name  # what a run has without being told, stays
        raise ConfigError(
            f"[sink.{first}] and [sink.{name}] would both write {place}, and each would undo what the other has written.",
            remedy=f"{remedy}: --set sink.{unwanted}.use=none.",
        )


def refuse_second_advantages(transforms: Mapping[str, ResolvedComponent]) -> None:
    """Raise ConfigError for two transforms that compute advantages: groups keep those of the first."""
    makers = [name for name, one in transforms.items() if "advantages" in _announcements(one)]
    if len(makers) < 2:
        return
    unwanted = "group_advantage" if "group_advantage" in makers else makers[1]
    raise ConfigError(
        f"transform.{makers[1]} has no effect: groups keep the advantages that transform.{makers[0]}, which is before it, has given them.",
        remedy=f'Leave one out, as by [transform.{unwanted}] use = "none", or --set transform.{unwanted}.use=none.',
    )


def _engine_and_trainer(
    engines: Sequence[ResolvedComponent], single: Mapping[str, ResolvedComponent]
) -> list[tuple[str, ResolvedComponent]]:
    return [("engine", one) for one in engines[:1]] + [("trainer", one) for one in (single.get("trainer"),) if one]


def _on_devices_of(component: ComponentOnDevices, resolved: ResolvedComponent) -> ComponentOnDevices:
    """Return the component with the devices that it was placed on."""
    return component.model_copy(update={"devices": resolved.devices})


def _is_installed(name: str, component: Component, plugins: Plugins) -> bool:
    try:
        plugins.registry.find("environment", component.use)
    except UnknownComponent:
        console.warn(f"environment {name!r} is not installed here: workers run it, and it is not evaluated.")
        return False
    return True


def _refuse_groups_of_one(transforms: Mapping[str, ResolvedComponent], by_workers: bool) -> None:
    """Raises ConfigError if no group of one can be trained. Warns if its advantage is 0, or if workers may send larger groups."""
    announced = {name: one.offer.provider.announces(one.options) for name, one in transforms.items()}
    baselines = {name: says["advantages"]["baseline"] for name, says in announced.items() if "advantages" in says}
    compares = next((name for name, baseline in baselines.items() if baseline in ("group", "others")), None)
    drops = next((name for name, says in announced.items() if says.get("flat_groups") == "left out"), None)
    if compares is None and drops is None:
        return
    fact = "training.group_size is 1: " + " and ".join(
        [
            *(
                [f"transform.{compares} compares a reward with the group's, so that each advantage is 0"]
                if compares
                else []
            ),
            *(
                [f"transform.{drops} leaves out groups whose rewards are all equal, and a group of one is such"]
                if drops
                else []
            ),
        ]
    )
    changes = [
        *([f"transform.{compares}.baseline=none"] if compares else []),
        *([f"transform.{drops}.use=none"] if drops else []),
    ]
    remedy = f"Set training.group_size to 2 or more; or, to train only by rewards: {' '.join(f'--set {one}' for one in changes)}"
    if drops is None or by_workers:
        console.warn(f"{fact}. {remedy}")
    else:
        raise ConfigError(f"{fact}.", remedy=remedy)


def _refuse_idle_launcher(components: Sequence[ResolvedComponent], launcher: ResolvedComponent) -> None:
    """Raises ConfigError for a launcher that would have nothing to start."""
    if launcher.component.use != "local" and all(one.offer.provider.runs_in == "here" for one in components):
        names = ", ".join(f"{one.offer.kind} {one.component.use!r}" for one in components) or "what is run"
        raise ConfigError(
            f"launcher {launcher.component.use!r} has nothing to start: {names} has no process of its own.",
            remedy="Leave the launcher out.",
        )


def _refuse_machines_that_are_not_there(trainer: ResolvedComponent, launcher: ResolvedComponent) -> None:
    if len(trainer.roles) > 1 and not launcher.has_machines:
        raise FitError(
            f"trainer.machines = {len(trainer.roles)}, but launcher {launcher.component.use!r} has only this machine.",
            remedy="Name a launcher that has several, as --launcher ray; or leave trainer.machines out: trainer.devices names several "
            "devices of one machine.",
        )


def _fit(
    engines: Sequence[ResolvedComponent], single: Mapping[str, ResolvedComponent], plugins: Plugins
) -> tuple[Transport, ...]:
    """Choose how weights travel to each engine. Only the first one can share memory."""
    first, *others = engines
    spans = single["launcher"].has_machines
    allowed = frozenset(get_args(Transport)) - (ONE_MACHINE if spans else frozenset())
    return (
        _fit_one(first, single, plugins, allowed),
        *(_fit_one(engine, single, plugins, allowed - ONE_ENGINE) for engine in others),
    )


def _fit_one(
    engine: ResolvedComponent, single: Mapping[str, ResolvedComponent], plugins: Plugins, allowed: frozenset[Transport]
) -> Transport:
    bridge, trainer, launcher = single["bridge"], single["trainer"], single["launcher"]
    possible = {transport for transport in allowed if _carries(transport, engine.devices, trainer.devices)}
    shared = bridge.transports & engine.transports & trainer.transports & possible
    if shared:
        return next(transport for transport in get_args(Transport) if transport in shared)
    between = engine.transports & trainer.transports & possible
    fitting = [
        offer.provider.name for offer in plugins.registry.offers("bridge") if between & _transports_by_default(offer)
    ]
    advice = (
        f"Use {' or '.join(f'--bridge {name}' for name in fitting)}."
        if fitting
        else f"No installed bridge joins engine {engine.component.use!r} and trainer {trainer.component.use!r}: "
        "choose another engine or trainer."
    )
    raise FitError(
        f"bridge {bridge.component.use!r} does not fit: it carries {_list(bridge.transports)}; engine {engine.component.use!r} takes "
        f"{_list(engine.transports - WITH_EVERY_ENGINE)} and trainer {trainer.component.use!r} gives {_list(trainer.transports)} "
        f"({engine.label}.devices = {', '.join(engine.devices)}; trainer.devices = {', '.join(trainer.devices)})."
        + _why_not(allowed, launcher.component.use),
        remedy=advice,
    )


def _why_not(allowed: frozenset[Transport], launcher: str) -> str:
    if not allowed & ONE_MACHINE:
        return f" Launcher {launcher!r} puts them on machines that share no memory."
    return "" if allowed >= ONE_ENGINE else " Memory can be shared with the first engine only."


def _carries(transport: Transport, engine: tuple[str, ...], trainer: tuple[str, ...]) -> bool:
    """True if these devices allow the transport. An exported CUDA allocation is mapped on its own device. Weights that a trainer
    divides over several devices are first gathered into a file."""
    whole = len(trainer) == 1
    on_gpu = whole and engine == trainer and engine[0].startswith("cuda")
    return {"posix_shm": engine == trainer == ("cpu",), "cuda_ipc": on_gpu, "copy": whole}.get(transport, True)


def _transports_by_default(offer: Offer) -> frozenset[Transport]:
    try:
        check_core_api(offer)
        check_requires(offer)
        return (
            offer.provider.transports(offer.provider.options())
            if isinstance(offer.provider, BridgeProvider)
            else frozenset()
        )
    except Exception:  # noqa: BLE001 - the plugin boundary: it needs options, another core or machine, or is broken
        return frozenset()


def _list(transports: frozenset[Transport]) -> str:
    return ", ".join(sorted(transports)) or "nothing"


async def build(plan: Plan, directory: Path) -> Parts:
    """Build every component, processes in parallel. On failure, end everything that was started."""
    builder = _Builder(plan, directory)
    return await _or_end(builder, builder.build())


async def build_for_evaluation(plan: Plan, directory: Path, engine: Engine | None = None) -> EvaluationParts:
    """Build for an evaluation: environments and rewards are open, the engine is not. `engine` replaces the plan's own."""
    builder = _Builder(plan, directory)
    return await _or_end(builder, builder.build_for_evaluation(engine))


@asynccontextmanager
async def trainer_alone(plan: Plan, directory: Path) -> AsyncIterator[Trainer]:
    """Open only the trainer of a plan, with weights of its own, for the duration of the block."""
    builder = _Builder(plan, directory)
    trainer: Trainer = await _or_end(builder, builder.build_trainer())
    try:
        yield trainer
    finally:
        await trainer.close()
        await builder.launcher.close()


def contexts(plan: Plan, directory: Path) -> list[tuple[ResolvedComponent, RunContext]]:
    """Return engines, trainer, bridge, curriculum and teachers, each with the context that it would be built with."""
    builder = _Builder(plan, directory)
    components = (*plan.engines, *plan.single.values(), *plan.named.get("teacher", {}).values())
    return [(one, builder.run_context(one)) for one in components]


def environments(plan: Plan, directory: Path) -> dict[str, Environment]:
    """Build the environments of a plan without opening them."""
    return _Builder(plan, directory).environments()


async def tasks_of(
    plan: Plan, directory: Path, look: Callable[[str, Environment], None] = lambda name, environment: None
) -> dict[str, dict[Split, int]]:
    """Return the number of tasks of each environment of a plan, by split. Opens only the environments, and calls `look` with
    each of them. Raises DataError, ConfigError."""
    builder = _Builder(plan, directory)
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


async def _or_end(builder: _Builder, building: Coroutine[Any, Any, T]) -> T:
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


def _announcements(resolved: ResolvedComponent) -> Mapping[str, Any]:
    return resolved.offer.provider.announces(resolved.options)


class _Builder:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.children: list[Child] = []  # if one of these ends, the run ends
        self.here: list[Closable] = []  # rewards and environments, which may have helpers
        self._launching: asyncio.Task[None] | None = None
        self._context = RunContext(
            directory=directory,
            model=plan.model.directory,
            steps=plan.config.training.steps,
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
                for key, value in _announcements(resolved).items()
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
            starting_workers = self.launcher.start_workers(planned(self.plan, self._context.directory))
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
        with console.waiting("the tasks to be counted"):
            sizes = {
                name: {split: task_count(name, one, split) for split in splits} for name, one in environments.items()
            }
        from atropos_core.launch.model_checks import check_first_tasks

        for name, environment in environments.items():
            check_named_tasks(name, environment, "train")
        check_first_tasks(environments, self.plan.tokenizer())
        if config.api is None:
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
            with console.waiting(f"environment {name} to be made"):
                made[name] = self._build_in_process(resolved)
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
        component = cast(RewardComponent, resolved.component)
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
        return WeightedReward(name, reward, component.weight, deadline_s)

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
        with console.waiting(f"{named} to find room for {', '.join(roles)}"):
            await within(self.launcher.check(roles), MODEL_DEADLINE_S, f"{named}: check()")
