"""Components by kind and name: what a Provider is, and how one is found."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict

from atropos_core import __version__
from atropos_core.contained import contained
from atropos_core.errors import ConfigError, EndsProcess, FitError, PluginError, UnknownComponent
from atropos_core.liveness import DEFAULT_PATIENCE, Patience

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment, Loss, Transport
    from atropos_core.memory import Holding, Workload

T_co = TypeVar("T_co", covariant=True)

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
}


class Options(BaseModel):
    """The base of every component's options: unknown keys are refused, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

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


def no_transport(options: Any) -> frozenset[Transport]:
    return frozenset()


def nothing(options: Any) -> Mapping[str, Any]:
    return {}


def nothing_held(options: Any, workload: Workload) -> Iterable[Holding]:
    return ()


def nothing_idle(options: Any, devices: Sequence[str]) -> Mapping[str, str]:
    """The default of `Provider.idle`."""
    return {}


@dataclass(frozen=True)
class RunContext:
    """What `Provider.build` may know of the run around it."""

    directory: Path  # the run directory
    model: Path  # a local model directory
    steps: int = 0  # that the run will take in all
    seed: int = 0
    deterministic: bool = False
    transport: Transport | None = (
        None  # how weights travel in this run (for a bridge and a trainer: to the first engine)
    )
    transports: tuple[Transport, ...] = ()  # to each of the engines
    max_staleness: int = 0  # policy versions that a trained token may be behind
    announced: Mapping[str, Any] = field(
        default_factory=dict
    )  # what trainer, bridge and transforms say that others must know to be built: Provider.announces
    devices: tuple[str, ...] = ("cpu",)  # of the component being built
    threads: int | None = None  # CPU threads of the component being built; None: its own choice
    label: str = ""  # of the component being built: its path in the run file, such as "teacher.NAME"
    patience: Patience = DEFAULT_PATIENCE  # with what the component waits for, a server say: [watch]

    def record(self) -> dict[str, Any]:
        """For another process, in what a codec takes."""
        return dataclasses.asdict(self) | {"directory": str(self.directory), "model": str(self.model)}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> RunContext:
        paths = {name: Path(fields[name]) for name in ("directory", "model")}
        return cls(**{**fields, **paths, "patience": Patience(**fields.get("patience", {}))})


@dataclass(frozen=True)
class Provider(Generic[T_co]):
    """The description of one component: enough to list it, check it and build it."""

    name: str  # what the user types
    summary: str  # one line for `atropos plugins`
    config: type[BaseModel]  # validated before anything heavy is imported
    build: Callable[[Any, RunContext], T_co]  # (options, context); imports torch inside, not above
    transports: Callable[[Any], frozenset[Transport]] = (
        no_transport  # engine, bridge, trainer: may depend on the options
    )
    announces: Callable[[Any], Mapping[str, Any]] = (
        nothing  # trainer, bridge, transform: what others must know to be built (JSON)
    )
    holds: Callable[[Any, Workload], Iterable[Holding]] = (
        nothing_held  # engine, trainer, bridge: the memory that it will take; from files and options alone
    )
    idle: Callable[[Any, Sequence[str]], Mapping[str, str]] = (
        nothing_idle  # engine, trainer: which of its options, and of "devices" and "threads", do nothing there, and why
    )
    several_devices: bool = False  # engine, trainer: one instance may span several
    requires: frozenset[str] = frozenset()  # modules that must be installed ("vllm"), or "cuda"; checked before build
    runs_in: Literal["here", "process"] = "here"  # "process": a child of its own, behind the same interface
    core_api: str = ">=0.1,<0.2"  # refused by name when core is another


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


