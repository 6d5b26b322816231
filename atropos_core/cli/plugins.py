"""`atropos plugins`."""

from __future__ import annotations

import typer


def add(app: typer.Typer) -> None:
    app.command("plugins")(plugins)


def plugins() -> None:
    """List what is installed, by kind, with its distribution and version. Broken plugins are shown with why.

    [bold]Example[/]

      atropos plugins
    """
    from atropos_core import console
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.plugins.provider import KINDS

    loaded = load_plugins()
    versions = {report.distribution: report.version for report in loaded.reports}
    rows = []
    for kind in KINDS:
        label = kind
        for offer in loaded.registry.offers(kind):
            rows.append(
                (
                    label,
                    offer.provider.name,
                    offer.provider.summary,
                    f"{offer.distribution} {versions[offer.distribution]}",
                )
            )
            label = ""
    console.table(("kind", "name", "what it is", "from"), rows)
    for report in loaded.reports:
        who = f"{report.name} ({report.distribution} {report.version})"
        if report.blocked:
            console.note("blocked", f"{who}: by ATROPOS_DISABLE_PLUGINS")
        if report.error is not None:
            first = (str(report.error).splitlines() or [""])[0]
            console.broken(f"{who}: {type(report.error).__name__}: {first}")
        for _, error in report.refused:
            console.broken(f"{who}: {error}")
    for offers in loaded.registry.contested():
        both = " and ".join(sorted(offer.distribution for offer in offers))
        console.broken(
            f"{offers[0].kind} {offers[0].provider.name!r} is offered by both {both}; a run that names it is refused"
        )
