"""RunConfig -> components that fit: first a Plan, which is free to make and may be refused; then the parts themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args, runtime_checkable

from atropos_core import console
from atropos_core.chosen import Chosen, choose
from atropos_core.component import Component, Placed, RewardComponent
from atropos_core.config import NAMED, SINGLE, RunConfig, flatten
from atropos_core.errors import ConfigError, FitError, UnknownComponent
from atropos_core.fleet import Fleet
from atropos_core.hosting import Child, HostedEngine, HostedReward, HostedTrainer, LocalEndpoint
from atropos_core.interfaces import (
    Bridge,
    Curriculum,
    Engine,
    Environment,
    Measured,
    Reward,
    Sink,
    Stateful,
    Teacher,
    Trainer,
    Transform,
    Transport,
)
from atropos_core.plugins import Plugins
from atropos_core.policy import within
from atropos_core.profile import Profile
from atropos_core.registry import Offer, ResolvedModel, RunContext, check_core_api, check_requires
from atropos_core.rollouts import WeightedReward
from atropos_core.types import Metrics

T = TypeVar("T")

CLOSE_DEADLINE_S = 30.0
ONE_ENGINE: frozenset[Transport] = frozenset({"posix_shm", "cuda_ipc"})  # the first engine owns what the trainer maps


@dataclass(frozen=True)
class Plan:
    """A run that can be: every name found, every option valid, the parts fit."""

    config: RunConfig
    model: ResolvedModel
    engines: Sequence[Chosen]  # [engine] first, then its replicas; none for what samples elsewhere
    single: Mapping[str, Chosen]  # trainer, bridge, curriculum
    named: Mapping[str, Mapping[str, Chosen]]  # environment, reward, transform, teacher, sink
    transports: tuple[Transport, ...]  # to each engine; empty where nothing is trained

    def code(self) -> dict[str, str]:
        """A digest of each file that an option names code by, `./file.py:Name`: for a resume to tell that it changed."""
        digests = {}
        for path, value in flatten(self.resolved()):
            where = value.rpartition(":")[0] or value if isinstance(value, str) else ""
            if where.endswith(".py"):
                with suppress(OSError):
                    digests[f"{path}.code"] = hashlib.sha256(Path(where).read_bytes()).hexdigest()[:12]
        return digests

    def resolved(self) -> dict[str, Any]:
        """The configuration with every option of every component in it, defaults included."""
        from atropos_core.config import dump

        values = dump(self.config)
        for section, chosen in (("engine", self.engines[0]), *self.single.items()):
            values[section] = {**values[section], **dump(chosen.options)}
        for section, several in self.named.items():
            values[section] |= {
                name: {**values[section][name], **dump(chosen.options)} for name, chosen in several.items()
            }
        return values


def make_plan(
    config: RunConfig,
    model: ResolvedModel,
    plugins: Plugins,
    *,
    training: bool = True,
    playing: bool = True,
    sampling: bool = True,
) -> Plan:
    """Raises ConfigError, UnknownComponent, PluginError or FitError; nothing is built, nothing heavy imported.
    A process that does not do all three leaves components out: `training` needs trainer and bridge, `playing`
    environments and rewards, `sampling` an engine. With an [api], workers play the environments: those that are not
    installed here are left out."""
    by_workers = training and config.api is not None
    if not config.environment and playing and not by_workers:
        raise ConfigError(
            "there is no environment to train on.",
            remedy="Name one: --env gsm8k, or [environment.gsm8k] in the run file.",
        )
    if training and not config.sampling.temperature:
        raise ConfigError(
            "sampling.temperature is 0: the likeliest token would be taken each time, so that all rollouts of a task are one "
            "and nothing is learnt.",
            remedy="Sample what is trained, e.g. at temperature 1. The evaluation has its own: evaluation.temperature.",
        )
    instances = config.engine.instances() if training else {"engine": config.engine} if sampling else {}
    engines = [choose(plugins.registry, "engine", label, one) for label, one in instances.items()]
    single = {
        kind: choose(plugins.registry, kind, kind, getattr(config, kind))
        for kind in SINGLE
        if training and kind != "engine"
    }
    named = {
        kind: {
            name: choose(plugins.registry, kind, f"{kind}.{name}", component)
            for name, component in getattr(config, kind).items()
            if not (kind == "environment" and by_workers) or _is_installed(name, component, plugins)
        }
        for kind in (NAMED if training else ("environment", "reward") if playing else ())
    }
    transports = _fit(engines, single, plugins) if training else ()
    config = config.model_copy(update={kind: _at(getattr(config, kind), one) for kind, one in _ends(engines, single)})
    for chosen in (*engines, *single.values()):
        for line in chosen.idle():
            console.warn(line)
    return Plan(config, model, engines, single, named, transports)


def _ends(engines: Sequence[Chosen], single: Mapping[str, Chosen]) -> list[tuple[str, Chosen]]:
    return [("engine", one) for one in engines[:1]] + [("trainer", one) for one in (single.get("trainer"),) if one]


def _at(component: Placed, chosen: Chosen) -> Placed:
    """With the devices that it was placed on."""
    return component.model_copy(update={"devices": chosen.devices})


def _is_installed(name: str, component: Component, plugins: Plugins) -> bool:
    try:
        plugins.registry.find("environment", component.use)
    except UnknownComponent:
        console.warn(f"environment {name!r} is not installed here: workers play it, and it is not evaluated.")
        return False
    return True


def _fit(engines: Sequence[Chosen], single: Mapping[str, Chosen], plugins: Plugins) -> tuple[Transport, ...]:
    """How weights travel to each engine. Memory can be shared with the first one only."""
    first, *others = engines
    return (
        _fit_one(first, single, plugins, frozenset(get_args(Transport))),
        *(_fit_one(engine, single, plugins, frozenset(get_args(Transport)) - ONE_ENGINE) for engine in others),
    )


def _fit_one(
    engine: Chosen, single: Mapping[str, Chosen], plugins: Plugins, allowed: frozenset[Transport]
) -> Transport:
    bridge, trainer = single["bridge"], single["trainer"]
    possible = {transport for transport in allowed if _carries(transport, engine.devices, trainer.devices)}
    shared = bridge.transports & engine.transports & trainer.transports & possible
    if shared:
        return next(transport for transport in get_args(Transport) if transport in shared)
    between = engine.transports & trainer.transports & possible
    fitting = [
        offer.provider.name for offer in plugins.registry.offers("bridge") if between & _transports_by_default(offer)
    ]
    advice = (
        f"Use --bridge {fitting[0]}."
        if fitting
        else f"No installed bridge joins engine {engine.component.use!r} and trainer {trainer.component.use!r}: "
        "choose another engine or trainer."
    )
    raise FitError(
        f"bridge {bridge.component.use!r} does not fit: it carries {_list(bridge.transports)}; engine {engine.component.use!r} takes "
        f"{_list(engine.transports)} and trainer {trainer.component.use!r} gives {_list(trainer.transports)} "
        f"({engine.label}.devices = {', '.join(engine.devices)}; trainer.devices = {', '.join(trainer.devices)})."
        + ("" if allowed >= ONE_ENGINE else " Memory can be shared with the first engine only."),
        remedy=advice,
    )


def _carries(transport: Transport, engine: tuple[str, ...], trainer: tuple[str, ...]) -> bool:
    """Whether these devices allow it. An exported CUDA allocation is mapped on the device that it is on; weights that a
    trainer divides over several are first put together, into a file."""
    whole = len(trainer) == 1
    on_gpu = whole and engine == trainer and engine[0].startswith("cuda")
    return {"posix_shm": engine == trainer == ("cpu",), "cuda_ipc": on_gpu, "copy": whole}.get(transport, True)


def _transports_by_default(offer: Offer) -> frozenset[Transport]:
    try:
        check_core_api(offer)
        check_requires(offer)
        return offer.provider.transports(offer.provider.config())
    except Exception:  # noqa: BLE001 - the plugin boundary: it needs options, another core or machine, or is broken
        return frozenset()


def _list(transports: frozenset[Transport]) -> str:
    return ", ".join(sorted(transports)) or "nothing"


@runtime_checkable
class Closable(Protocol):
    async def close(self) -> None: ...


@runtime_checkable
class Openable(Protocol):
    async def open(self) -> None: ...


@dataclass
class Parts:
    """The living components of a run. `close` ends all of them, whatever state they are in."""

    environments: dict[str, Environment]
    rewards: list[WeightedReward]
    engines: list[Engine]
    engine: Engine  # all of them as one
    trainer: Trainer
    bridge: Bridge
    curriculum: Curriculum
    transforms: dict[str, Transform]  # by name, in the order of the run file
    teachers: dict[str, Teacher]
    sinks: dict[str, Sink]
    children: list[Child]
    opened: list[Closable] = field(default_factory=list)  # what the run opened on top of these; closed first
    profile: Profile = field(default_factory=Profile)

    def by_label(self) -> dict[str, Any]:
        """Every part that may have state to save or numbers to tell, by its path in the run file."""
        named: dict[str, Any] = {"curriculum": self.curriculum}
        named |= {f"reward.{of.name}": of.reward for of in self.rewards}
        named |= {f"teacher.{name}": teacher for name, teacher in self.teachers.items()}
        named |= {f"transform.{name}": transform for name, transform in self.transforms.items()}
        return named | {f"sink.{name}": sink for name, sink in self.sinks.items()}

    def stateful(self) -> dict[str, Stateful]:
        """Whatever has state to save, by its path in the run file."""
        return {label: part for label, part in self.by_label().items() if isinstance(part, Stateful)}

    def metrics(self) -> Metrics:
        """What the parts tell of the step that has ended: `reward/NAME/...`, `transform/NAME/...`, `curriculum/...`."""
        return {
            f"{label.replace('.', '/')}/{name}": float(value)
            for label, part in self.by_label().items()
            if isinstance(part, Measured)
            for name, value in part.metrics().items()
        }

    async def close(self) -> list[Exception]:
        """Close what rests on the parts, then what is here, then the processes. All are tried; what they raised is
        returned."""
        hosted: list[Closable] = [self.trainer, *self.engines]
        hosted += [of.reward for of in self.rewards if isinstance(of.reward, HostedReward)]
        here = [*self.environments.values(), self.bridge, *self.by_label().values()]
        errors = await _close_all(self.opened)
        errors += await _close_all([part for part in here if isinstance(part, Closable) and part not in hosted])
        return errors + await _close_all(hosted)


async def _close_all(parts: Sequence[Closable]) -> list[Exception]:
    closing = [within(part.close(), CLOSE_DEADLINE_S, f"{type(part).__name__}: close()") for part in parts]
    ended = await asyncio.gather(*closing, return_exceptions=True)
    return [error for error in ended if isinstance(error, Exception)]


@dataclass
class EvaluationParts:
    """What an evaluation needs of a run: no trainer, no bridge."""

    environments: dict[str, Environment]
    rewards: list[WeightedReward]
    engine: Engine
    children: list[Child]

    async def close(self) -> None:
        """Close environments and engine, then the processes. All are tried; the first error is raised afterwards."""
        rewards = [of.reward for of in self.rewards if isinstance(of.reward, Closable)]
        errors = await _close_all([*self.environments.values(), *rewards, self.engine])
        await asyncio.gather(*(child.close() for child in self.children))
        if errors:
            raise errors[0]


async def build(plan: Plan, directory: Path) -> Parts:
    """Build every component, the processes side by side. On failure, what was started is ended."""
    builder = _Builder(plan, directory)
    return await _or_end(builder, builder.build())


async def build_for_evaluation(plan: Plan, directory: Path, engine: Engine | None = None) -> EvaluationParts:
    """With `engine`, that one in place of the plan's own."""
    builder = _Builder(plan, directory)
    return await _or_end(builder, builder.build_for_evaluation(engine))


