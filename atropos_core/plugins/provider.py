"""What a component is to those that list, check and build it: a Provider, its options, and what it is given of the run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from atropos_core.errors import ConfigError, PluginError
from atropos_core.guards.exits import contained
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_core.plugins.option_numbers import NoBooleanIsANumber
from atropos_core.plugins.option_paths import without_folders

if TYPE_CHECKING:
    from atropos_core.interfaces import Transport
    from atropos_core.launchers import Launcher, PlannedRun, SchedulerFiles

T_co = TypeVar("T_co", covariant=True)

CORE_API = ">=0.1,<0.2"  # what components of these versions of core go with

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
    """The base of every component's options: unknown keys are refused, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _written_as_text(cls, values: Any) -> Any:
        return without_folders(values, cls.model_fields)

    def changed(self, *names: str) -> list[str]:
        """Those of `names` that are not at their default. (`model_fields_set` has all of them once a run is resumed: its
        config.toml names every option.)"""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def refuse_idle(self, applies: bool, where: str, *names: str) -> None:
        """Raises ValueError for the first of `names` that was changed, unless it applies: an option that does nothing would
        let its user believe that it does. `where` says under what it has no effect, and what it would need."""
        if not applies and (idle := self.changed(*names)):
            raise ValueError(f"{idle[0]} has no effect {where}: remove it")

    def refuse_for(self, command: str, *names: str) -> None:
        """Raises ConfigError for the first of `names` that was changed, where `command` makes no use of it."""
        if idle := self.changed(*names):
            raise ConfigError(f"{idle[0]} has no effect on {command}.", remedy=f"Leave {idle[0]} out.")


class NoOptions(Options):
    """For components with nothing to configure."""


@dataclass(frozen=True)
class RunContext:
    """What `Provider.build` may know of the run around it."""

    directory: Path  # the run directory
    model: Path  # a local model directory
    steps: int = 0  # that the run will take in all
    seed: int = 0
    deterministic: bool = False
    today: str = ""  # for chat templates, as 2026-01-31: ChatTokenizer(context.model, context.today)
    transport: Transport | None = None  # how weights travel (for a bridge and a trainer: to the first engine)
    transports: tuple[Transport, ...] = ()  # to each of the engines
    is_trained: bool = False  # what is sampled, here or by a trainer elsewhere that a worker samples for
    max_staleness: int = 0  # policy versions that a trained token may be behind
    # what engines, trainer, bridge and transforms say that others must know to be built: Provider.announces
    announced: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)  # of the component being built
    threads: int | None = None  # CPU threads of the component being built; None: its own choice
    label: str = ""  # of the component being built: its path in the run file, such as "teacher.NAME"
    patience: Patience = DEFAULT_PATIENCE  # with what the component waits for, a server say: [watch]
    machine: int = 0  # of those that the component being built spans: the one that this is for
    machines: int = 1
    # of the run: starts the processes of Provider.roles
    launcher: Launcher | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """For another process, in what a codec takes."""
        fields = dataclasses.asdict(dataclasses.replace(self, launcher=None))
        return fields | {"directory": str(self.directory), "model": str(self.model)}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> RunContext:
        paths = {name: Path(fields[name]) for name in ("directory", "model")}
        return cls(**{**fields, **paths, "patience": Patience(**fields.get("patience", {}))})


PROMPT_TOKENS = 512  # assumed of the longest prompt: no environment is called before it is built


# Phases of engines, and of the trainer: in an on-policy run it is either these or that.
SAMPLING = ("sampling", "rescoring")
UPDATE = "update"
CONTEXT = "CUDA context"
CONTEXT_BYTES = 750_000_000  # kernels and workspaces of cuBLAS with it; two processes had 1.39 GiB of an H100 at most: results/gpu.json


@dataclass(frozen=True)
class Holding:
    """Something that takes memory on a device."""

    what: str
    size_bytes: int
    device: str = "cpu"
    phase: str = ""  # needed only then; of a component's phases the largest counts
    shared: str = ""  # holdings of this name on one device are one copy
    # Values of the run file that make it smaller, by path: each with those to try, the mildest first.
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Number = TypeVar("Number", int, float)


