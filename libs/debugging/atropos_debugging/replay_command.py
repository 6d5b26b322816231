"""`atropos replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components, runs
from atropos_core.cli.options import SetOption, Uses

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan
    from atropos_debugging.replaying import Changes, Replayed
    from atropos_records.rollout_records import RolloutRecords

USES = Uses("atropos replay", ("trainer", "reward", "transform", "seed"))
RESAMPLING = Uses("atropos replay --resample", (*USES.paths, "sampling", "engine", "training.group_size"))
ROLLOUTS_SHOWN, TOKENS_SHOWN = 10, 10


def add(app: typer.Typer) -> None:
    app.command("replay", rich_help_panel="Look")(replay)


def replay(
    run: Annotated[
        Path, typer.Argument(help="A run directory with checkpoints.", show_default=False, autocompletion=runs)
    ],
    step: Annotated[int, typer.Option(help="The step to train again.", min=1, show_default=False)],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            help="Score the step's rollouts with this reward instead of the run's; may be repeated. A name that the run has "
            "keeps its options.",
            autocompletion=components("reward"),
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="Train with this loss: a name, pkg.mod:name or ./file.py:name.", autocompletion=components("loss")
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the trainer's random numbers: minibatches, dropout.", min=0)
    ] = None,
    resample: Annotated[
        bool,
        typer.Option("--resample", help="Sample the step's tasks again, with the policy that the step began with."),
    ] = False,
    changes: SetOption = None,
    save: Annotated[
        str | None,
        typer.Option(help="Keep the logprobs in the run directory under this name, so that `atropos view` shows them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Train a recorded step again, from the checkpoint before it. With nothing changed, the weights must be those of the run. With a
    change, compare both updates: gradient norms, advantages, and which tokens move.

    [bold]Examples[/]

      atropos replay runs/gsm8k-20260131-120000 --step 40

      atropos replay runs/gsm8k-20260131-120000 --step 40 --loss dapo

      atropos replay runs/gsm8k-20260131-120000 --step 40 --reward ./rewards.py:strict --save strict

      atropos replay runs/gsm8k-20260131-120000 --step 40 --set trainer.learning_rate=1e-6

      atropos replay runs/gsm8k-20260131-120000 --step 40 --resample --seed 2
    """
    import asyncio
    import sys
    from contextlib import nullcontext, redirect_stdout

    from atropos_core import console
    from atropos_core.config.run_file import parse_flag
    from atropos_core.plugins.manager import load_plugins
    from atropos_debugging.questioned_plan import changed_config, scoring_plan, trainer_plan
    from atropos_debugging.replaying import Changes, checkpoint_before, document
    from atropos_debugging.resampling import resampling_plan
    from atropos_records.rollout_records import RolloutRecords
    from atropos_records.saved_results import result_path, write_result

    records = RolloutRecords(run)
    saved = None if save is None else result_path(run, "replayed", save)
    flags: dict[str, Any] = {"trainer.loss": loss, "seed": seed}
    given = {path: value for path, value in flags.items() if value is not None}
    changed_values = [parse_flag(change) for change in changes or []]
    paths = [path for path, _ in changed_values]
    made = Changes(
        rewards=bool(reward) or any(path.startswith("reward.") for path in paths),
        transforms=any(path.startswith("transform.") for path in paths),
        trainer=bool(given) or any(path == "seed" or path.startswith("trainer.") for path in paths),
        rollouts=resample,
    )
    uses = RESAMPLING if resample else USES
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what a reward prints is not part of the document
        plugins = load_plugins()
        before = changed_config(run, plugins, uses, [], None, [])
        after = changed_config(run, plugins, uses, reward or [], None, changes or [], given)
        plan = trainer_plan(before, plugins)
        changed = trainer_plan(after, plugins) if made else plan
        scoring = scoring_plan(after, plugins, environments=False)
        sampling = None
        if resample:
            sampling = resampling_plan(after, plugins, checkpoint_before(records, step, before.warmup_steps))
        found = asyncio.run(_replay(records, step, plan, changed, scoring, made, sampling))
        if saved is not None:
            about = {
                "step": step,
                "ids": found.ids,
                "reward": reward or [],
                "set": {**given, **dict(changed_values)},
                "resample": resample,
            }
            write_result(saved, about, found.logprobs)
    if as_json:
        console.document({"run": str(run), **document(found), "saved": str(saved) if saved else None})
        return
    _show(found)
    if saved is not None:
        console.facts([("saved", f"{saved}, which `atropos view {run}` shows")])


async def _replay(
    records: RolloutRecords,
    step: int,
    plan: Plan,
    changed: Plan,
    scoring: Plan,
    changes: Changes,
    sampling: Plan | None,
) -> Replayed:
    import asyncio

    from atropos_core.errors import Interrupted
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.storage.tempdirs import owned_directory
    from atropos_debugging.replaying import replay

    try:
        with cancelled_by_signals(), owned_directory("replay") as scratch, own_process():
            return await replay(records, step, plan, changed, scoring, changes, scratch, sampling)
    except asyncio.CancelledError:
        raise Interrupted("stopped: nothing was replayed") from None


def _show(found: Replayed) -> None:
    from atropos_core import console

    said = {True: "the same, bit for bit", False: "NOT the same", None: "not recorded"}
    console.facts(
        [
            ("step", f"{found.step}, from the weights of version {found.version}"),
            ("weights", said[found.same_weights]),
            ("metrics", said[found.same_metrics]),
        ]
    )
    for note in found.notes:
        console.note("note", note)
    console.say()
    columns, now = ["", "run", "replayed"], found.changed_metrics
    names = [name for name in found.metrics if "/" not in name]
    rows = [[name, _text(found.recorded_metrics.get(name)), _text(found.metrics[name])] for name in names]
    if found.gradient_norm is not None:
        rows.append(["norm of the gradient", "", _text(found.gradient_norm)])
    rows.append(["norm of the update", "", _text(found.update_norm)])
    if now is not None:
        columns.append("changed")
        gradient = [] if found.gradient_norm is None else [_text(found.changed_gradient_norm)]
        values = [*(_text(now.get(name)) for name in names), *gradient, _text(found.changed_update_norm)]
        rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
    console.table(columns, rows)
    if now is not None:
        if found.gradient_cosine is not None and found.changed_gradient_norm is not None:
            ratio = found.changed_gradient_norm / found.gradient_norm if found.gradient_norm else None
            console.say(
                f"cosine of the two gradients: {_text(found.gradient_cosine)}, ratio of their norms: {_text(ratio)}"
            )
        console.say(f"cosine of the two updates: {_text(found.update_cosine)}")
    console.say()
    most = sorted(found.rollouts, key=lambda one: -abs(one.moved_now - (one.moved if now is not None else 0)))
    console.table(
        ("rollout", "reward", "now", "advantage", "now", "nats a token", "now"),
        [
            (f"{one.member} of task {one.task}", *map(_text, (one.reward, one.reward_now, one.advantage, one.advantage_now,
                                                              one.moved, one.moved_now)))
            for one in most[:ROLLOUTS_SHOWN]
        ],
    )  # fmt: skip
    console.say()
    console.table(
        ("token", "in rollout", "position", "logprob before", "after", "changed"),
        [
            (repr(one.text), f"{one.member} of task {one.task}", one.position, *map(_text, (one.before, one.recorded, one.changed)))
            for one in found.tokens[:TOKENS_SHOWN]
        ],
    )  # fmt: skip


def _text(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"
