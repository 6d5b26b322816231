"""`atropos bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import runs

if TYPE_CHECKING:
    from atropos_debugging.bisection import Bisected, Difference

LONGEST = 60  # characters of a value


def add(app: typer.Typer) -> None:
    app.command("bisect", rich_help_panel="Look")(bisect)


def bisect(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory.", show_default=False, autocompletion=runs)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False, autocompletion=runs)],
    tolerance: Annotated[
        float,
        typer.Option(help="How much two numbers may differ: logprobs, rewards, advantages, metrics, weights.", min=0),
    ] = 0.0,
    statistics: Annotated[
        bool,
        typer.Option(
            "--statistics",
            help="Compare the metrics of all common steps statistically: for runs that are not deterministic.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Find the first difference between two runs that should be alike. Names the step, the stage of that step (draws, tasks, prompts,
    samples, scores, advantages, gradient, weights and others), and the rollout. Ends with 0 if there is none, with 1 if there is one,
    and with 2 if the runs cannot be compared.

    [bold]Examples[/]

      atropos bisect runs/good runs/bad

      atropos bisect runs/on-cpu runs/on-gpu --tolerance 1e-3

      atropos bisect runs/good runs/bad --statistics
    """
    from dataclasses import asdict

    from atropos_core import console
    from atropos_core.errors import AtroposError, ConfigError
    from atropos_debugging.bisection import bisect
    from atropos_records.rollout_records import RolloutRecords

    try:
        if statistics:
            if tolerance:
                raise ConfigError("--tolerance has no effect with --statistics.", remedy="Leave one of them out.")
            _compare_statistics(a, b, as_json=as_json)
            return
        found = bisect(RolloutRecords(a), RolloutRecords(b), tolerance)
    except AtroposError as error:
        error.exit_code = 2  # 1 says that they differ
        raise
    if as_json:
        console.document({"a": str(a), "b": str(b), "alike": found.first is None, **asdict(found)})
    else:
        _show(found)
    if found.first is not None:
        raise typer.Exit(1)


def _compare_statistics(a: Path, b: Path, *, as_json: bool) -> None:
    """Raises typer.Exit with 1 if a metric differs."""
    from dataclasses import asdict

    from atropos_core import console
    from atropos_core.storage.run_records import metric_rows
    from atropos_debugging.drift import EVIDENCE, drifts

    rows = [{int(row["step"]): row for row in metric_rows(run)[0]} for run in (a, b)]
    found, compared = drifts(*rows)
    if as_json:
        told = {"metrics": compared, "drifts": [asdict(one) for one in found], "note": EVIDENCE}
        console.document({"a": str(a), "b": str(b), "alike": not found, **told})
    elif found:
        first = found[0]
        console.say(f"The runs differ from step {first.step} on, first in {first.metric}.")
        console.table(
            ("metric", "from step", "A", "B", "steps", "independent", "p"),
            [(one.metric, one.step, _short(one.a), _short(one.b), one.steps, f"{one.effective:.1f}", f"{one.p:.2g}")
             for one in found],
        )  # fmt: skip
        console.say(EVIDENCE)
    else:
        console.say(f"none of {compared} metrics differs by more than the steps of both runs vary.")
    if found:
        raise typer.Exit(1)


def _show(found: Bisected) -> None:
    from atropos_core import console
    from atropos_debugging.bisection import STAGES

    if found.configuration:
        rows = [(path, _short(one), _short(other)) for path, (one, other) in found.configuration.items()]
        console.table(("configuration", "A", "B"), rows)
        console.say()
    for step, names in found.files.items():
        console.note("files", f"{', '.join(names)} of the policy differ, from the checkpoint of step {step} on")
    for note in found.notes:
        console.note("note", note)
    if (first := found.first) is None:
        console.say(f"the runs are alike in {_steps(found.steps)}.")
        return
    console.say(f"The runs first differ in step {first.step}, at the {first.stage}.")
    console.table(("stage", "A and B", "A", "B"), [_row(stage, one) for stage, one in found.stages.items()])
    console.say()
    console.facts(
        [
            ("first", f"{_where(first)}: {first.says}"),
            ("A", _short(first.a)),
            ("B", _short(first.b)),
            ("look at", STAGES[first.stage]),
        ]
    )


def _row(stage: str, one: Difference | None) -> tuple[str, str, str, str]:
    return (
        (stage, "same", "", "") if one is None else (stage, f"{_where(one)}: {one.says}", _short(one.a), _short(one.b))
    )


def _where(one: Difference) -> str:
    if not one.task:
        return f"step {one.step}"
    member = "" if one.member is None else f"rollout {one.member} of "
    return f"{member}task {one.task} of {one.environment} (draw {one.draw})"


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else "not there" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _steps(steps: list[int]) -> str:
    return (
        f"step {steps[0]}"
        if len(steps) == 1
        else f"all {len(steps)} steps that both have, from {steps[0]} to {steps[-1]}"
    )