class Registry:
    """All offers of the loaded plugins. Broken or contested names are remembered, and raise when asked for."""

    def __init__(self) -> None:
        self._offers: dict[tuple[str, str], list[Offer]] = {}
        self._broken: dict[str, Exception] = {}  # plugin -> what went wrong

    def add(self, offer: Offer) -> None:
        self._offers.setdefault((offer.kind, offer.provider.name), []).append(offer)

    def add_broken(self, plugin: str, error: Exception) -> None:
        self._broken[plugin] = error

    def offers(self, kind: str | None = None) -> list[Offer]:
        return [
            offer for (found, _), offers in sorted(self._offers.items()) for offer in offers if kind in (None, found)
        ]

    def contested(self) -> list[list[Offer]]:
        """Names that two distributions offer at once."""
        return [offers for offers in self._offers.values() if len(offers) > 1]

    def find(self, kind: str, name: str) -> Offer:
        """The offer of that name, or an error that says what there is. An environment may also be
        `pkg.mod:Class` or `./file.py:Class`, a loss `pkg.mod:function` or `./file.py:function`."""
        offers = self._offers.get((kind, name), [])
        if len(offers) > 1:
            both = " and ".join(sorted(offer.distribution for offer in offers))
            raise PluginError(
                f"two plugins offer {_a(kind)} named {name!r}: {both}.",
                remedy=f"Uninstall one, or block it: ATROPOS_DISABLE_PLUGINS={offers[-1].plugin}",
            )
        if offers:
            check_core_api(offers[0])
            return offers[0]
        if kind == "environment" and (":" in name or name.endswith(".py")):
            return Offer(kind, _provider_of_class(name), name, "your own")
        if kind == "loss" and ":" in name:
            return Offer(kind, _provider_of_loss(name), name, "your own")
        for plugin, error in self._broken.items():
            if name in (plugin, plugin.split("_", 1)[-1]):
                raise PluginError(
                    f"plugin {plugin!r}, which should offer {_a(kind)} named {name!r}, does not load: {error}"
                ) from error
        names = sorted(found for (of, found) in self._offers if of == kind)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"There is: {', '.join(names) or 'none'}."
        if kind == "environment":
            hint += " Your own is named ./file.py:Class or pkg.mod:Class."
        elif kind == "loss":
            hint += " Your own is named ./file.py:function or pkg.mod:function."
        raise UnknownComponent(
            f"there is no {kind} named {name!r}. {hint}", remedy="`atropos plugins` lists what is installed."
        )


def check_core_api(offer: Offer) -> None:
    wanted = offer.provider.core_api
    try:
        fits = SpecifierSet(wanted).contains(__version__, prereleases=True)
    except InvalidSpecifier as error:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} has core_api={wanted!r}, which is no version range"
        ) from error
    if not fits:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} needs atropos-core {wanted}; this is {__version__}.",
            remedy=f"Install a version of {offer.distribution} made for atropos-core {__version__}.",
        )


def cuda_devices() -> int:
    """How many CUDA devices this process may use, by the device files and CUDA_VISIBLE_DEVICES: no framework is
    imported to ask. None where the installed torch is a CPU build."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return 0
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        pass
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_requires(offer: Offer, devices: Iterable[str] = ()) -> None:
    """Raise FitError where something that the component needs is not on this machine."""
    for need in sorted(offer.provider.requires):
        if need == "cuda":
            if not cuda_devices():
                raise FitError(f"{offer.kind} {offer.provider.name!r} needs a CUDA device, and this machine has none.")
        elif importlib.util.find_spec(need) is None:
            raise FitError(
                f"{offer.kind} {offer.provider.name!r} needs the module {need!r}, which is not installed.",
                remedy=f"pip install {need}",
            )


def _provider_of_class(reference: str) -> Provider[Environment]:
    from atropos_core.interfaces import Environment

    made = load_reference(reference)
    if not (inspect.isclass(made) and issubclass(made, Environment)):
        raise ConfigError(f"{reference!r} is not a class derived from atropos_core.Environment, but {made!r}.")
    options = getattr(made, "Options", NoOptions)

    factory: Callable[..., Environment] = made

    def build(values: Any, context: RunContext) -> Environment:
        return factory() if isinstance(values, NoOptions) else factory(values)

    summary = next(iter((made.__doc__ or "your own environment").splitlines()))
    return Provider(name=reference, summary=summary, config=options, build=build)


def _provider_of_loss(reference: str) -> Provider[Loss]:
    made = load_reference(reference)
    if not hasattr(made, "findings"):
        raise ConfigError(
            f"{reference!r} is not a loss, but {made!r}.",
            remedy="A function becomes one by the trainer's decorator: docs/hooks.md.",
        )
    return Provider(name=reference, summary="your own loss", config=NoOptions, build=lambda values, context: made)


def load_reference(reference: str) -> Any:
    """Import `pkg.mod:Name` or `./file.py:Name`. A file with a single environment needs no `:Name`."""
    from atropos_core.interfaces import Environment

    where, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    try:
        with contained(f"importing {where}"):
            module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except EndsProcess as error:
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[0] == error.name.split(".")[0]:
            raise ConfigError(
                f"{reference!r}: no module named {error.name!r}. A file is named ./file.py:Class."
            ) from error
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except Exception as error:
        raise PluginError(f"{reference!r} could not be imported: {type(error).__name__}: {error}") from error
    if not name:
        found = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise ConfigError(f"{reference!r} has {len(found)} environments: say which, as {reference}:Class.")
        return found[0]
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{reference!r}: there is no {name!r} in it.{hint}") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    name = f"atropos_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