def halves(value: Number, least: Number) -> list[Number]:
    """A half of `value`, a quarter and so on, none less than `least`. Whole numbers stay whole, others have two decimals."""
    half: Any = value // 2 if isinstance(value, int) else round(value / 2, 2)
    return [half, *halves(half, least)] if half >= least else []


@dataclass(frozen=True)
class Workload:
    """What a component is given of the run, to say what memory it will take."""

    context: RunContext  # as it will be built with
    groups: int  # of a step
    group_size: int
    max_tokens: int
    concurrent_rollouts: int  # rollouts that may be sampled at once
    prompt_tokens: int = PROMPT_TOKENS
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # all that a device has, where that is known
    truncated: bool = False  # the run's own sampling leaves tokens out: top_p, top_k


@dataclass(frozen=True)
class Provider(Generic[T_co]):
    """The description of one component: enough to list it, check it and build it."""

    name: str  # what the user types
    summary: str  # one line for `atropos plugins`
    # its options, or where they are, as "package.config:Options": then a listing imports none of them
    config: type[BaseModel] | str
    build: Callable[[Any, RunContext], T_co]  # (options, context); imports torch inside, not above
    # engine, bridge, trainer: how its weights may travel
    transports: Callable[[Any], frozenset[Transport]] = lambda options: frozenset()
    # engine, trainer, bridge, transform: what others must know to be built (JSON)
    announces: Callable[[Any], Mapping[str, Any]] = lambda options: {}
    # engine, trainer, bridge: the memory that it will take; from files and options alone, as the four below
    holds: Callable[[Any, Workload], Iterable[Holding]] = lambda options, workload: ()
    # engine, trainer, bridge, teacher: raises for a model that it could not run
    check: Callable[[Any, Workload], None] = lambda options, workload: None
    # engine, trainer: of its weights, as "float32"; "" where these do not say it
    dtype: Callable[[Any, Workload], str] = lambda options, workload: ""
    # trainer: bytes of a checkpoint; 0 where that is not known, or little
    saves: Callable[[Any, Workload], int] = lambda options, workload: 0
    # engine, trainer: which of its options, and of "devices" and "threads", do nothing there, and why
    idle: Callable[[Any, Sequence[str]], Mapping[str, str]] = lambda options, devices: {}
    # trainer: values that its options do not show, given how weights travel: name -> text, for the start of a run
    notes: Callable[[Any, Sequence[Transport]], Mapping[str, str]] = lambda options, transports: {}
    # teacher: by its path in the run file: role -> devices of each process that it starts by the run's launcher
    roles: Callable[[Any, str], Mapping[str, tuple[str, ...]]] = lambda options, label: {}
    # trainer: makes a whole model of the directory of an adapter that it saved, in another directory that is empty
    merge: Callable[[Path, Path], None] | None = None
    several_devices: bool = False  # engine, trainer: one instance may span several
    several_machines: bool = False  # launcher: what it starts may be on another one; trainer: it may be `OverMachines`
    # launcher: the files that a scheduler starts the run by; None where it is to start here and now
    render: Callable[[Any, PlannedRun], SchedulerFiles | None] = lambda options, run: None
    requires: frozenset[str] = frozenset()  # modules that must be installed ("vllm"), packages ("gem-llm"), or "cuda"
    runs_in: Literal["here", "process"] = "here"  # "process": a child of its own, behind the same interface
    core_api: str = CORE_API  # refused by name when core is another
    argument: str = ""  # the option that what follows a colon gives, as in `--env NAME:ARGUMENT`; empty: there is none

    @functools.cached_property
    def options(self) -> type[BaseModel]:
        """What `config` is or names, by which options are validated. Raises PluginError where it is not there."""
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


@dataclass(frozen=True)
class ResolvedModel:
    """A model directory, and the run-file settings that it recommends (they yield to the user's own)."""

    directory: Path
    summary: str
    preset: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """A provider, and the plugin that it came from."""

    kind: str
    provider: Provider[Any]
    plugin: str
    distribution: str
