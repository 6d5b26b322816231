"""What a plugin may add to Atropos.

Every hook is called once, at start-up, and answers with descriptions (`Provider`), never with instances: nothing heavy
is imported until a run names the component. Installing a package never changes a run.

    from atropos_core import hookimpl
    from atropos_core.plugins.provider import Provider

    @hookimpl
    def atropos_environments():
        yield Provider(name="hello", summary="...", config=HelloOptions, build=build_hello)
"""

# Annotations are evaluated by nobody: typer and the interfaces are imported for type checkers alone.
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from atropos_core import interfaces, launchers
    from atropos_core.plugins.provider import Provider, ResolvedModel

hookimpl = pluggy.HookimplMarker("atropos")
hookspec = pluggy.HookspecMarker("atropos")


@hookspec
def atropos_environments() -> Iterable[Provider[interfaces.Environment]]:  # type: ignore[empty-body]
    """Offer sources of tasks and the way they are run. Chosen by `--env NAME` or `[environment.NAME]`."""


@hookspec
def atropos_rewards() -> Iterable[Provider[interfaces.Reward]]:  # type: ignore[empty-body]
    """Offer scores of a group's episodes. Chosen by `--reward NAME` or `[reward.NAME]`; several are summed by weight."""


@hookspec
def atropos_engines() -> Iterable[Provider[interfaces.Engine]]:  # type: ignore[empty-body]
    """Offer ways to sample from the policy. Chosen by `--engine NAME` or `[engine]`."""


@hookspec
def atropos_trainers() -> Iterable[Provider[interfaces.Trainer]]:  # type: ignore[empty-body]
    """Offer ways to turn batches into updates. Chosen by `--trainer NAME` or `[trainer]`."""


@hookspec
def atropos_losses() -> Iterable[Provider[interfaces.Loss]]:  # type: ignore[empty-body]
    """Offer what a trainer minimises. Chosen by `[trainer] loss = "NAME"`, where the trainer has such an option."""


@hookspec
def atropos_bridges() -> Iterable[Provider[interfaces.Bridge]]:  # type: ignore[empty-body]
    """Offer ways to move trained weights into running engines. Chosen by `--bridge NAME` or `[bridge]`."""


@hookspec
def atropos_curricula() -> Iterable[Provider[interfaces.Curriculum]]:  # type: ignore[empty-body]
    """Offer orders in which tasks are drawn. Chosen by `[curriculum]`."""


@hookspec
def atropos_transforms() -> Iterable[Provider[interfaces.Transform]]:  # type: ignore[empty-body]
    """Offer steps from scored groups to groups with advantages. Named, in order, by `[transform.NAME]`."""


@hookspec
def atropos_teachers() -> Iterable[Provider[interfaces.Teacher]]:  # type: ignore[empty-body]
    """Offer annotators of groups, called before any transform. Named by `[teacher.NAME]`."""


@hookspec
def atropos_sinks() -> Iterable[Provider[interfaces.Sink]]:  # type: ignore[empty-body]
    """Offer destinations where metrics and rollouts are recorded. Named by `[sink.NAME]`."""


@hookspec
def atropos_adapters() -> Iterable[Provider[interfaces.Adapter]]:  # type: ignore[empty-body]
    """Offer other frameworks in which our environments can run. Chosen by `atropos adapter NAME`."""


@hookspec
def atropos_sandboxes() -> Iterable[Provider[interfaces.Sandbox]]:  # type: ignore[empty-body]
    """Offer places where programs run that are not trusted. Chosen by `sandbox` of an environment that starts programs."""


@hookspec
def atropos_launchers() -> Iterable[Provider[launchers.Launcher]]:  # type: ignore[empty-body]
    """Offer ways to start the processes of engines and trainer. Chosen by `--launcher NAME` or `[launcher]`."""


@hookspec
def atropos_engine_servers() -> Iterable[interfaces.ServeEngine]:  # type: ignore[empty-body]
    """Offer the server by which workers elsewhere sample from a run's engines. Used by every run with an [api]: one plugin
    may offer one."""


@hookspec
def atropos_sources() -> Iterable[interfaces.OpenSource]:  # type: ignore[empty-body]
    """Offer the groups of a run with an [api], whose environments are run by workers elsewhere: one plugin may offer them."""


@hookspec
def atropos_policy_servers() -> Iterable[interfaces.ServePolicies]:  # type: ignore[empty-body]
    """Offer the server by which an environment's own client samples from the policy: one plugin may offer one."""


@hookspec
def atropos_component_checks() -> Iterable[interfaces.CheckComponent]:  # type: ignore[empty-body]
    """Offer the contract tests of components (`atropos check`): one plugin may offer them."""


@hookspec
def atropos_commands(app: typer.Typer) -> None:
    """Add commands to the command line. Called when `atropos` starts: import what a command needs inside it."""


@hookspec
def atropos_dry_run(plan: Any, figures: Path | None) -> Iterable[str]:  # type: ignore[empty-body]
    """Say more of a run, line by line, in `atropos run --dry-run`. `plan` is a launch.assemble.Plan; `figures` is what `--figures`
    names: the directory of a run that has ended, or a file."""


@hookspec(firstresult=True)
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    """Turn a name such as "tiny" into a model directory. Return None for a reference that is not yours."""
