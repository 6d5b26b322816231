"""`atropos train`, `atropos env`, `atropos engine`: the roles of a run that is spread over processes or machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.options import (
    BridgeOption,
    EngineOption,
    EnvOption,
    FileArgument,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    StepsOption,
    TrainerOption,
    Uses,
)

ApiOption = Annotated[str, typer.Option("--api", help="The server: http://HOST:8000", show_default=False)]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="A file that holds the server's token.", show_default=False)
]


WAIT_S = 600.0  # how long a worker waits for a trainer
WORKER = Uses("atropos env", ("model", "date", "environment", "reward", "training.rollout_deadline_s", "watch"))
ENGINE = Uses("atropos engine", ("model", "seed", "deterministic", "engine", "bridge", "trainer", "watch"))


def add(app: typer.Typer) -> None:
    app.command("train", rich_help_panel="Connect")(train)
    app.command("env", rich_help_panel="Connect")(env)
    app.command("engine", rich_help_panel="Connect")(engine)


def train(
    file: FileArgument = None,
    api: Annotated[
        str | None, typer.Option("--api", help="The server. \\[default: url of the run file's section api]")
    ] = None,
    token_file: TokenOption = None,
    engine_address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where workers reach this run's engines. \\[default: this machine, any free port]"),
    ] = None,
    env: EnvOption = None,
    model: ModelOption = None,
    bridge: BridgeOption = None,
    engine: EngineOption = None,
    trainer: TrainerOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    changes: SetOption = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run's own directory, new or empty. \\[default: runs/train-TIME]")
    ] = None,
) -> None:
    """Train on groups that workers of a trajectory API sample: `atropos run` without its environments.

    [bold]Examples[/]

      atropos train --api http://127.0.0.1:8000

      atropos train --api http://10.0.0.5:8000 --token-file token --engine-address 10.0.0.6:8001 --env gsm8k
    """
    from atropos_core.cli.options import configure
    from atropos_core.cli.run import execute_new
    from atropos_core.errors import ConfigError
    from atropos_core.launch.sizes import plan_run

    given = {"api.url": api, "api.token_file": token_file and str(token_file), "api.engine_address": engine_address}
    loaded, resolved, plugins = configure(
        file, env=env, model=model, bridge=bridge, engine=engine, trainer=trainer, reward=reward, steps=steps, seed=seed,
        changes=changes, flags=given,
    )  # fmt: skip
    if loaded.config.api is None:
        raise ConfigError(
            "`atropos train` needs the server whose groups it trains on.",
            remedy="Give --api URL, or use `atropos run`, which runs the environments too.",
        )
    plan = plan_run(loaded, resolved, plugins)
    execute_new(plan, plugins, directory, "train")


def env(
    name: Annotated[str, typer.Argument(help="The environment: a name, pkg.mod:Class or ./file.py:Class")],
    api: ApiOption,
    token_file: TokenOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks to run at once.")] = 16,
    file: Annotated[
        Path | None, typer.Option("--file", help="A run file: options of the environment, rewards.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The policy's model, for its tokenizer. \\[default: what the trainer named]")
    ] = None,
    reward: RewardOption = None,
    weight: Annotated[
        float, typer.Option(min=1e-6, help="Its share of the batches, relative to other environments.")
    ] = 1.0,
    minimum: Annotated[float, typer.Option(min=0.0, max=1.0, help="Its smallest share of each batch.")] = 0.0,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds at the end to finish what is running.")] = 60.0,
    wait_s: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds to wait at the start for a trainer that names the model. \\[default: 600]"),
    ] = None,
    changes: SetOption = None,
) -> None:
    """Run an environment for the trainer of a trajectory API, as one of any number of workers.

    [bold]Examples[/]

      atropos env gsm8k --api http://127.0.0.1:8000

      atropos env ./mine.py:Mine --api http://10.0.0.5:8000 --token-file token --concurrency 64
    """
    import asyncio

    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_trajectory_api.roles.environment_worker import WorkerOptions

    if model is not None and wait_s is not None:
        raise ConfigError(
            "--wait-s has no effect with --model: a trainer is awaited for the model that it names.",
            remedy="Leave one of them out.",
        )

    async def main() -> int:
        from atropos_core.cli.options import configure
        from atropos_core.config.run_file import read_token
        from atropos_core.launch.plan import make_plan
        from atropos_core.plugins.manager import load_plugins
        from atropos_trajectory_api.roles.environment_worker import await_policy, draining_signals, work
        from atropos_trajectory_client.client import Api

        if file is None:  # before waiting for a trainer: an unknown name is reported at once
            load_plugins().registry.find("environment", name)
        token, stop = None if token_file is None else read_token(token_file), asyncio.Event()
        server = Api(api, token)
        try:
            with draining_signals(stop):
                wait = WAIT_S if wait_s is None else wait_s
                policy = {"model": model} if model else await await_policy(server, wait, stop)
                if policy is None:
                    return 0
                dated = any(change.startswith("date=") for change in changes or ())
                loaded, resolved, plugins = configure(
                    file,
                    env=[name],
                    model=str(policy["model"]),
                    reward=reward,
                    changes=changes,
                    uses=WORKER,
                    flags={} if dated else {"date": policy.get("date") or None},
                )
                server.patience = loaded.config.watch.patience()
                plan = make_plan(loaded.config, resolved, plugins, training=False, sampling=False)
                [environment] = loaded.config.environment
                options = WorkerOptions(environment, concurrency, weight, minimum, drain_s)
                return await work(plan, server, token, options, stop)
        finally:
            await server.close()

    try:
        console.say(f"{asyncio.run(main())} groups sent")
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.say("ended at once: other workers get what was running")
        raise typer.Exit(130) from None


def engine(
    file: FileArgument = None,
    host: Annotated[str, typer.Option(help="The address by which others reach this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8001,
    token_file: TokenOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    bridge: Annotated[
        str | None,
        typer.Option(help="The run's: checkpoint, delta, or lora with the run's \\[trainer]. \\[default: checkpoint]"),
    ] = None,
    trainer: TrainerOption = None,
    changes: SetOption = None,
) -> None:
    """Serve one engine to a trainer on another machine, whose run file says: engine.use = "remote", engine.url = URL.

    [bold]Examples[/]

      atropos engine --model tiny --port 8001

      atropos run --env gsm8k --engine remote --set engine.url=http://127.0.0.1:8001 --bridge checkpoint

      atropos engine --model tiny --engine vllm --bridge lora --set trainer.lora.rank=8
    """
    import asyncio

    from atropos_core import console
    from atropos_core.cli.options import configure
    from atropos_core.config.run_file import FLAG, read_token
    from atropos_core.errors import ConfigError
    from atropos_core.launch.plan import make_plan
    from atropos_trajectory_api.roles.engine import bridge_code, sent_weights, serve_engine

    if token_file is not None:
        read_token(token_file)  # so that its errors are reported before a model is loaded
    loaded, resolved, plugins = configure(
        file, model=model, engine=engine, bridge=bridge, trainer=trainer, changes=changes, uses=ENGINE
    )
    plan = make_plan(loaded.config, resolved, plugins, training=False, rollouts=False)
    by_bridge = loaded.origins.get("bridge.use") in (FLAG, str(file))  # not a default, nor a model's preset
    plan = sent_weights(plan, plugins, by_bridge=by_bridge)
    agent = bridge_code(plan, plugins) if by_bridge else ""
    of_trainer = [path for path, origin in loaded.origins.items() if path.startswith("trainer.") and origin == FLAG]
    if of_trainer and "trainer" not in plan.single:
        raise ConfigError(
            f"{of_trainer[0]} has no effect: the engine is sent whole models, and needs the trainer's options only for adapters.",
            remedy="Leave it out, or use --bridge lora.",
        )
    try:
        asyncio.run(serve_engine(plan, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", token_file, agent))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.say("ended at once")
        raise typer.Exit(130) from None
