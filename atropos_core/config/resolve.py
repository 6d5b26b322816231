"""Resolve a component that a run names, or that another component's options name (`inner`): its offer and its validated
options."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from atropos_core.config.component import Component, ComponentOnDevices, TrainerComponent
from atropos_core.config.error_text import explain
from atropos_core.console.waits import waiting
from atropos_core.errors import AtroposError, ConfigError, FitError, PluginError
from atropos_core.guards.exits import contained
from atropos_core.interfaces import Transport
from atropos_core.launchers import Launcher
from atropos_core.models.model_size import cpu_threads, described
from atropos_core.plugins.model_provider import (
    DeviceProvider,
    MemoryUse,
    ModelProvider,
    SizeChoice,
    TrainerProvider,
    WeightsProvider,
    Workload,
)
from atropos_core.plugins.offers import Offer
from atropos_core.plugins.provider import LauncherProvider, Provider, RunContext
from atropos_core.plugins.references import OBJECT
from atropos_core.plugins.registry import Registry
from atropos_core.plugins.requirements import check_requires, cuda_devices
from atropos_core.processes.child import Child

WITH_EVERY_ENGINE: frozenset[Transport] = frozenset({"prompt"})  # needs nothing from the engine
NOWHERE_ELSE = ("cpu",)  # devices of a component that does not use any


@dataclass(frozen=True)
class ResolvedComponent:
    """One component of the run: its offer, and its validated options."""

    label: str  # its path in the run file
    offer: Offer
    options: BaseModel
    component: Component

    @property
    def transports(self) -> frozenset[Transport]:
        provider = self.offer.provider
        own = provider.transports(self.options) if isinstance(provider, WeightsProvider) else frozenset()
        return own | WITH_EVERY_ENGINE if self.offer.kind == "engine" else own

    @property
    def announced(self) -> Mapping[str, Any]:
        """The facts that the other components get: `Provider.announces`."""
        return self.offer.provider.announces(self.options)

    @property
    def role(self) -> str:
        """ "engine", "trainer"; "engine-NAME" of a replica."""
        return self.label.replace(".replica.", "-")

    @property
    def roles(self) -> list[str]:
        """Roles of its processes, one per machine that it spans: "trainer", "trainer-2"."""
        machines = self.component.machines if isinstance(self.component, TrainerComponent) else 1
        return [self.role, *(f"{self.role}-{number}" for number in range(2, machines + 1))]

    @property
    def devices(self) -> tuple[str, ...]:
        return self.component.devices if isinstance(self.component, ComponentOnDevices) else ()

    @property
    def has_machines(self) -> bool:
        """True for a launcher that can start processes on other machines."""
        return isinstance(self.offer.provider, LauncherProvider) and self.offer.provider.several_machines

    def idle(self) -> list[str]:
        """Return a line for each changed option that has no effect on these devices. It is reported rather than refused,
        because one run file may be for several kinds of machine."""
        fields = type(self.options).model_fields
        return [
            f"{self.label}.{name} has no effect on {', '.join(self.devices)}: {why}"
            for name, why in _idle(self.offer.provider, self.options, self.devices).items()
            if name in fields and getattr(self.options, name) != fields[name].get_default(call_default_factory=True)
        ]

    def holds(self, workload: Workload) -> Iterable[MemoryUse]:
        """Return the memory that it will take."""
        provider = self.offer.provider
        return provider.holds(self.options, workload) if isinstance(provider, ModelProvider) else ()

    def sizes(self, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
        """Return choices of values for the options in `free`; the last take the least memory."""
        provider = self.offer.provider
        return provider.sizes(self.options, workload, free) if isinstance(provider, ModelProvider) else ()

    def check(self, workload: Workload) -> None:
        """Raises the component's own error for a model that it cannot run."""
        if isinstance(self.offer.provider, ModelProvider):
            self.offer.provider.check(self.options, workload)

    def build(self, context: RunContext) -> Any:
        """Build it in this process. Raises PluginError for any exception of the plugin's code."""
        try:
            with contained(f"building {self.label}"):
                built = self.offer.provider.build(self.options, context)
        except AtroposError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.label}: {self.component.use!r} of {self.offer.distribution} could not be built: "
                f"{type(error).__name__}: {error}"
            ) from error
        if inspect.isawaitable(built):
            raise PluginError(f"{self.label}: build of {self.component.use!r} must not be a coroutine")
        return built

    async def start(
        self,
        context: RunContext,
        role: str,
        threads: int | None = None,
        *,
        needed: bool = False,
        launcher: Launcher | None = None,
    ) -> Child:
        """Build it in a child process called `role`, with its log in the run directory. For `needed` and `launcher` see
        `Child.start`. Raises ConfigError for a Python object."""
        if self.component.use.startswith(OBJECT):
            raise ConfigError(
                f"{self.label}: {self.component.use.removeprefix(OBJECT)!r} was given as an object of this process, but it runs "
                "in a child process, which cannot import it.",
                remedy="Put it into a module or a file and name it, pkg.mod:Name or ./file.py:Name; or let it run in this "
                'process, without runs_in = "process".',
            )
        wanted = {
            "kind": self.offer.kind,
            "name": self.component.use,
            "options": self.options.model_dump(mode="json"),
            "context": context.record(),
            "path": [os.path.abspath(entry) for entry in sys.path],  # pkg.mod:Name is found there as it is here
        }
        log = context.directory / "logs" / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        torch = " and import torch" if "torch" in self.offer.provider.requires else ""
        with waiting(f"{role} to start{torch}"):
            child = await Child.start(
                role,
                wanted,
                log,
                threads=threads or cpu_threads(context.model),
                patience=context.patience,
                needed=needed,
                launcher=launcher,
            )
        child.loads = described(context.model)
        return child


