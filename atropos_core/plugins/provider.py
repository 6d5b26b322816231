"""The description of a component: its Provider, its options, and the context that it is built with."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from atropos_core.errors import ConfigError, PluginError
from atropos_core.guards.exits import contained
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_core.plugins.option_numbers import NoBooleanIsANumber
from atropos_core.plugins.option_paths import without_folders

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Engine, Teacher, Trainer, Transport  # noqa: F401 - bases name them in strings
    from atropos_core.launchers import Launcher, PlannedRun, SchedulerFiles

T_co = TypeVar("T_co", covariant=True)

CORE_API = ">=0.1,<0.2"  # the versions of core whose components work with this one

FILES_OF_ROWS = (".jsonl", ".json", ".csv", ".parquet")
KINDS: Mapping[str, str] = {  # kind -> the hook that offers it
    "environment": "atropos_environments",
    "reward": "atropos_rewards",
    "engine": "atropos_engines",
    "trainer": "atropos_trainers",
    "loss": "atropos_losses",
    "bridge": "atropos_bridges",
    "curriculum": "atropos_curricula",
    "transform": "atropos_transforms",
    "teacher": "atropos_teachers",
    "sink": "atropos_sinks",
    "adapter": "atropos_adapters",
    "sandbox": "atropos_sandboxes",
    "launcher": "atropos_launchers",
}


class Options(NoBooleanIsANumber):
    """The base of every component's options: unknown keys are refused, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _written_as_text(cls, values: Any) -> Any:
        return without_folders(values, cls.model_fields)

    def changed(self, *names: str) -> list[str]:
        """Return those of `names` that differ from their default. (`model_fields_set` would contain all of them after a resume,
        because the saved config.toml has every option.)"""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def refuse_idle(self, applies: bool, where: str, *names: str) -> None:
        """Raises ValueError for the first of `names` that was changed, unless `applies`. Otherwise the user would believe that
        the option does something. `where` says when it has no effect, and what it would need."""
        if not applies and (idle := self.changed(*names)):
            raise ValueError(f"{idle[0]} has no effect {where}: remove it")

    def refuse_for(self, command: str, *names: str) -> None:
        """Raises ConfigError for the first of `names` that was changed, because `command` does not use it."""
        if idle := self.changed(*names):
            raise ConfigError(f"{idle[0]} has no effect on {command}.", remedy=f"Leave {idle[0]} out.")


class NoOptions(Options):
    """For components with nothing to configure."""


@dataclass(frozen=True)
class RunContext:
    """The part of the run that `Provider.build` may see."""

    directory: Path  # the run directory
    model: Path  # a local model directory
    steps: int = 0  # total steps of the run
    seed: int = 0
    deterministic: bool = False
    today: str = ""  # for chat templates, as 2026-01-31: ChatTokenizer(context.model, context.today)
    transport: Transport | None = None  # how weights travel (for a bridge and a trainer: to the first engine)
    transports: tuple[Transport, ...] = ()  # to each of the engines
    is_trained: bool = False  # True if the sampled policy is being trained, by this run or by a remote trainer
    max_staleness: int = 0  # policy versions that a trained token may be behind
    # what engines, trainer, bridge and transforms announce to the other components: Provider.announces
    announced: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)  # of this component
    threads: int | None = None  # CPU threads of this component; None: its own choice
    label: str = ""  # this component's path in the run file, such as "teacher.NAME"
    patience: Patience = DEFAULT_PATIENCE  # how long to wait for servers and processes: [watch]
    machine: int = 0  # number of this machine among those that this component spans
    machines: int = 1
    # the run's launcher, which starts the processes of Provider.roles
    launcher: Launcher | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """Return a form that a codec can send to another process."""
        fields = dataclasses.asdict(dataclasses.replace(self, launcher=None))
        return fields | {"directory": str(self.directory), "model": str(self.model)}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> RunContext:
        paths = {name: Path(fields[name]) for name in ("directory", "model")}
        return cls(**{**fields, **paths, "patience": Patience(**fields.get("patience", {}))})


PROMPT_TOKENS = 512  # assumed length of the longest prompt: environments are not called before they are built


# Phases of engines and of the trainer. In an on-policy run they alternate.
SAMPLING = ("sampling", "rescoring")
UPDATE = "update"
CONTEXT = "CUDA context"
CONTEXT_BYTES = 750_000_000  # includes cuBLAS kernels and workspaces; two processes took at most 1.39 GiB of an H100: results/gpu.json


@dataclass(frozen=True)
class Holding:
    """Something that takes memory on a device."""

    what: str
    size_bytes: int
    device: str = "cpu"
    phase: str = ""  # held only in this phase; of a component's phases the largest counts
    shared: str = ""  # holdings with the same name on one device are one copy
    # Values of the run file that make it smaller: path -> values to try, the mildest first.
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Number = TypeVar("Number", int, float)


def halves(value: Number, least: Number) -> list[Number]:
    """Return a half of `value`, a quarter and so on, down to `least`. Integers stay integers; others have two decimals."""
    half: Any = value // 2 if isinstance(value, int) else round(value / 2, 2)
    return [half, *halves(half, least)] if half >= least else []


@dataclass(frozen=True)
class Workload:
    """The facts about a run from which a component estimates its memory."""

    context: RunContext  # that it will be built with
    groups: int  # of a step
    group_size: int
    max_tokens: int
    concurrent_rollouts: int  # rollouts that may be sampled at once
    prompt_tokens: int = PROMPT_TOKENS
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # total memory of each device, if known
    truncated: bool = False  # the run's sampling uses top_p or top_k


