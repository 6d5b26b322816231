"""The description of a component: its Provider, and the context that it is built with. Plugins are listed with this, so nothing here
imports pydantic."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from atropos_core.errors import PluginError
from atropos_core.guards.exits import contained
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience

if TYPE_CHECKING:
    from pydantic import BaseModel

    from atropos_core.interfaces import Transport
    from atropos_core.launchers import Launcher, PlannedRun, SchedulerFiles

T_co = TypeVar("T_co", covariant=True)

CORE_API = ">=0.1,<0.2"  # the versions of core whose components work with this one


@dataclass(frozen=True)
class RunContext:
    """The part of the run that `Provider.build` may see."""

    directory: Path  # the run directory
    model: Path  # a local model directory
    steps: int = 0  # steps of the run, without those of a warm start
    warmup_steps: int = 0  # supervised steps before these
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
    # the run's launcher, which starts the processes of TeacherProvider.roles
    launcher: Launcher | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """Return a form that a codec can send to another process."""
        fields = dataclasses.asdict(dataclasses.replace(self, launcher=None))
        return fields | {"directory": str(self.directory), "model": str(self.model)}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> RunContext:
        paths = {name: Path(fields[name]) for name in ("directory", "model")}
        return cls(**{**fields, **paths, "patience": Patience(**fields.get("patience", {}))})


@dataclass(frozen=True)
class Provider(Generic[T_co]):
    """The description of one component: enough to list it, check it and build it. Kinds with more to say have a class of their
    own: PROVIDERS of offers.py."""

    name: str  # what the user types
    summary: str  # one line for `atropos plugins`
    # its options class, or "package.config:Options", so that listing plugins does not import it; None: nothing to configure
    config: type[BaseModel] | str | None
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
        from pydantic import BaseModel

        from atropos_core.plugins.options import NoOptions

        if not isinstance(self.config, str):
            return self.config or NoOptions
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
class LauncherProvider(Provider["Launcher"]):
    """A launcher, which starts processes."""

    several_machines: bool = False  # it can start processes on other machines
    # the files by which a scheduler starts the run; None to start here and now
    render: Callable[[Any, PlannedRun], SchedulerFiles | None] = lambda options, run: None


@dataclass(frozen=True)
class ResolvedModel:
    """A model directory, and the run-file settings that it recommends (the user's own take precedence)."""

    directory: Path
    summary: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(
        default_factory=dict
    )  # dotted path -> value that follows from its size in this run
