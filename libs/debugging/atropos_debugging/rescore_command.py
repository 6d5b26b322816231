"""`atropos rescore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components, runs
from atropos_core.cli.options import SetOption, Uses

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan
    from atropos_debugging.agreement import Agreement
    from atropos_debugging.rescoring import Recorded, Rescored, RolloutChange
    from atropos_records.saved_results import RescoredRows

USES = Uses("atropos rescore", ("reward", "transform", "environment"))
STEPS_SHOWN = 20
COLUMNS = {  # of --out: those of a recorded rollout that name it, and what has changed
    "step": "int64", "line": "int64", "draw": "int64", "member": "int64", "environment": "string", "task": "string",
    "reward_before": "float64", "reward": "float64", "advantage_before": "float64", "advantage": "float64",
    "trained_before": "bool", "trained": "bool", "parts_before": "json", "parts": "json",
}  # fmt: skip


def add(app: typer.Typer) -> None:
    app.command("rescore", rich_help_panel="Look")(rescore)


def rescore(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run directory; the run may still be running. Or a file of rollouts of verifiers, atroposlib or TRL.",
            show_default=False,
            autocompletion=runs,
        ),
    ],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            help="Score with this reward instead of the run's: a name, pkg.mod:Name or ./file.py:name. May be repeated. "
            "A name that the run has keeps its options.",
            autocompletion=components("reward"),
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Use the sections reward, transform and environment of this run file, if it has them.",
        ),
    ] = None,
    environments: Annotated[
        bool,
        typer.Option(
            "--environments",
            help="Open the environments: tasks then have their data, and score() of one-turn environments is called again.",
        ),
    ] = False,
    step: Annotated[
        list[int] | None,
        typer.Option(help="Only the rollouts of this step; may be repeated. \\[default: all recorded]"),
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write each rollout, before and now, to this new file: NAME.jsonl or NAME.parquet."),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(help="Keep the result in the run directory under this name, so that `atropos view` shows it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Score a run's recorded rollouts again, without a model. Shows which rewards change, which advantages change their sign, and
    what each step would have trained.

    [bold]Examples[/]

      atropos rescore runs/gsm8k-20260131-120000

      atropos rescore runs/gsm8k-20260131-120000 --reward ./rewards.py:strict --out changed.jsonl

      atropos rescore runs/gsm8k-20260131-120000 --reward ./rewards.py:strict --save strict

      atropos rescore runs/gsm8k-20260131-120000 --set reward.format.weight=0.1

      atropos rescore runs/gsm8k-20260131-120000 --config new.toml --environments

      atropos rescore outputs/evals/results.jsonl --reward ./rewards.py:strict
    """
    import asyncio
    import sys
    from contextlib import nullcontext, redirect_stdout

    from atropos_core import console
    from atropos_core.plugins.manager import load_plugins
    from atropos_debugging.questioned_plan import changed_config, scoring_plan
    from atropos_debugging.rescoring import document, of_file, of_run
    from atropos_records.rollout_records import RolloutRecords
    from atropos_records.saved_results import RescoredRows, result_path, write_result

    is_file = run.is_file()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what a reward prints is not part of the document
        plugins = load_plugins()
        if is_file:
            _refuse_idle_flags(run, reward, config, environments=environments, step=step, save=save)
        saved = None if save is None else result_path(run, "rescored", save)
        recorded = of_file(run) if is_file else of_run(RolloutRecords(run), step or [])
        chosen = changed_config(None if is_file else run, plugins, USES, reward or [], config, changes or [])
        plan = scoring_plan(chosen, plugins, environments=environments)
        rows = None if saved is None else RescoredRows()
        found = asyncio.run(_rescore(recorded, plan, out, rows))
        rewards = {name: {"use": one.use, "weight": one.weight} for name, one in plan.config.reward.items()}
        if saved is not None and rows is not None:
            write_result(saved, {"rewards": rewards}, rows.arrays())
    if as_json:
        files = {"out": str(out) if out else None, "saved": str(saved) if saved else None}
        console.document({"run": str(run), "rewards": rewards, **document(found), **files})
        return
    _show(found)
    if out is not None:
        console.facts([("rollouts", str(out))])
    if saved is not None:
        console.facts([("saved", f"{saved}, which `atropos view {run}` shows")])