@dataclass(frozen=True)
class Provider(Generic[T_co]):
    """The description of one component: enough to list it, check it and build it. Kinds with more to say have a class of their
    own: PROVIDERS."""

    name: str  # what the user types
    summary: str  # one line for `atropos plugins`
    # its options class, or "package.config:Options", so that listing plugins does not import it
    config: type[BaseModel] | str
    build: Callable[[Any, RunContext], T_co]  # (options, context); imports torch inside, not above
    _: KW_ONLY
    # engine, bridge, transform, trainer: what other components must know to be built (JSON). Sink: "writes", its file or folder in
    # the run directory, and "named_by", the option with that name
    announces: Callable[[Any], Mapping[str, Any]] = lambda options: {}
    requires: frozenset[str] = frozenset()  # modules that must be installed ("vllm"), packages ("gem-llm"), or "cuda"
    extra: str = ""  # the extra of its distribution that installs what `requires` names; "": pip install NAME
    runs_in: Literal["here", "process"] = "here"  # "process": a child process, behind the same interface
    core_api: str = CORE_API  # refused by name if core has another version
    argument: str = ""  # the option that takes what follows a colon, as in `--env NAME:ARGUMENT`; "": none

    @functools.cached_property
    def options(self) -> type[BaseModel]:
        """The options class that `config` is or names. Raises PluginError if it cannot be imported or is not one."""
        if not isinstance(self.config, str):
            return self.config
        module, _, name = self.config.partition(":")
        try:
            with contained(f"importing {module}"):
                found = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise PluginError(
                f"the options of {self.name!r}, {self.config}, could not be imported: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            raise PluginError(f"the options of {self.name!r}, {self.config}, are {found!r}, not a class of Options.")
        return found


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider[T_co]):
    """The base for components that have a model, or move one. Its functions use only files and options."""

    holds: Callable[[Any, Workload], Iterable[Holding]] = lambda options, workload: ()  # memory that it will take
    check: Callable[[Any, Workload], None] = lambda options, workload: None  # raises for a model that it cannot run


@dataclass(frozen=True, kw_only=True)
class TeacherProvider(ModelProvider["Teacher"]):
    """A teacher, which annotates groups."""

    # its path in the run file -> role -> devices, for each process that it starts with the run's launcher
    roles: Callable[[Any, str], Mapping[str, tuple[str, ...]]] = lambda options, label: {}


@dataclass(frozen=True, kw_only=True)
class WeightsProvider(ModelProvider[T_co]):
    """The base for engines, trainers and bridges: they have to share a transport."""

    transports: Callable[[Any], frozenset[Transport]] = lambda options: frozenset()  # how its weights may travel


class BridgeProvider(WeightsProvider["Bridge"]):
    """A bridge, which moves weights from the trainer to the engines."""


@dataclass(frozen=True, kw_only=True)
class DeviceProvider(WeightsProvider[T_co]):
    """The base for engines and trainers, which run on the devices that a run file names."""

    dtype: Callable[[Any, Workload], str] = lambda options, workload: ""  # of its weights, as "float32"; "" if unknown
    # options (and "devices", "threads") that have no effect on these devices, with the reason
    idle: Callable[[Any, Sequence[str]], Mapping[str, str]] = lambda options, devices: {}
    several_devices: bool = False  # one instance may span several


class EngineProvider(DeviceProvider["Engine"]):
    """An engine, which samples from the policy."""


@dataclass(frozen=True, kw_only=True)
class TrainerProvider(DeviceProvider["Trainer"]):
    """A trainer, which turns batches into updates."""

    saves: Callable[[Any, Workload], int] = lambda options, workload: 0  # bytes of a checkpoint; 0 if unknown or small
    # values that its options do not show, given how weights travel: name -> text, for the start of a run
    notes: Callable[[Any, Sequence[Transport]], Mapping[str, str]] = lambda options, transports: {}
    # merges the adapter saved in one directory into a whole model in another, empty directory
    merge: Callable[[Path, Path], None] | None = None
    several_machines: bool = False  # it may be `OverMachines`


@dataclass(frozen=True, kw_only=True)
class LauncherProvider(Provider["Launcher"]):
    """A launcher, which starts processes."""

    several_machines: bool = False  # it can start processes on other machines
    # the files by which a scheduler starts the run; None to start here and now
    render: Callable[[Any, PlannedRun], SchedulerFiles | None] = lambda options, run: None


PROVIDERS: Mapping[str, type[Provider[Any]]] = {  # kinds with more to say than a Provider has fields for
    "engine": EngineProvider,
    "trainer": TrainerProvider,
    "bridge": BridgeProvider,
    "teacher": TeacherProvider,
    "launcher": LauncherProvider,
}


@dataclass(frozen=True)
class ResolvedModel:
    """A model directory, and the run-file settings that it recommends (the user's own take precedence)."""

    directory: Path
    summary: str
    preset: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """A provider, and the plugin that it came from. Raises PluginError for a provider of another kind."""

    kind: str
    provider: Provider[Any]
    plugin: str
    distribution: str

    def __post_init__(self) -> None:
        wanted = PROVIDERS.get(self.kind, Provider)
        of_another = wanted is Provider and isinstance(self.provider, tuple(PROVIDERS.values()))
        if of_another or not isinstance(self.provider, wanted):
            raise PluginError(
                f"{self.kind} {self.provider.name!r} of {self.distribution} is described by a {type(self.provider).__name__}.",
                remedy=f"Describe it by atropos_core.plugins.provider.{wanted.__name__}.",
            )
