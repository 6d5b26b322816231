"""`atropos skyrl-env`: a worker for SkyRL on its own machine, whose trajectories travel through shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.options import ModelOption, RewardOption, SetOption, Uses, retired

if TYPE_CHECKING:
    from atropos_adapter_skyrl.work_client import WorkClient
    from atropos_core.guards.patience import Patience
    from atropos_core.interfaces import Engine
    from atropos_core.launch.plan import Plan


USES = Uses("atropos skyrl-env", ("model", "environment", "reward", "training.rollout_deadline_s", "watch"))


def add(app: typer.Typer) -> None:
    app.command("skyrl-env", rich_help_panel="Connect")(skyrl_env)


def skyrl_env(
    name: Annotated[str, typer.Argument(help="The environment: a name, pkg.mod:Class or ./file.py:Class")],
    rings: Annotated[Path, typer.Option("--rings", help="SkyRL's folder atropos.rings.")],
    engine_url: Annotated[str, typer.Option(help="The engine to sample from: an `atropos engine`.")],
    token_file: Annotated[Path | None, typer.Option(help="A file with the engine's token.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Groups that run at once.")] = 16,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for SkyRL at the start.")] = 600.0,
    file: Annotated[
        Path | None, typer.Option("--file", help="A run file: options of the environment, rewards.")
    ] = None,
    model: ModelOption = None,
    reward: RewardOption = None,
    changes: SetOption = None,
    hands: Annotated[str | None, retired("--hands", "--concurrency")] = None,
) -> None:
    """Run an environment for SkyRL's trainer on this machine (atropos.source=rings). You can start any number of these workers.

    [bold]Example[/]

      atropos skyrl-env gsm8k --rings rings --engine-url http://127.0.0.1:8001 --model tiny
    """
    import asyncio

    from atropos_core import console
    from atropos_core.cli.options import configure
    from atropos_core.config.run_file import read_token
    from atropos_core.launch.plan import make_plan
    from atropos_trajectory_client.remote_engine import RemoteEngine

    loaded, resolved, plugins = configure(file, env=[name], model=model, reward=reward, changes=changes, uses=USES)
    plan = make_plan(loaded.config, resolved, plugins, training=False, sampling=False)
    token = read_token(token_file) if token_file else None
    engine = RemoteEngine(engine_url, token, patience=plan.config.watch.patience())
    sent = asyncio.run(_work(plan, rings, engine, concurrency, wait_s))
    console.say(f"SkyRL has ended; {sent} groups were sent")


async def _work(plan: Plan, rings: Path, engine: Engine, count: int, wait_s: float) -> int:
    """Raises Interrupted at the first SIGINT, SIGTERM or SIGHUP."""
    import asyncio
    import tempfile

    from atropos_core.errors import Interrupted
    from atropos_core.guards.blocked_loop import blocked_loop_alarm
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.storage.tempdirs import owned_prefix, sweep

    sweep("skyrl-env")  # files of killed workers
    made = tempfile.TemporaryDirectory(prefix=owned_prefix("skyrl-env"))
    try:
        with cancelled_by_signals(), blocked_loop_alarm(), own_process(), made as directory:
            return await _run(plan, Path(directory), rings, engine, count, wait_s)
    except asyncio.CancelledError:
        raise Interrupted("stopped: its groups go to another worker") from None


async def _run(plan: Plan, directory: Path, rings: Path, engine: Engine, count: int, wait_s: float) -> int:
    from atropos_adapter_skyrl.rings import work
    from atropos_core import console
    from atropos_core.launch.builder import build_for_evaluation
    from atropos_core.rollouts.runner import RolloutRunner

    (directory / "logs").mkdir()
    parts = await build_for_evaluation(plan, directory, engine)
    try:
        runner = RolloutRunner(
            parts.environments, parts.rewards, parts.engine, plan.tokenizer(),
            deadline_s=plan.config.training.rollout_deadline_s, deterministic=False,
        )  # fmt: skip
        client = await _connect(rings, count, wait_s, plan.config.watch.patience())
        console.say(
            f"runs rollouts of {', '.join(parts.environments)} for SkyRL, {count} groups at once; Ctrl-C ends it"
        )
        return await work(client, runner)
    finally:
        await parts.close()


async def _connect(rings: Path, count: int, wait_s: float, patience: Patience) -> WorkClient:
    """Raises ProcessDied or DeadlineExceeded if SkyRL does not come in time."""
    import asyncio

    from atropos_adapter_skyrl.work_client import WorkClient
    from atropos_core import console
    from atropos_core.errors import DeadlineExceeded, ProcessDied

    loop, announced = asyncio.get_running_loop(), False
    until = loop.time() + wait_s
    while True:
        try:
            return await WorkClient.open(rings, count, patience=patience)
        except (ProcessDied, DeadlineExceeded):
            if loop.time() > until:
                raise
        if not announced:
            announced = True
            console.say(f"waiting for SkyRL at {rings.resolve()} ({wait_s:g} s at most)")
        await asyncio.sleep(1.0)