def _refuse_idle_flags(
    file: Path,
    reward: list[str] | None,
    config: Path | None,
    *,
    environments: bool,
    step: list[int] | None,
    save: str | None,
) -> None:
    """Raises ConfigError for a flag that means nothing for a file of another library, and if nothing says how to score."""
    from atropos_core.errors import ConfigError

    idle = {"--environments": environments, "--step": step, "--save": save}
    if given := [flag for flag, value in idle.items() if value]:
        raise ConfigError(
            f"{given[0]} has no effect on {file}, which is not a run of Atropos.",
            remedy="Leave it out.",
        )
    if not reward and config is None:
        raise ConfigError(
            f"{file} does not say which rewards scored its rollouts.",
            remedy="Name one with --reward, or a run file with --config.",
        )


async def _rescore(recorded: Recorded, plan: Plan, out: Path | None, rows: RescoredRows | None) -> Rescored:
    import asyncio
    import math

    from atropos_core.errors import Interrupted
    from atropos_core.guards.blocked_loop import blocked_loop_alarm
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.storage.tempdirs import owned_directory
    from atropos_debugging.rescoring import rescore
    from atropos_records.files import new_file

    def write(one: RolloutChange) -> None:
        if file is not None:
            file.write(_row(one))
        if rows is not None:
            line = one.line
            before = math.nan if line.scored_reward is None else line.scored_reward
            rows.add(step=line.step, line=line.line, draw=line.draw, reward_before=before, reward=one.reward,
                     advantage_before=one.advantage_before, advantage=one.advantage)  # fmt: skip

    file = None if out is None else new_file(out, COLUMNS)  # type: ignore[arg-type] # values are Column, mypy widens them
    try:
        with cancelled_by_signals(), owned_directory("rescore") as scratch, blocked_loop_alarm(), own_process():
            found = await rescore(recorded, plan, scratch, None if file is None and rows is None else write)
        if file is not None:
            file.finish()
        return found
    except asyncio.CancelledError:
        raise Interrupted("stopped: not all rollouts were scored again") from None
    finally:
        if file is not None:
            file.discard()


def _row(one: RolloutChange) -> dict[str, Any]:
    line = one.line
    return {
        "step": line.step,
        "line": line.line,
        "draw": line.draw,
        "member": line.member,
        "environment": line.environment,
        "task": line.task,
        "reward_before": line.scored_reward,
        "reward": _number(one.reward),
        "advantage_before": _number(one.advantage_before),
        "advantage": _number(one.advantage),
        "trained_before": line.outcome in ("trained", None),
        "trained": one.trained,
        "parts_before": dict(line.parts),
        "parts": {name: _number(value) for name, value in one.parts.items()},
    }


def _number(value: float) -> float | None:
    import math

    return None if math.isnan(value) else value


def _show(found: Rescored) -> None:
    from atropos_core import console

    agreements = [("all, by weight", found.total.agreement())]
    agreements += [(name, scores.agreement()) for name, scores in found.parts.items()]
    console.table(
        ("reward", "rollouts", "changed", "largest change", "rank correlation", "alpha"),
        [(name, *_cells(one)) for name, one in agreements],
    )
    console.say()
    most = sorted(found.steps, key=lambda one: (-one.signs_changed, one.direction, one.step))[:STEPS_SHOWN]
    console.table(
        ("step", "groups", "trained", "now", "mean reward", "now", "signs changed", "direction"),
        [
            (one.step, one.groups, one.trained_before, one.trained_now, _text(one.reward_before), _text(one.reward_now),
             one.signs_changed, _text(one.direction))
            for one in sorted(most, key=lambda one: one.step)
        ],
    )  # fmt: skip
    if len(found.steps) > STEPS_SHOWN:
        console.say(f"the {STEPS_SHOWN} most changed of {len(found.steps)} steps; --json has all of them")
    console.say()
    for cause in found.causes:
        console.warn(f"not scored: {cause}")
    for note in found.notes:
        console.note("note", note)
    console.say(
        f"{found.rollouts:,} rollouts in {found.groups:,} groups"
        + (f", of which {found.failed_groups:,} could not be scored" if found.failed_groups else "")
        + f"; an advantage changes its sign in {found.signs_changed:,} of {found.compared_groups:,} groups that were compared."
    )


def _cells(one: Agreement) -> tuple[str, ...]:
    numbers = (_text(one.largest), _text(one.rank_correlation), _text(one.alpha))
    return (f"{one.count:,}", f"{one.changed:,}", *numbers)


def _text(value: float) -> str:
    import math

    return "" if math.isnan(value) else f"{value:.4g}"