def resolve_component(registry: Registry, kind: str, label: str, component: Component) -> ResolvedComponent:
    """Find a component and validate its options. Raises UnknownComponent, PluginError, ConfigError for wrong options, and
    FitError for what this machine lacks."""
    offer = registry.find(kind, component.use)
    check_requires(offer)
    model = offer.provider.options
    try:
        with contained(f"the options of {label}"):
            options = model.model_validate(component.options)
    except ValidationError as error:
        raise ConfigError(explain(error, model, {}, f"{label}.")) from error
    spans_devices = isinstance(offer.provider, DeviceProvider) and offer.provider.several_devices
    if isinstance(component, ComponentOnDevices) and len(component.devices) > 1 and not spans_devices:
        raise FitError(
            f"{label}.devices names {len(component.devices)} devices, and {kind} {component.use!r} runs on one.",
            remedy="Name one device"
            + (", and further engines as [engine.replica.NAME] tables." if kind == "engine" else "."),
        )
    spans_machines = (
        isinstance(offer.provider, TrainerProvider)
        and offer.provider.several_machines
        and offer.provider.runs_in == "process"
    )
    if isinstance(component, TrainerComponent) and component.machines > 1 and not spans_machines:
        raise FitError(
            f"{label}.machines = {component.machines}, and {kind} {component.use!r} runs on one machine.",
            remedy=f"Leave {label}.machines out, or choose another {kind}.",
        )
    if isinstance(component, ComponentOnDevices):
        component = _with_devices(label, offer, options, component)
    return ResolvedComponent(label, offer, options, component)


def _with_devices(label: str, offer: Offer, options: BaseModel, component: ComponentOnDevices) -> ComponentOnDevices:
    """Resolve devices "auto". Raises ConfigError for devices or threads that have no effect on the component."""
    made = placed(component)
    idle = _idle(offer.provider, options, made.devices)
    given = {"threads": component.threads is not None, "devices": component.devices not in (("auto",), NOWHERE_ELSE)}
    if wrong := [name for name in idle if given.get(name)]:
        raise ConfigError(
            f"{label}.{wrong[0]} has no effect on {offer.kind} {offer.provider.name!r}, {idle[wrong[0]]}: remove it."
        )
    return made.model_copy(update={"devices": NOWHERE_ELSE}) if "devices" in idle else made


def _idle(provider: Provider[Any], options: BaseModel, devices: Sequence[str]) -> Mapping[str, str]:
    return provider.idle(options, devices) if isinstance(provider, DeviceProvider) else {}


P = TypeVar("P", bound=ComponentOnDevices)


def placed(component: P) -> P:
    """Resolve devices "auto"."""
    if component.devices != ("auto",):
        return component
    return component.model_copy(update={"devices": ("cuda:0",) if cuda_devices() else ("cpu",)})


def inner(kind: str, label: str, component: Component) -> ResolvedComponent:
    """Resolve a component that another one's options name as a run file would: `use`, and its own options. Call it in a
    validator, so that errors are reported before anything starts, and in `build`. Raises as `resolve_component`."""
    from atropos_core.plugins.manager import load_plugins

    return resolve_component(load_plugins().registry, kind, label, component)
