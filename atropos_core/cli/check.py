"""`atropos check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components

if TYPE_CHECKING:
    from atropos_core.plugins.registry import Registry


def add(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
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
    from atropos_core import console, testing
    from atropos_core.config import run_file as config
    from atropos_core.plugins.manager import load_plugins

    kind = kind or kind_named(name, load_plugins().registry, testing.KINDS, " to check")
    options: dict[str, Any] = config.nest(config.parse_flag(change) for change in changes or ())
    findings = testing.check(kind, name, options, skip=skip or ())
    broken = [finding for finding in findings if finding.ok is False]
    if as_json:
        console.findings_document(findings, kind=kind, name=name)
        raise typer.Exit(int(bool(broken)))
    console.findings(findings)
    if broken:
        console.say(f"{kind} {name!r} breaks {len(broken)} of {len(findings)} checks.")
        raise typer.Exit(1)
    console.say(f"{kind} {name!r} keeps its contract.")


def kind_named(name: str, registry: Registry, among: Sequence[str], purpose: str = "") -> str:
    """The one kind of `among` that has a component of this name."""
    import difflib

    from atropos_core.errors import ConfigError, UnknownComponent
    from atropos_core.plugins.references import is_reference

    taking = [of for of in among if registry.with_argument(of, name) is not None]
    if taking:
        return taking[0]
    if name.endswith(".toml"):
        raise ConfigError(
            f"{name} is a run file, and what is looked at is one component.",
            remedy="Name it as the run file does, and its options by --set OPTION=VALUE.",
        )
    if is_reference(name):
        return _kind_of_reference(name)
    kinds = list(dict.fromkeys(offer.kind for offer in registry.offers() if offer.provider.name == name))
    fitting = [kind for kind in kinds if kind in among]
    if len(fitting) > 1:
        raise ConfigError(f"{name!r} is of the kinds {', '.join(fitting)}.", remedy=f"Say which: --kind {fitting[0]}")
    if fitting:
        return fitting[0]
    for kind in among:
        try:
            registry.find(kind, name)  # raises what is wrong with a broken plugin of that name
        except UnknownComponent:
            continue
    names = sorted({offer.provider.name for offer in registry.offers() if offer.kind in among})
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"There is: {', '.join(names)}."
    raise UnknownComponent(
        f"there is no component named {name!r}{purpose}. {hint} Your own is named ./file.py:Name.",
        remedy="`atropos plugins` lists what is installed.",
    )


def _kind_of_reference(reference: str) -> str:
    """The kind of what stands there: of the class that it derives from."""
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.references import kind_of, load_reference

    if ":" not in reference:
        return "environment"
    if (kind := kind_of(load_reference(reference))) is None:
        raise ConfigError(
            f"{reference!r} does not say of which kind it is.", remedy="Say it: --kind reward, for example."
        )
    return kind
