"""Register the transforms `turn_returns`, `turn_gae`, `gigpo` and `maxrl`, and the command `atropos bias`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Transform
    from atropos_credit.config import GigpoOptions, MaxRlOptions, TurnGaeOptions, TurnReturnsOptions

CONFIG = "atropos_credit.config"


def build_turn_returns(options: TurnReturnsOptions, context: RunContext) -> Transform:
    from atropos_credit.transforms import turn_returns_transform

    return turn_returns_transform(options)


def build_turn_gae(options: TurnGaeOptions, context: RunContext) -> Transform:
    from atropos_credit.transforms import turn_gae_transform

    return turn_gae_transform(options)


def build_gigpo(options: GigpoOptions, context: RunContext) -> Transform:
    from atropos_credit.transforms import gigpo_transform

    return gigpo_transform(options)


def build_maxrl(options: MaxRlOptions, context: RunContext) -> Transform:
    from atropos_credit.transforms import MaxRl

    return MaxRl(options)


def _announced(baseline: str, divided: bool = False) -> dict[str, Any]:
    """The offset and factor of rewards that a transform removes, for the transforms before it and the checks before a run."""
    return {"advantages": {"baseline": baseline, "divided": divided}}


@hookimpl
def atropos_transforms() -> Iterable[Provider[Transform]]:
    yield Provider(
        "turn_returns",
        "advantages of turns: what is earned from a turn on, against the group at the same turn or in the same state",
        f"{CONFIG}:TurnReturnsOptions",
        build_turn_returns,
        announces=lambda o: _announced("others" if o.baseline == "state" else o.baseline, o.divide_by_std),
    )
    yield Provider(
        "turn_gae",
        "advantages of turns: generalised advantage estimation with the group's means as values",
        f"{CONFIG}:TurnGaeOptions",
        build_turn_gae,
        announces=lambda o: _announced("others"),
    )
    yield Provider(
        "gigpo",
        "advantages of turns: an episode against its group, and a turn against turns in the same state",
        f"{CONFIG}:GigpoOptions",
        build_gigpo,
        announces=lambda o: _announced("group", o.divide_by_std),
    )
    yield Provider(
        "maxrl",
        "advantages whose gradient is that of the log of the success rate",
        f"{CONFIG}:MaxRlOptions",
        build_maxrl,
        announces=lambda o: _announced("group"),
    )


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_credit import bias_command

    bias_command.add(app)
