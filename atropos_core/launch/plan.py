"""The plan of a run: a run file with every component found, its options validated, and their fit checked. Making one is cheap."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.component import Component
from atropos_core.config.resolve import ResolvedComponent, resolve_component
from atropos_core.config.run_file import NAMED, SINGLE, RunConfig, dump, flatten, left_out, to_toml
from atropos_core.errors import ConfigError, UnknownComponent
from atropos_core.interfaces import Transport
from atropos_core.launch import fit
from atropos_core.launchers import PlannedRun
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.model_provider import TeacherProvider, TrainerProvider
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import ResolvedModel
from atropos_core.plugins.services import OpenSource, OpenWarmup, ServeEngine
from atropos_core.rollouts.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Sizes:
    """Values that the memory plan chose for options that were not set, by path in the run file."""

    values: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)  # of those that are not their options' defaults
    fit: bool = True  # False if even the smallest do not fit

    @property
    def changed(self) -> dict[str, Any]:
        """The values that are not their options' defaults."""
        return {path: self.values[path] for path in self.reasons}


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
    sizes: Sizes = Sizes()  # that were chosen by the memory plan
    open_warmup: OpenWarmup | None = None  # the rows of a warm start
    supervised_rate: float = 0.0  # the highest learning rate of a warm start

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

    def check_files(self) -> None:
        """Raise DataError if a file that an option names is missing or cannot be read. With an [api], workers elsewhere have the
        files of environments."""
        kinds = [one for kind, one in self.named.items() if kind != "environment" or self.config.api is None]
        named = [resolved for several in kinds for resolved in several.values()]
        for resolved in (*self.engines, *self.single.values(), *named):
            if isinstance(resolved.options, Options):
                resolved.options.check_files()

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

    def for_launcher(self, directory: Path) -> PlannedRun:
        """Return the description of this run for its launcher."""
        by_workers = self.config.api is not None
        roles, environments = self.roles(), list(self.config.environment)
        return PlannedRun(directory.absolute(), to_toml(self.resolved()), roles, environments, by_workers)

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
        """Return name and text of the values that are used and that `resolved` does not show."""
        if (trainer := self.single.get("trainer")) is None or not isinstance(trainer.offer.provider, TrainerProvider):
            return []
        return list(trainer.offer.provider.notes(trainer.options, self.transports).items())


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
    if not config.environment and rollouts and not by_workers and not (config.warmup and not config.training.steps):
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
        fit.refuse_idle_launcher([*engines, single["trainer"]], single["launcher"])
        fit.refuse_other_machines(single["trainer"], single["launcher"])
        if config.training.group_size == 1:
            fit.refuse_groups_of_one(named["transform"], config.api is not None)
    fit.refuse_second_advantages(named.get("transform", {}))
    fit.refuse_flat_before_turns(named.get("transform", {}))
    fit.refuse_second_writers(named.get("sink", {}))
    transports = fit.choose_transports(engines, single, plugins.registry) if training else ()
    on_devices = {"engine": engines[0]} if engines else {}
    if training:
        on_devices["trainer"] = single["trainer"]
    for kind, placed in on_devices.items():
        component = getattr(config, kind).model_copy(update={"devices": placed.devices})
        config = config.model_copy(update={kind: component})
    if config.date is None:
        config = config.model_copy(update={"date": date.today()})
    for resolved in (*engines, *single.values()) if warns else ():
        for line in resolved.idle():
            console.warn(line)
    elsewhere = (plugins.engine_server(), plugins.source()) if by_workers else ()
    made = Plan(config, model, engines, single, named, transports, *elsewhere)
    if not training or config.warmup is None:
        return made
    rate = fit.supervised_rate(single["trainer"], transports)
    rate = rate if config.warmup.learning_rate is None else config.warmup.learning_rate
    return replace(made, open_warmup=plugins.warmup(), supervised_rate=rate)


def _is_installed(name: str, component: Component, plugins: Plugins) -> bool:
    try:
        plugins.registry.find("environment", component.use)
    except UnknownComponent:
        console.warn(f"environment {name!r} is not installed here: workers run it, and it is not evaluated.")
        return False
    return True
