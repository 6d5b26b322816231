"""`atropos config`."""

from __future__ import annotations

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


def add(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at configurations.", no_args_is_help=True)
    group.command("show")(show)
    app.add_typer(group, name="config")


def show(
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
) -> None:
    """Print every value of a run and where it comes from, as `atropos run` with the same arguments would take it.

    [bold]Example[/]

      atropos config show --env gsm8k --set training.steps=50
    """
    from atropos_core import console
    from atropos_core.config.run_file import flatten
    from atropos_core.launch.assemble import make_plan

    loaded, resolved, plugins = configure(
        file,
        env=env,
        model=model,
        bridge=bridge,
        engine=engine,
        trainer=trainer,
        reward=reward,
        steps=steps,
        seed=seed,
        deterministic=deterministic,
        changes=changes,
    )
    plan = make_plan(loaded.config, resolved, plugins)
    rows = [(path, value, loaded.origins.get(path, "default")) for path, value in flatten(plan.resolved())]
    console.table(("path", "value", "from"), rows)
