"""`atropos config`."""

from __future__ import annotations

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
    from atropos_core.launch.plan import Plan


def add(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at configurations.", no_args_is_help=True)
    group.command("show")(show)
    group.command("schema")(schema)
    app.add_typer(group, name="config", rich_help_panel="Build")


def show(
    file: FileArgument = None,
    env: EnvOption = None,
    model: ModelOption = None,
    bridge: BridgeOption = None,
    launcher: LauncherOption = None,
    engine: EngineOption = None,
    trainer: TrainerOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    deterministic: DeterministicOption = False,
    changes: SetOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain each value.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Print every value of a run and its origin, as `atropos run` with the same arguments would use it.

    [bold]Example[/]

      atropos config show --env gsm8k --set training.steps=50
    """
    from atropos_core import console
    from atropos_core.config.run_file import flatten
    from atropos_core.launch.sizes import plan_run

    loaded, resolved, plugins = configure(
        file,
        env=env,
        model=model,
        bridge=bridge,
        flags={"launcher.use": launcher},
        engine=engine,
        trainer=trainer,
        reward=reward,
        steps=steps,
        seed=seed,
        deterministic=deterministic,
        changes=changes,
    )
    plan = plan_run(loaded, resolved, plugins)
    rows = [
        {
            "path": path,
            "value": value,
            "from": "plan" if path in plan.sizes.changed else loaded.origins.get(path, "default"),
        }
        | ({"meaning": _meaning(plan, path)} if explain else {})
        for path, value in flatten(plan.resolved())
    ]
    if as_json:
        console.document(rows)
    else:
        console.table(list(rows[0]), [list(row.values()) for row in rows])
        console.facts(plan.notes())


def _meaning(plan: Plan, path: str) -> str:
    from atropos_core.config.option_descriptions import meaning_at
    from atropos_core.config.run_file import RunConfig

    components = [
        *plan.engines[:1],
        *plan.single.values(),
        *(one for named in plan.named.values() for one in named.values()),
    ]
    return meaning_at(RunConfig, path.split("."), {one.label: type(one.options) for one in components})


def schema() -> None:
    """Print a JSON Schema of run files (draft 2020-12), for editors: with the options of every component that is installed.

    [bold]Example[/]

      atropos config schema > run-file.schema.json
    """
    from atropos_config.schema import run_file_schema
    from atropos_core import console
    from atropos_core.plugins.manager import load_plugins

    console.document(run_file_schema(load_plugins().registry))
