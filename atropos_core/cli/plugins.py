"""`atropos plugins`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components

if TYPE_CHECKING:
    from atropos_core.plugins.manager import Plugins
    from atropos_core.plugins.offers import Offer


def add(app: typer.Typer) -> None:
    app.command("plugins", rich_help_panel="Build")(plugins)


def plugins(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show the options of this component. Without it: list all.",
            show_default=False,
            autocompletion=components(),
        ),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind: environment, reward, sink, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """List what is installed, by kind, with its distribution and version. Broken plugins are listed with the reason.

    [bold]Examples[/]

      atropos plugins

      atropos plugins gsm8k
    """
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.plugins.offers import KINDS

    if kind is not None and kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}. Choose one of: {', '.join(KINDS)}.")
    loaded = load_plugins()
    if name is not None:
        from atropos_core.plugins.registry import kind_named

        _show_one(loaded, loaded.registry.find(kind or kind_named(name, loaded.registry, list(KINDS)), name), as_json)
    else:
        _show_all(loaded, (kind,) if kind else tuple(KINDS), as_json)


def _show_one(loaded: Plugins, offer: Offer, as_json: bool) -> None:
    from dataclasses import asdict

    from atropos_core import console
    from atropos_core.config.option_descriptions import options_of

    options = options_of(offer.provider.options)
    facts = _facts(loaded, offer)
    if as_json:
        return console.document({**facts, "options": [asdict(option) for option in options]})
    console.say(f"{offer.kind} {offer.provider.name}: {offer.provider.summary}")
    console.say(f"from {_origin(facts)}")
    if not options:
        return console.say("It has no options.")
    rows = [(option.name, option.type, option.default_text(), option.meaning) for option in options]
    return console.table(("option", "type", "default", "meaning"), rows)


def _show_all(loaded: Plugins, kinds: tuple[str, ...], as_json: bool) -> None:
    from atropos_core import console

    offers = [offer for kind in kinds for offer in loaded.registry.offers(kind)]
    if as_json:
        return console.document(
            {
                "components": [_facts(loaded, offer) for offer in offers],
                "plugins": [
                    {
                        "name": report.name,
                        "distribution": report.distribution,
                        "version": report.version,
                        "blocked": report.blocked,
                        "broken": [
                            f"{type(error).__name__}: {error}"
                            for error in (report.error, *(error for _, error in report.refused))
                            if error is not None
                        ],
                    }
                    for report in loaded.reports
                ],
            }
        )
    rows = []
    label = ""
    for offer in offers:
        facts = _facts(loaded, offer)
        first = offer.kind if offer.kind != label else ""
        rows.append((first, offer.provider.name, offer.provider.summary, _origin(facts)))
        label = offer.kind
    console.table(("kind", "name", "what it is", "from"), rows)
    for report in loaded.reports:
        who = f"{report.name} ({report.distribution} {report.version})"
        if report.blocked:
            console.note("blocked", f"{who}: by ATROPOS_DISABLE_PLUGINS")
        if report.error is not None:
            line = (str(report.error).splitlines() or [""])[0]
            console.broken(f"{who}: {type(report.error).__name__}: {line}")
        for _, error in report.refused:
            console.broken(f"{who}: {error}")
    for contested in loaded.registry.contested():
        both = " and ".join(sorted(offer.distribution for offer in contested))
        console.broken(
            f"{contested[0].kind} {contested[0].provider.name!r} is offered by both {both}; a run that names it is refused"
        )
    return None


def _facts(loaded: Plugins, offer: Offer) -> dict[str, Any]:
    versions = {report.distribution: report.version for report in loaded.reports}
    return {
        "kind": offer.kind,
        "name": offer.provider.name,
        "summary": offer.provider.summary,
        "distribution": offer.distribution,
        "version": versions.get(offer.distribution),  # None: the user's own code
    }


def _origin(facts: dict[str, Any]) -> str:
    return " ".join(filter(None, (facts["distribution"], facts["version"])))
