"""`atropos audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import runs
from atropos_core.cli.options import SetOption, Uses, configure

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan
    from atropos_records.audit import Audit
    from atropos_records.record_checks import Fault
    from atropos_records.rollout_records import RolloutRecords

USES = Uses("atropos audit", ("trainer", "watch"))
SHOWN = 20  # faults on the terminal


def add(app: typer.Typer) -> None:
    app.command("audit", rich_help_panel="Look")(audit)


def audit(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory; the run may still be running.", show_default=False, autocompletion=runs),
    ],
    step: Annotated[
        list[int] | None,
        typer.Option(help="Only the rollouts of this step; may be repeated. \\[default: all recorded]"),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Nats by which a logprob may differ. \\[default: the run's limit between engine and trainer]",
            min=0,
        ),
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write all findings to this new file, one JSON object per line."),
    ] = None,
) -> None:
    """Check a run's recorded rollouts: masks, versions, texts and rewards against each other, and logprobs against those that the
    trainer computes with the saved weights. Ends with 1 if something is wrong.

    [bold]Examples[/]

      atropos audit runs/gsm8k-20260131-120000

      atropos audit runs/gsm8k-20260131-120000 --step 40 --set "trainer.devices=['cpu']"
    """
    import asyncio
    import json
    from dataclasses import asdict

    from atropos_core import console
    from atropos_core.storage.atomic import refuse_existing, write_output
    from atropos_records.audit import plan_of
    from atropos_records.rollout_records import RolloutRecords

    if out is not None:
        refuse_existing(out)
    records = RolloutRecords(run)
    loaded, resolved, plugins = configure(saved=run, changes=changes, uses=USES)
    found = asyncio.run(_audit(records, plan_of(loaded.config, resolved, plugins), step or [], tolerance))
    _show(found)
    if out is not None:
        write_output(out, "".join(json.dumps(asdict(fault)) + "\n" for fault in found.faults))
    if found.faults:
        console.say(f"{len(found.faults) + found.unlisted:,} things in these records cannot be.")
        raise typer.Exit(1)
    console.say("what could be checked is as it should be.")


async def _audit(records: RolloutRecords, plan: Plan, steps: list[int], tolerance: float | None) -> Audit:
    import asyncio

    from atropos_core import console
    from atropos_core.errors import Interrupted
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.storage.tempdirs import owned_directory
    from atropos_records.audit import audit

    try:
        with cancelled_by_signals(), owned_directory("audit") as scratch, own_process():
            return await audit(records, plan, steps, scratch, tolerance, console.say)
    except asyncio.CancelledError:
        raise Interrupted("stopped: an audit that is not whole says nothing") from None


def _show(found: Audit) -> None:
    from atropos_core import console

    if found.faults:
        console.table(("step", "task", "sequence", "position", "found"), map(_row, found.faults[:SHOWN]))
    if (more := len(found.faults) + found.unlisted - SHOWN) > 0:
        console.say(f"and {more:,} more; --out FILE has {'them all' if not found.unlisted else 'the first of them'}")
    for note in found.notes:
        console.say(note)
    console.facts(
        [
            ("steps", f"{len(found.steps)} looked at, from {found.steps[0]} to {found.steps[-1]}"),
            ("logprobs", f"{found.compared:,} compared with those of versions {_listed(found.versions)}")
            if found.versions
            else ("logprobs", "none could be compared"),
        ]
    )
    if found.versions:
        console.facts(
            [
                ("largest", f"difference {found.largest:.3g} nats"),
                ("tolerance", f"{found.tolerance:g} nats: {found.why_tolerance}"),
            ]
        )


def _row(fault: Fault) -> tuple[Any, ...]:
    empty = ("" if value is None else value for value in (fault.sequence, fault.position))
    return (fault.step, fault.task, *empty, fault.says)


def _listed(versions: list[int]) -> str:
    return ", ".join(map(str, versions))
