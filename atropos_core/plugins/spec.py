"""The hooks by which a plugin adds to Atropos.

Every hook is called once, at start-up. Hooks return descriptions (`Provider`), not instances, so nothing heavy is imported
until a run names the component. Installing a package never changes a run.

    from atropos_core import hookimpl
    from atropos_core.plugins.provider import Provider

    @hookimpl
    def atropos_environments():
        yield Provider(name="hello", summary="...", config=HelloOptions, build=build_hello)
"""

# Annotations are never evaluated: typer and the interfaces are imported only for type checkers.
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from atropos_core import interfaces
    from atropos_core.plugins import services
    from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TeacherProvider, TrainerProvider
    from atropos_core.plugins.provider import LauncherProvider, Provider, ResolvedModel

hookimpl = pluggy.HookimplMarker("atropos")
hookspec = pluggy.HookspecMarker("atropos")


@hookspec
def atropos_environments() -> Iterable[Provider[interfaces.Environment]]:  # type: ignore[empty-body]
    """Offer environments: tasks, and how rollouts of them run. Chosen by `--env NAME` or `[environment.NAME]`."""


@hookspec
def atropos_rewards() -> Iterable[Provider[interfaces.Reward]]:  # type: ignore[empty-body]
    """Offer rewards, which score the episodes of a group. Chosen by `--reward NAME` or `[reward.NAME]`; several are added up
    by weight."""


@hookspec
def atropos_engines() -> Iterable[EngineProvider]:  # type: ignore[empty-body]
    """Offer engines, which sample from the policy. Chosen by `--engine NAME` or `[engine]`."""


@hookspec
def atropos_trainers() -> Iterable[TrainerProvider]:  # type: ignore[empty-body]
    """Offer trainers, which turn batches into updates. Chosen by `--trainer NAME` or `[trainer]`."""


@hookspec
def atropos_losses() -> Iterable[Provider[interfaces.Loss]]:  # type: ignore[empty-body]
    """Offer losses, which a trainer minimises. Chosen by `[trainer] loss = "NAME"` if the trainer has that option."""


@hookspec
def atropos_bridges() -> Iterable[BridgeProvider]:  # type: ignore[empty-body]
    """Offer bridges, which move trained weights into running engines. Chosen by `--bridge NAME` or `[bridge]`."""


@hookspec
def atropos_curricula() -> Iterable[Provider[interfaces.Curriculum]]:  # type: ignore[empty-body]
    """Offer curricula, which choose the next task. Chosen by `[curriculum]`."""


@hookspec
def atropos_transforms() -> Iterable[Provider[interfaces.Transform]]:  # type: ignore[empty-body]
    """Offer transforms, which turn scored groups into groups with advantages. Listed, in order, as `[transform.NAME]`."""


@hookspec
def atropos_teachers() -> Iterable[TeacherProvider]:  # type: ignore[empty-body]
    """Offer teachers, which annotate groups before any transform. Listed as `[teacher.NAME]`."""


@hookspec
def atropos_sinks() -> Iterable[Provider[interfaces.Sink]]:  # type: ignore[empty-body]
    """Offer sinks, which record metrics and rollouts. Listed as `[sink.NAME]`."""


@hookspec
def atropos_adapters() -> Iterable[Provider[interfaces.Adapter]]:  # type: ignore[empty-body]
    """Offer adapters to other frameworks, which run our environments there. Chosen by `atropos adapter NAME`."""


@hookspec
def atropos_sandboxes() -> Iterable[Provider[interfaces.Sandbox]]:  # type: ignore[empty-body]
    """Offer sandboxes for programs that are not trusted. Chosen by the `sandbox` option of an environment that runs programs."""


@hookspec
def atropos_launchers() -> Iterable[LauncherProvider]:  # type: ignore[empty-body]
    """Offer launchers, which start the processes of engines and trainer. Chosen by `--launcher NAME` or `[launcher]`."""


@hookspec
def atropos_engine_servers() -> Iterable[services.ServeEngine]:  # type: ignore[empty-body]
    """Offer the server that lets remote workers sample from a run's engines. Every run with an [api] uses it. Only one plugin may
    offer it."""


@hookspec
def atropos_sources() -> Iterable[services.OpenSource]:  # type: ignore[empty-body]
    """Offer the source of groups for a run with an [api], whose environments run in remote workers. Only one plugin may offer
    it."""


@hookspec
def atropos_warmups() -> Iterable[services.OpenWarmup]:  # type: ignore[empty-body]
    """Offer the reader of rows for a warm start, `[warmup]`. Only one plugin may offer it."""


@hookspec
def atropos_policy_servers() -> Iterable[services.ServePolicies]:  # type: ignore[empty-body]
    """Offer the server that lets an environment's own client sample from the policy. Only one plugin may offer it."""


@hookspec
def atropos_functions() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Offer functions of `atropos_core` that core only declares, by name: `{"check": check_component}`. `scripting/commands.py` has
    their signatures. Called when a script calls one of them. Only one plugin may offer a function."""


@hookspec
def atropos_commands(app: typer.Typer) -> None:
    """Add commands to the command line. Called when `atropos` starts: import what a command needs inside it. `app.command("name",
    rich_help_panel="Look")` puts a command into a group of `atropos --help`: Train, Look, Build or Connect. Without one it is
    listed last."""


@hookspec
def atropos_dry_run(plan: Any, figures: Path | None) -> Iterable[str]:  # type: ignore[empty-body]
    """Return more lines for the output of `atropos run --dry-run`. `plan` is a launch.plan.Plan. `figures` is the value of
    `--figures`: a finished run's directory, or a file."""


@hookspec(firstresult=True)
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    """Turn a name such as "tiny" into a model directory. Return None for a name that this plugin does not know, and raise
    ConfigError for one that it knows and cannot use."""


@hookspec(firstresult=True)
def atropos_resolve_run_file(reference: str) -> Path | None:
    """Turn a name such as "recipe:laptop" into the path of a run file. Return None for a name of another plugin. Called when a
    command is given something with a colon that is not a file."""
