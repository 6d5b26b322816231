"""`atropos eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.options import EngineOption, EnvOption, ModelOption, SeedOption, SetOption, configure

if TYPE_CHECKING:
    from atropos_core.assemble import Plan
    from atropos_core.evaluation import Evaluation


def add(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory: evaluate its newest checkpoint.", show_default=False)
    ] = None,
    env: EnvOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    problems: Annotated[int | None, typer.Option(help="Held-out problems. [default: as the run, 512]")] = None,
    seed: SeedOption = None,
    changes: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write one JSON line a problem into this file.")] = None,
) -> None:
    """Evaluate a policy on held-out problems.

    [bold]Examples[/]

      atropos eval --env gsm8k --model tiny

      atropos eval runs/gsm8k-20260131-120000
    """
    import asyncio

    from atropos_core import console
    from atropos_core.assemble import make_plan
    from atropos_core.checkpoint import Checkpoints
    from atropos_core.errors import RunDirectoryError

    if run is not None and model is None:
        checkpoint = Checkpoints(run / "checkpoints").latest(console.warn)
        if checkpoint is None:
            raise RunDirectoryError(f"{run} has no checkpoint to evaluate.")
        model = str(checkpoint.policy)
        console.facts([("policy", model)])
    changes = [*(changes or []), *([f"evaluation.problems={problems}"] if problems is not None else [])]
    loaded, resolved, plugins = configure(
        run / "config.toml" if run else None, env=env, model=model, engine=engine, seed=seed, changes=changes
    )
    plan = make_plan(loaded.config, resolved, plugins, training=False)
    evaluation = asyncio.run(_evaluate(plan))
    rows = [(name.removeprefix("eval/"), f"{value:.4g}") for name, value in sorted(evaluation.metrics.items())]
    console.table(("metric", "value"), rows)
    console.say(f"{evaluation.tokens:,} tokens in {evaluation.seconds:.1f} s")
    if out is not None:
        evaluation.write(out)
        console.say(f"per problem: {out}")


async def _evaluate(plan: Plan) -> Evaluation:
    import asyncio
    import tempfile

    from atropos_core.assemble import build_for_evaluation
    from atropos_core.evaluation import evaluate, greedy
    from atropos_core.rollouts import Player
    from atropos_core.tokenizer import ChatTokenizer

    config = plan.config
    with tempfile.TemporaryDirectory(prefix="atropos-eval-") as directory:
        (Path(directory) / "logs").mkdir()
        parts = await build_for_evaluation(plan, Path(directory))
        try:
            await asyncio.gather(
                parts.engine.open(), *(environment.open() for environment in parts.environments.values())
            )
            player = Player(
                parts.environments,
                parts.rewards,
                parts.engine,
                ChatTokenizer(plan.model.directory),
                deadline_s=config.training.rollout_deadline_s,
                deterministic=config.deterministic,
            )
            sampling = greedy(config.sampling.record(), config.evaluation.temperature)
            return await evaluate(player, parts.environments, config.evaluation.problems, sampling, seed=config.seed)
        finally:
            await parts.close()
