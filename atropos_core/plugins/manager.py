"""Find, load, isolate and report plugins.

pluggy's own entry-point loader lets one broken plugin stop the program. This one loads them one by one: a plugin that
raises is unregistered, remembered, and fails only the run that names it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pluggy

from atropos_core import __version__
from atropos_core.errors import AtroposError, ConfigError, EndsProcess, PluginError
from atropos_core.guards.collector import without_collector
from atropos_core.guards.exits import contained
from atropos_core.models.hub_download import download_model
from atropos_core.plugins import spec as hooks
from atropos_core.plugins.offers import KINDS, Offer
from atropos_core.plugins.provider import Provider, ResolvedModel
from atropos_core.plugins.registry import Registry
from atropos_core.plugins.requirements import check_core_api

if TYPE_CHECKING:
    from atropos_core.plugins.services import OpenSource, OpenWarmup, ServeEngine, ServePolicies

GROUP = "atropos"
CORE = "atropos-core"
DISABLE = "ATROPOS_DISABLE_PLUGINS"
BROUGHT_BY = {  # command, or function of `atropos_core` -> the distribution that has it
    "config": "atropos-config", "export": "atropos-records", "audit": "atropos-records", "doctor": "atropos-doctor",
    "rescore": "atropos-debugging", "bisect": "atropos-debugging", "replay": "atropos-debugging",
    "check": "atropos-testing", "new": "atropos-testing", "view": "atropos-plugin-viewer", "save_view": "atropos-plugin-viewer",
    "eval": "atropos-evaluation", "evaluate": "atropos-evaluation", "recipes": "atropos-recipes",
    "plan": "atropos-plugin-trainer-grpo", "quantize": "atropos-plugin-trainer-grpo", "serve": "atropos-plugin-trajectory-api",
    "train": "atropos-plugin-trajectory-api", "env": "atropos-plugin-trajectory-api", "engine": "atropos-plugin-trajectory-api",
    "process": "atropos-plugin-trajectory-api", "serve-agent": "atropos-plugin-agent-api", "import": "atropos-plugin-env-atroposlib",
    "simulate": "atropos-plugin-simulation", "adapter": "atropos-adapter-kit", "skyrl-env": "atropos-plugin-adapter-skyrl",
    "tinker": "atropos-plugin-tinker-api",
}  # fmt: skip
GIVEN: ContextVar[tuple[Offer, ...]] = ContextVar("given", default=())  # components passed as Python objects

T = TypeVar("T")


@dataclass
class PluginReport:
    """One plugin as `atropos plugins` shows it."""

    name: str
    distribution: str
    version: str
    error: Exception | None = None
    blocked: bool = False
    offers: list[Offer] = field(default_factory=list)
    refused: list[tuple[Offer, Exception]] = field(default_factory=list)  # offers for another core


@dataclass
class Plugins:
    """Everything that is installed, working or not."""

    manager: pluggy.PluginManager
    registry: Registry
    reports: list[PluginReport]

    def broken(self) -> list[PluginReport]:
        return [report for report in self.reports if report.error is not None]

    def resolve_model(self, reference: str, *, download: bool = True, weights: bool = True) -> ResolvedModel:
        """Resolve a name that a plugin knows, a directory, or a Hugging Face id (fetched by huggingface_hub, without `weights` only
        its configuration). Without `download`, the directory of an id is the id itself, for callers that only pass it on."""
        for implementation in self.manager.hook.atropos_resolve_model.get_hookimpls():
            try:
                found: Any = implementation.function(reference)
            except AtroposError:
                raise  # it knows the reference, and says what is wrong with it
            except Exception as error:  # noqa: BLE001 - the plugin boundary: one resolver must not break all models
                self.registry.add_broken(implementation.plugin_name, error)
                continue
            if isinstance(found, ResolvedModel):
                return found
        directory = Path(reference).expanduser()
        if any(
            os.path.isfile(directory / name) for name in ("config.json", "adapter_config.json")
        ):  # False for any text
            return ResolvedModel(directory.resolve(), f"the directory {directory}")
        if os.path.isdir(directory) or reference.startswith((".", "/", "~")):
            what = "no config.json in" if os.path.isdir(directory) else "no directory"
            raise ConfigError(
                f"model {reference!r:.300}: there is {what} {directory.absolute()!s:.300}.",
                remedy="Name a directory that save_pretrained wrote. In a run file, ./ is relative to that file's folder; in a flag, "
                "a relative path starts in the current directory.",
            )
        return ResolvedModel(
            download_model(reference, weights=weights) if download else Path(reference),
            f"{reference} from the Hugging Face hub",
        )

    def run_file(self, named: Path) -> Path:
        """Return the run file that a plugin has under this name, as recipe:NAME. Any other path is returned as it is."""
        reference = str(named)
        if ":" not in reference or named.exists():
            return named
        found: Path | None = self.manager.hook.atropos_resolve_run_file(reference=reference)
        if found is None and reference.startswith("recipe:"):
            raise ConfigError(
                f"{reference} is a run file of {BROUGHT_BY['recipes']}, which is not installed or does not load.",
                remedy=f"Install it with: pip install {BROUGHT_BY['recipes']}. `atropos plugins` shows what is broken.",
            )
        return found or named

    def engine_server(self) -> ServeEngine:
        """Return the server of a run's engines. Raises ConfigError if no plugin offers one, and PluginError if two do."""
        found: ServeEngine = _the_one(
            self.manager.hook.atropos_engine_servers,
            "the server of a run's engines",
            "a run with an [api] needs a server of its engines for workers elsewhere",
            "atropos-plugin-trajectory-api",
        )
        return found

    def source(self) -> OpenSource:
        """Return the opener of the groups of a run with an [api]. Raises the same errors as `engine_server`."""
        found: OpenSource = _the_one(
            self.manager.hook.atropos_sources,
            "the groups of an [api]",
            "a run with an [api] needs a client of its trajectory API",
            "atropos-plugin-trajectory-api",
        )
        return found

    def warmup(self) -> OpenWarmup:
        """Return the reader of the rows of a warm start. Raises the same errors as `engine_server`."""
        found: OpenWarmup = _the_one(
            self.manager.hook.atropos_warmups,
            "the rows of a warm start",
            "[warmup] needs a reader of rows",
            "atropos-plugin-env-dataset",
        )
        return found

    def policy_server(self) -> ServePolicies:
        """Return the server that an environment's own client samples from. Raises the same errors as `engine_server`."""
        found: ServePolicies = _the_one(
            self.manager.hook.atropos_policy_servers,
            "the server of policies",
            "an environment that brings its own client needs a server of the policy",
            "atropos-plugin-agent-api",
        )
        return found

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function `atropos_core.NAME` that a plugin offers. Raises the same errors as `engine_server`."""
        offered = [
            (one.plugin_name, cast(Mapping[str, Callable[..., Any]], one.function()).get(name))
            for one in self.manager.hook.atropos_functions.get_hookimpls()
        ]
        found = [(plugin, function) for plugin, function in offered if function is not None]
        if not found:
            raise ConfigError(
                f"atropos_core.{name} is a function of {BROUGHT_BY[name]}, which is not installed or does not load.",
                remedy=f"Install it with: pip install {BROUGHT_BY[name]}. `atropos plugins` shows what is broken.",
            )
        return _only(found, f"the function {name!r}")


def _the_one(hook: pluggy.HookCaller, what: str, why: str, distribution: str) -> Any:
    """Return the one thing that plugins offer by this hook. `distribution` is the one to recommend if there is none."""
    found = [
        (one.plugin_name, offered) for one in hook.get_hookimpls() for offered in cast(Iterable[Any], one.function())
    ]
    if not found:
        raise ConfigError(
            f"{why}, and no installed plugin offers it.",
            remedy=f"pip install {distribution}. `atropos plugins` says what is installed, blocked or broken.",
        )
    return _only(found, what)


def _only(found: Sequence[tuple[str, T]], what: str) -> T:
    if len(found) > 1:
        both = " and ".join(sorted(name for name, _ in found))
        raise PluginError(f"two plugins offer {what}: {both}.", remedy=f"Uninstall one, or block it: {DISABLE}=NAME")
    return found[0][1]


@without_collector()
def load_plugins(entries: Iterable[EntryPoint] | None = None) -> Plugins:
    """Load core's built-ins, then every other entry point of the group `atropos` (or `entries` in its place).
    Raises PluginError if the entry point of the built-ins is missing."""
    manager = pluggy.PluginManager("atropos")
    manager.add_hookspecs(hooks)
    plugins = Plugins(manager, Registry(), [])
    blocked = {name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()}
    installed = [(entry, *_whose(entry)) for entry in entry_points(group=GROUP)]
    builtin = _builtin(installed)
    _add(plugins, PluginReport(builtin.name, CORE, __version__), builtin.load)
    found = installed if entries is None else [(entry, *_whose(entry)) for entry in entries]
    for entry, distribution, version in sorted(found, key=lambda one: one[0].name):
        report = PluginReport(entry.name, distribution, version)
        if any(report.name == other.name and report.distribution == other.distribution for other in plugins.reports):
            continue  # the built-ins; or one distribution found twice on the path, as an editable install may be
        if entry.name in blocked:
            report.blocked = True
            plugins.reports.append(report)
        else:
            _add(plugins, report, entry.load)
    for offer in GIVEN.get():
        plugins.registry.add(offer)
    return plugins


def _whose(entry: EntryPoint) -> tuple[str, str]:
    """Return distribution and version from the head of METADATA. `entry.dist` would parse all of it, including the README."""
    if entry.dist is None:
        return "?", "?"
    head = (entry.dist.read_text("METADATA") or "").partition("\n\n")[0]
    said = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
    if len(said) < 2:  # not in the form of wheels
        return entry.dist.name, entry.dist.version
    return said["Name"], said["Version"]


def _builtin(installed: Iterable[tuple[EntryPoint, str, str]]) -> EntryPoint:
    for entry, distribution, _ in installed:
        if entry.name == "builtin" and distribution == CORE:
            return entry
    raise PluginError(
        f"{CORE} is installed without its own entry point, so that nothing built in can be found: it was installed from "
        "an earlier state of this directory.",
        remedy="Install it again: pip install -e . (in a checkout, `make run` does).",
    )


def _add(plugins: Plugins, report: PluginReport, load: Callable[[], Any]) -> None:
    plugins.reports.append(report)
    name = f"{report.distribution}:{report.name}"
    try:
        plugins.manager.register(_imported(load), name=name)
        plugins.manager.check_pending()  # a misspelt hook is an error, not a hook that is never called
        report.offers = list(_offers(plugins.manager, name, report))
    except Exception as error:  # noqa: BLE001 - the plugin boundary: a plugin's code may raise anything
        if plugins.manager.has_plugin(name):
            plugins.manager.unregister(name=name)
        report.error = error
        plugins.registry.add_broken(report.name, error)
        return
    for offer in report.offers:
        plugins.registry.add(offer)
        try:
            check_core_api(offer)
        except PluginError as error:
            report.refused.append((offer, error))


def _imported(load: Callable[[], Any]) -> Any:
    try:
        with contained("importing it"):
            return load()
    except EndsProcess as error:
        raise PluginError(f"it ended the program while it was imported: {error}") from error


def _offers(manager: pluggy.PluginManager, plugin: str, report: PluginReport) -> Iterable[Offer]:
    for kind, hook in KINDS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            if implementation.plugin_name != plugin:
                continue
            answer = implementation.function()
            if isinstance(answer, Provider) or not isinstance(answer, Iterable):
                raise PluginError(
                    f"{hook}() must return a list of Providers (or yield them), not {type(answer).__name__}"
                )
            for provider in answer:
                if not isinstance(provider, Provider):
                    raise PluginError(f"{hook}() gave {provider!r}, which is not a Provider")
                if inspect.iscoroutinefunction(provider.build):
                    raise PluginError(f"{hook}(): build of {provider.name!r} must be an ordinary function")
                yield Offer(kind, provider, report.name, report.distribution)
