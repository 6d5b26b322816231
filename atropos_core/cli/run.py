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
    LauncherOption,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    StepsOption,
    TrainerOption,
    configure,
)

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_core.launch.plan import Plan
    from atropos_core.plugins.manager import Plugins


def add(app: typer.Typer) -> None:
    app.command("run", rich_help_panel="Train")(run)


def run(
    file: FileArgument = None,
    env: EnvOption = None,
    model: ModelOption = None,
    bridge: BridgeOption = None,
    engine: EngineOption = None,
    trainer: TrainerOption = None,
    launcher: LauncherOption = None,
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
            "--dry-run",
            help="Print the memory plan and count the tasks, or print the files for a scheduler; start no engine and no trainer. "
            "Ends with an error if it cannot fit, or if data are missing.",
        ),
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run: a finished run, or a file, from whose figures plugins print more about this run."
        ),
    ] = None,
) -> None:
    """Train a policy: start engine, trainer, bridge and environment, and watch it learn.

    [bold]Examples[/]

      atropos run --bridge ipc --env gsm8k

      atropos run --env ./mine.py:MyEnvironment --steps 50

      atropos run my-run.toml --set trainer.learning_rate=1e-6
    """
    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.launch.scheduler_files import render, say_files
    from atropos_core.launch.sizes import plan_run
    from atropos_core.storage.run_directory import RunDirectory

    loaded, resolved, plugins = configure(
        file, env=env, model=model, bridge=bridge, engine=engine, trainer=trainer, reward=reward, steps=steps, seed=seed,
        deterministic=deterministic, changes=changes, flags={"launcher.use": launcher},
    )  # fmt: skip
    plan = plan_run(loaded, resolved, plugins)
    name = "-".join(loaded.config.environment) or "train"
    if figures is not None and not dry_run:
        raise ConfigError("--figures has no effect without --dry-run.", remedy="Add --dry-run, or leave it out.")
    if dry_run:
        warn_of_broken(plugins)
        own = RunDirectory.for_new_run(directory, name)
        if own.path.is_dir():
            own.refuse_used()
        if (files := render(plan, own.path)) is None:
            own.refuse_unmakeable()
            _say_memory(plan, directory or Path("runs"))
        else:
            say_files(files)
        for said in plugins.manager.hook.atropos_dry_run(plan=plan, figures=figures):
            for line in said:
                console.say(line)
        return
    execute_new(plan, plugins, directory, name)


def warn_of_broken(plugins: Plugins) -> None:
    from atropos_core import console

    for broken in plugins.broken():
        console.warn(f"plugin {broken.name!r} does not load and is left out; `atropos plugins` says why.")


def execute_new(plan: Plan, plugins: Plugins, directory: Path | None, name: str) -> None:
    """Start a run in this directory, or in a new one named after `name` and the time. With a scheduler, write its files."""
    from atropos_core.launch.scheduler_files import hand_over, render
    from atropos_core.storage.run_directory import RunDirectory

    warn_of_broken(plugins)
    own = RunDirectory.for_new_run(directory, name)
    if (files := render(plan, own.path)) is not None:
        hand_over(files, own)
        return
    execute_and_report(plan, own.make())


def execute_and_report(plan: Plan, directory: Path, *, resume: bool = False) -> None:
    """Run, and print the result. If the run was interrupted, print how to continue it."""
    from atropos_core import console
    from atropos_core.cli.run_report import report
    from atropos_core.errors import Interrupted
    from atropos_core.launch.supervisor import execute
    from atropos_core.storage.run_directory import RunDirectory

    run = RunDirectory(directory)
    try:
        summary = execute(plan, directory, resume=resume)
    except Interrupted as error:
        console.say(f"{error}. Go on with: atropos resume {console.quoted(directory)}")
        raise typer.Exit(error.exit_code) from None
    except BaseException:
        if run.is_locked():  # by another process, which runs it
            raise
        if run.checkpoints.steps():
            console.say(
                f"what was saved is in {directory}; once the cause is gone: atropos resume {console.quoted(directory)}"
            )
        elif not resume and run.never_began():
            console.say(
                f"nothing was trained: {directory}/logs is of this attempt, and --dir {console.quoted(directory)} can be given again"
            )
        raise
    report(summary)


def _say_memory(plan: Plan, directory: Path) -> None:
    """Print what each part will hold and how many tasks there are. Raises FitError if the run does not fit, and DataError for
    missing data."""
    import asyncio

    from atropos_core import console
    from atropos_core.launch.banner import of_paths, of_warmup, paths
    from atropos_core.launch.builder import tasks_of
    from atropos_core.launch.memory_plan import plan_memory, table
    from atropos_core.launch.memory_remedies import check_memory
    from atropos_core.launch.model_checks import check_disk, check_model, say_long_prompts
    from atropos_core.launch.text_checks import warn_of_long_answers, warn_of_prompts
    from atropos_core.launch.warmup import with_warmup
    from atropos_core.plugins.model_provider import PROMPT_TOKENS
    from atropos_core.plugins.requirements import cuda_devices

    plan.check_files()
    check_model(plan, directory)
    counted, warmup = asyncio.run(with_warmup(plan))
    made = plan_memory(plan, directory)
    rows, totals = table(made)
    console.table(("component", "what", "device", "at most", ""), rows)
    console.facts([*totals, *of_paths(paths(plan, directory))])
    console.say(f"for prompts of at most {PROMPT_TOKENS} tokens; nothing was started")
    if not plan.config.oversubscribe:
        check_memory(plan, directory, made)
        check_disk(plan, directory)
    present = {f"cuda:{index}" for index in range(cuda_devices())}
    if absent := sorted({one for row in made.rows if (one := row.use.device).startswith("cuda:")} - present):
        console.warn(f"this machine has no {', '.join(absent)}: a run here would end as its processes start.")
    tokenizer = plan.tokenizer()

    def look(name: str, environment: Environment) -> None:
        say_long_prompts(plan, tokenizer, name, environment)
        warn_of_prompts(name, environment, tokenizer)
        warn_of_long_answers(name, environment, tokenizer, plan.config.sampling.max_tokens)

    if warmup is not None:
        console.say(f"warm start: {of_warmup(warmup)}")
        console.say(f"{counted.config.all_steps:,} steps in all, {counted.config.training.steps:,} of them by rewards")
    for name, sizes in asyncio.run(tasks_of(plan, directory, look)).items():
        held_out = f", {sizes['test']:,} held out" if "test" in sizes else ""
        console.say(f"environment {name}: {sizes['train']:,} tasks to train on{held_out}")
