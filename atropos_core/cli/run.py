"""`atropos run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.options import (
    BridgeOption,
    DeterministicOption,
    EngineOption,
    EnvOption,
    FileArgument,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    StepsOption,
    TrainerOption,
    configure,
)

if TYPE_CHECKING:
    from atropos_core.assemble import Plan
    from atropos_core.run import Summary


def add(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    file: FileArgument = None,
    env: EnvOption = None,
    model: ModelOption = None,
    bridge: BridgeOption = None,
    engine: EngineOption = None,
    trainer: TrainerOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    deterministic: DeterministicOption = False,
    changes: SetOption = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run's own directory, new or empty. \\[default: runs/ENV-TIME]")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the memory plan, and start nothing. Ends with an error if it cannot fit."
        ),
    ] = False,
) -> None:
    """Train a policy: start engine, trainer, bridge and environment, and watch it learn.

    [bold]Examples[/]

      atropos run --bridge ipc --env gsm8k

      atropos run --env ./mine.py:MyEnvironment --steps 50

      atropos run my-run.toml --set trainer.learning_rate=1e-6
    """
    from atropos_core import console
    from atropos_core.assemble import make_plan
    from atropos_core.errors import Interrupted
    from atropos_core.run import execute, make_directory, new_directory, refuse_used

    loaded, resolved, plugins = configure(
        file, env=env, model=model, bridge=bridge, engine=engine, trainer=trainer, reward=reward, steps=steps, seed=seed,
        deterministic=deterministic, changes=changes,
    )  # fmt: skip
    plan = make_plan(loaded.config, resolved, plugins)
    for broken in plugins.broken():
        console.warn(f"plugin {broken.name!r} does not load and is left out; `atropos plugins` says why.")
    if dry_run:
        if directory is not None:
            refuse_used(directory)
        _say_memory(plan, directory or Path("runs"))
        return
    directory = make_directory(directory) if directory else new_directory("-".join(loaded.config.environment))
    try:
        summary = execute(plan, directory)
    except Interrupted as error:
        say_resume(directory, error)
        raise typer.Exit(error.exit_code) from None
    except BaseException:
        offer_resume(directory)
        raise
    close(summary)


def _say_memory(plan: Plan, directory: Path) -> None:
    """What each part will hold. Raises FitError where it cannot."""
    from atropos_core import console
    from atropos_core.memory import PROMPT_TOKENS, plan_memory, table

    made = plan_memory(plan, directory)
    rows, totals = table(made)
    console.table(("component", "what", "device", "at most", ""), rows)
    console.facts(totals)
    console.say(f"for prompts of at most {PROMPT_TOKENS} tokens; nothing was started")
    made.check()


def close(summary: Summary) -> None:
    """What a finished run says: accuracy before and after, where the time went, where things lie."""
    from atropos_core import console

    console.say()
    before, after = summary.before.get("eval/accuracy"), summary.after.get("eval/accuracy")
    if before is not None and after is not None:
        problems = summary.after["eval/problems"]
        console.say(
            f"held-out accuracy {before:.1%} -> {after:.1%} ({100 * (after - before):+.1f} points, {problems:.0f} problems)"
        )
        kinds = ("eval/accuracy_", "eval/pass@")
        for name in (name for name in summary.after if name.startswith(kinds) and name in summary.before):
            shown = name.removeprefix("eval/").removeprefix("accuracy_")
            console.say(f"  {shown}: {summary.before[name]:.1%} -> {summary.after[name]:.1%}")
    console.say(f"where the time went, {sum(summary.seconds.values()):.0f} s in all:")
    console.times_table(summary.times)
    spent, steps = summary.seconds, max(summary.steps, 1)
    once = sum(spent.get(name, 0.0) for name in ("start-up", "evaluation", "checkpoint"))
    step_s = (sum(spent.values()) - once) / steps
    console.facts(
        [
            (
                "a step",
                f"{step_s:.2f} s on average, {spent.get('waiting', 0.0) / steps:.2f} s of it waiting for rollouts",
            ),
            ("idle", ", ".join(f"{role} {share:.0%}" for role, share in summary.idle.items()) + " of the time"),
            ("weights", _published(summary)),
            ("memory", f"{summary.peak_bytes / 1e9:.2f} GB at most, over all processes"),
            ("on disk", f"{summary.checkpoint_bytes / 1e6:.1f} MB a checkpoint"),
        ]
    )
    directory = summary.directory
    console.facts(
        [
            ("policy", f"{directory}/checkpoints/step-{summary.steps:06d}/policy"),
            ("metrics", f"{directory}/metrics.jsonl"),
            ("rollouts", f"{directory}/rollouts/"),
        ]
    )


def _published(summary: Summary) -> str:
    mean_ms = 1000 * summary.sync_s / max(summary.syncs, 1)
    disk = f", {summary.published_bytes / 1e6:.1f} MB on disk each" if summary.published_bytes else ""
    return f"published {summary.syncs} times, {summary.sync_s:.2f} s in all, {mean_ms:.1f} ms each{disk}"


def say_resume(directory: Path, error: Exception) -> None:
    from atropos_core import console

    console.say(f"{error}. Go on with: atropos resume {directory}")


def offer_resume(directory: Path) -> None:
    """After a failure: whether there is something to go on with."""
    from atropos_core import console

    if any((directory / "checkpoints").glob("step-*")):
        console.say(f"what was saved is in {directory}; once the cause is gone: atropos resume {directory}")
