"""The provider of the adapter `roll`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_adapter_roll.config import AdapterOptions
    from atropos_core.interfaces import Adapter


def build(options: AdapterOptions, context: RunContext) -> Adapter:
    from atropos_adapter_roll.adapter import RollAdapter

    return RollAdapter(options, context)


@hookimpl
def atropos_adapters() -> Iterable[Provider[Adapter]]:
    yield Provider(
        name="roll",
        summary="environments in ROLL, and in gem, as gem.Env",
        config="atropos_adapter_roll.config:AdapterOptions",
        build=build,
    )
