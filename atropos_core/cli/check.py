"""`atropos check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atropos_core.plugins.registry import Registry


def add(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    name: Annotated[
        str, typer.Argument(help="A component's name; for environments also ./file.py:Class or pkg.mod:Class.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(help="environment, reward, transform, curriculum, bridge or loss. \\[default: whichever NAME is]"),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One of the component's own options.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Report this check, but do not fail by it.")
    ] = None,
) -> None:
    """Check a component against the contract of its kind: environments are run by scripted policies, without a model.

    [bold]Examples[/]

      atropos check gsm8k

      atropos check ./mine.py:MyEnvironment --set size=100

      atropos check length --kind reward --set limit_tokens=64

      atropos check ./mine.py:my_loss --kind loss
    """
    from atropos_core import console, testing
    from atropos_core.config import run_file as config
    from atropos_core.plugins.manager import load_plugins

    kind = kind or _kind_of(name, load_plugins().registry)
    options: dict[str, Any] = config.nest(config.parse_flag(change) for change in changes or ())
    findings = testing.check(kind, name, options, skip=skip or ())
    console.findings(findings)
    broken = [finding for finding in findings if finding.ok is False]
    if broken:
        console.say(f"{kind} {name!r} breaks {len(broken)} of {len(findings)} checks.")
        raise typer.Exit(1)
    console.say(f"{kind} {name!r} keeps its contract.")


def _kind_of(name: str, registry: Registry) -> str:
    """The one kind with a contract that has a component of this name."""
    import difflib

    from atropos_core.errors import ConfigError, UnknownComponent
    from atropos_core.testing import KINDS

    if ":" in name or name.endswith(".py"):
        return "environment"
    kinds = list(dict.fromkeys(offer.kind for offer in registry.offers() if offer.provider.name == name))
    fitting = [kind for kind in kinds if kind in KINDS]
    if len(fitting) > 1:
        raise ConfigError(f"{name!r} is of the kinds {', '.join(fitting)}.", remedy=f"Say which: --kind {fitting[0]}")
    if kinds and not fitting:
        raise ConfigError(f"{name!r} is a component of kind {kinds[0]}; there is a contract for: {', '.join(KINDS)}.")
    if fitting:
        return fitting[0]
    for kind in KINDS:
        try:
            registry.find(kind, name)  # raises what is wrong with a broken plugin of that name
        except UnknownComponent:
            continue
    names = sorted({offer.provider.name for offer in registry.offers() if offer.kind in KINDS})
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"There is: {', '.join(names)}."
    raise UnknownComponent(
        f"there is no component named {name!r} to check. {hint} An environment of your own is named ./file.py:Class.",
        remedy="`atropos plugins` lists what is installed.",
    )
