"""`atropos check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components

if TYPE_CHECKING:
    from atropos_core.interfaces import Finding


def add(app: typer.Typer) -> None:
    app.command("check", rich_help_panel="Build")(check_)


def check_(
    name: Annotated[
        str,
        typer.Argument(
            help="A component's name, or its place: ./file.py:Name or pkg.mod:Name.", autocompletion=components()
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(help="reward, sink, engine, ...: any kind of component. \\[default: whichever NAME is]"),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One of the component's own options.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Report this check, but do not fail by it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Check a component against the contract of its kind: environments are run by scripted policies, without a model.

    [bold]Examples[/]

      atropos check gsm8k

      atropos check ./mine.py:MyEnvironment --set size=100

      atropos check length --kind reward --set limit_tokens=64

      atropos check ./mine.py:my_loss --kind loss
    """
    from atropos_core import console
    from atropos_core.config import run_file as config

    options: dict[str, Any] = config.nest(config.parse_flag(change) for change in changes or ())
    kind, findings = check_component(name, kind, options, skip or ())
    broken = [finding for finding in findings if finding.ok is False]
    if as_json:
        console.findings_document(findings, kind=kind, name=name)
        raise typer.Exit(int(bool(broken)))
    console.findings(findings)
    if broken:
        console.say(f"{kind} {name!r} breaks {len(broken)} of {len(findings)} checks.")
        raise typer.Exit(1)
    console.say(f"{kind} {name!r} fulfills its contract.")


def check_component(
    component: Any, kind: str | None, options: Mapping[str, Any], skip: Sequence[str]
) -> tuple[str, list[Finding]]:
    """Return the kind of a component, and the findings of its contract. Without `kind`, it is inferred from the component. Raises
    ConfigError or UnknownComponent if this is not a component."""
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.plugins.references import kind_of
    from atropos_core.plugins.registry import kind_named
    from atropos_testing.contracts import KINDS, check

    if kind is None and isinstance(component, str):
        kind = kind_named(component, load_plugins().registry, KINDS, " to check")
    if (kind := kind or kind_of(component)) is None:
        raise ConfigError(
            f"{component!r} does not say of which kind it is.", remedy='Name the kind: kind="reward", for example.'
        )
    return kind, check(kind, component, options, skip=skip)
