"""The providers of this package: the adapter `skyrl`, and a worker that sends its rollouts through shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_adapter_skyrl.config import SkyRLOptions
    from atropos_core.interfaces import Adapter


def build(options: SkyRLOptions, context: RunContext) -> Adapter:
    from atropos_adapter_skyrl.adapter import SkyRLAdapter

    return SkyRLAdapter(options, context)


@hookimpl
def atropos_adapters() -> Iterable[Provider[Adapter]]:
    yield Provider(
        "skyrl",
        "environments inside SkyRL's trainer, with its engines or without",
        "atropos_adapter_skyrl.config:SkyRLOptions",
        build,
    )


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_adapter_skyrl import command

    command.add(app)
