"""`atropos serve-agent`: `atropos run` whose episodes are taken by programs that the user starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.options import EnvOption, FileArgument, ModelOption, SeedOption, SetOption, StepsOption

AGENT = "agent"


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-agent", rich_help_panel="Connect")(serve_agent)


def serve_agent(
    file: FileArgument = None,
    env: EnvOption = None,
    model: ModelOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    host: Annotated[
        str | None, typer.Option(help="Address for episodes. \\[default: as in the run file, 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0: any free port. \\[default: as in the run file, 8010]")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with a token, readable only by you. \\[default: one is made in the run's directory]"),
    ] = None,
    changes: SetOption = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run's own directory, new or empty. \\[default: runs/ENV-TIME]")
    ] = None,
) -> None:
    """Train on episodes of programs that you start yourself: they ask for one over HTTP, call the model, and report its end.

    The same as `atropos run` with `sandbox = "external"` in each environment of kind agent.

    [bold]Examples[/]

      atropos serve-agent run.toml

      atropos serve-agent --set environment.agent.tasks_from=gsm8k --host 0.0.0.0 --token-file token
    """
    from atropos_core.cli.options import configure
    from atropos_core.cli.run import execute_new
    from atropos_core.launch.sizes import plan_run

    names = agents_of(file, env)
    given = {"use": "external", "host": host, "port": port, "token_file": token_file and str(token_file)}
    flags = {
        f"environment.{name}.sandbox.{option}": value
        for name in names
        for option, value in given.items()
        if value is not None
    }
    loaded, resolved, plugins = configure(
        file, env=env or (names if file is None else None), model=model, steps=steps, seed=seed, changes=changes, flags=flags
    )  # fmt: skip
    plan = plan_run(loaded, resolved, plugins)
    execute_new(plan, plugins, directory, "-".join(loaded.config.environment))


def agents_of(file: Path | None, env: list[str] | None) -> list[str]:
    """The environments of the run file, or of --env, that are of kind agent. Raises ConfigError if there are none."""
    from atropos_core.cli.options import read_run_file
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins

    tables = read_run_file(file, load_plugins()).values.get("environment", {}) if file is not None else {}
    names = list(tables) if file is not None and not env else env or [AGENT]
    kinds = {name: table.get("use", name) if isinstance(table, dict) else name for name, table in tables.items()}
    if not (agents := [name for name in names if kinds.get(name, name) == AGENT]):
        raise ConfigError(
            f"none of {', '.join(names) or 'no environment'} is of kind agent, whose episodes can be taken.",
            remedy='Name one: [environment.NAME] use = "agent", with tasks and a reward.',
        )
    return agents