def contexts(plan: Plan, directory: Path) -> list[tuple[Chosen, RunContext]]:
    """Engines, trainer, bridge, curriculum and teachers, and what each would be built with."""
    builder = _Builder(plan, directory)
    chosen = (*plan.engines, *plan.single.values(), *plan.named.get("teacher", {}).values())
    return [(one, builder._context_of(one)) for one in chosen]


async def _or_end(builder: _Builder, building: Coroutine[Any, Any, T]) -> T:
    try:
        return await building
    except BaseException as error:
        started: list[Closable] = [*builder.children, *builder.rewards]
        await asyncio.gather(*(part.close() for part in started), return_exceptions=True)
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise


def _announced(chosen: Chosen) -> Mapping[str, Any]:
    return chosen.offer.provider.announces(chosen.options)


class _Builder:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.children: list[Child] = []  # whose end is the run's end
        self.rewards: list[Closable] = []
        self._context = RunContext(
            directory=directory,
            model=plan.model.directory,
            steps=plan.config.training.steps,
            seed=plan.config.seed,
            deterministic=plan.config.deterministic,
            transport=plan.transports[0] if plan.transports else None,
            transports=plan.transports,
            max_staleness=plan.config.training.max_staleness,
            patience=plan.config.watch.patience(),
            announced={
                key: value
                for chosen in (
                    *(plan.single[kind] for kind in ("trainer", "bridge") if kind in plan.single),
                    *plan.named.get("transform", {}).values(),
                )
                for key, value in _announced(chosen).items()
            },
        )

    async def build(self) -> Parts:
        single, named = self.plan.single, self.plan.named
        async with asyncio.TaskGroup() as group:  # the two slow ones first, while the rest is built here
            starting = [group.create_task(self._hosted_or_here("engine", one)) for one in self.plan.engines]
            trainer = group.create_task(self._hosted_or_here("trainer", single["trainer"]))
            rewards = [group.create_task(self._reward(name, chosen)) for name, chosen in named["reward"].items()]
            await asyncio.sleep(0)
            bridge: Bridge = self._here(single["bridge"])
            environments: dict[str, Environment] = {n: self._here(chosen) for n, chosen in named["environment"].items()}
            sinks: dict[str, Sink] = {name: self._here(chosen) for name, chosen in named["sink"].items()}
        engines: list[Engine] = [engine.result() for engine in starting]
        one = engines[0] if len(engines) == 1 else Fleet(engines, deterministic=self.plan.config.deterministic)
        return Parts(
            environments=environments,
            rewards=[reward.result() for reward in rewards],
            engines=engines,
            engine=one,
            trainer=trainer.result(),
            bridge=bridge,
            curriculum=self._here(single["curriculum"]),
            transforms={name: self._here(chosen) for name, chosen in named["transform"].items()},
            teachers={name: self._here(chosen) for name, chosen in named["teacher"].items()},
            sinks=sinks,
            children=self.children,
        )

    async def build_for_evaluation(self, engine: Engine | None) -> EvaluationParts:
        named = self.plan.named
        return EvaluationParts(
            environments={name: self._here(chosen) for name, chosen in named.get("environment", {}).items()},
            rewards=[await self._reward(name, chosen) for name, chosen in named.get("reward", {}).items()],
            engine=engine or await self._hosted_or_here("engine", self.plan.engines[0]),
            children=self.children,
        )

    def _context_of(self, chosen: Chosen) -> RunContext:
        if not isinstance(chosen.component, Placed):
            return dataclasses.replace(self._context, label=chosen.label)
        threads = chosen.component.threads or len(os.sched_getaffinity(0))
        context = dataclasses.replace(
            self._context, label=chosen.label, devices=chosen.component.devices, threads=threads
        )
        if chosen in self.plan.engines and self.plan.transports:
            context = dataclasses.replace(context, transport=self.plan.transports[self.plan.engines.index(chosen)])
        return context

    def _here(self, chosen: Chosen) -> Any:
        return chosen.build(self._context_of(chosen))

    async def _hosted_or_here(self, kind: str, chosen: Chosen) -> Any:
        if chosen.offer.provider.runs_in == "here":
            built = self._here(chosen)
            built.endpoint = LocalEndpoint(built)
            return built
        role = chosen.label.replace(".replica.", "-")  # "engine-NAME"
        child = await self._child(chosen, role, cast(Placed, chosen.component).threads)
        return HostedEngine(child) if kind == "engine" else HostedTrainer(child)

    async def _reward(self, name: str, chosen: Chosen) -> WeightedReward:
        component = cast(RewardComponent, chosen.component)
        deadline_s = component.deadline_s
        reward: Reward
        if (component.runs_in or chosen.offer.provider.runs_in) == "here":
            reward = self._here(chosen)
        else:
            reward = HostedReward(lambda: chosen.start(self._context_of(chosen), f"reward-{name}", 1), deadline_s)
        if isinstance(reward, Closable):
            self.rewards.append(reward)
        if isinstance(reward, Openable):
            await reward.open()
        if getattr(reward, "queues", False):  # a stuck call costs its deadline before the next has its turn
            training, problems = self.plan.config.training, self.plan.config.evaluation.problems
            deadline_s *= 1 + max(training.groups_per_step * (1 + training.max_staleness), problems)
        return WeightedReward(name, reward, component.weight, deadline_s)

    async def _child(self, chosen: Chosen, role: str, threads: int | None) -> Child:
        child = await chosen.start(self._context_of(chosen), role, threads, needed=True)
        self.children.append(child)
        return child
