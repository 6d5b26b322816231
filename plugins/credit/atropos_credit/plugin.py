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


def _announced(by: str, baseline: str, undoes: dict[str, str], by_turn: bool = True) -> dict[str, Any]:
    """Tell earlier transforms, and the checks before a run, how a transform uses rewards. `undoes`: the common changes of a
    group's rewards that have no effect, each with the option that gives it one ("" for none). `by_turn`: groups whose totals are equal
    can have advantages."""
    return {"advantages": {"by": by, "baseline": baseline, "undoes": undoes, "by_turn": by_turn}}


def _undone(discount: float, offset: str = "", divided: bool = False) -> dict[str, str]:
    """With a discount, an offset that is earned at the end counts less for turns that are further from it, so it remains."""
    undoes = {"offset": offset} if discount == 1 else {}
    return undoes | ({"factor": "divide_by_std = false"} if divided else {})


def _of_turn_returns(o: TurnReturnsOptions) -> dict[str, Any]:
    undoes = {} if o.baseline == "none" else _undone(o.discount, 'baseline = "none"', o.divide_by_std)
    return _announced("turn_returns", "others" if o.baseline == "state" else o.baseline, undoes)


def _of_maxrl(o: MaxRlOptions) -> dict[str, Any]:
    """Rewards count only if they say which replies are correct."""
    option = "correct_above set"
    undoes = {"offset": option, "factor": option} if o.correct_above is None else {}
    return _announced("maxrl", "group", undoes, by_turn=False)


@hookimpl
def atropos_transforms() -> Iterable[Provider[Transform]]:
    yield Provider(
        "turn_returns",
        "advantages of turns: what is earned from a turn on, against the group at the same turn or in the same state",
        f"{CONFIG}:TurnReturnsOptions",
        build_turn_returns,
        announces=_of_turn_returns,
    )
    yield Provider(
        "turn_gae",
        "advantages of turns: generalised advantage estimation with the group's means as values",
        f"{CONFIG}:TurnGaeOptions",
        build_turn_gae,
        announces=lambda o: _announced("turn_gae", "others", _undone(o.discount, "discount below 1")),
    )
    yield Provider(
        "gigpo",
        "advantages of turns: an episode against its group, and a turn against turns in the same state",
        f"{CONFIG}:GigpoOptions",
        build_gigpo,
        announces=lambda o: _announced("gigpo", "group", _undone(o.discount, "discount below 1", o.divide_by_std)),
    )
    yield Provider(
        "maxrl",
        "advantages whose gradient is that of the log of the success rate",
        f"{CONFIG}:MaxRlOptions",
        build_maxrl,
        announces=_of_maxrl,
    )


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_credit import bias_command

    bias_command.add(app)
