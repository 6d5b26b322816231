"""`atropos eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.options import (
    ROLLOUT_SECTIONS,
    EngineOption,
    EnvOption,
    ModelOption,
    SeedOption,
    SetOption,
    Uses,
    configure,
)

if TYPE_CHECKING:
    from atropos_core.launch.assemble import Plan
    from atropos_core.rollouts.evaluation import Evaluation


USES = Uses(
    "atropos eval",
    (
        *ROLLOUT_SECTIONS,
        *(
            f"evaluation.{name}"
            for name in ("problems", "samples", "pass_at", "temperature", "top_p", "top_k", "max_tokens")
        ),
        "training.rollout_deadline_s",
    ),
)


def add(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory: evaluate a checkpoint of it.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of which step. \\[default: the newest checkpoint]")] = None,
    env: EnvOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    problems: Annotated[int | None, typer.Option(help="Held-out problems. \\[default: as the run, 512]")] = None,
    samples: Annotated[int | None, typer.Option(help="Rollouts of each problem. \\[default: as the run, 1]")] = None,
    temperature: Annotated[float | None, typer.Option(help="\\[default: as the run, 0]")] = None,
    seed: SeedOption = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Figures go to FILE.json, and one line a problem with its replies to FILE.jsonl. "
            "\\[default: RUN/evaluations/; nothing where a model was named]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Evaluate a policy on held-out problems.

    [bold]Examples[/]

      atropos eval --env gsm8k --model tiny

      atropos eval runs/gsm8k-20260131-120000

      atropos eval runs/gsm8k-20260131-120000 --samples 8 --temperature 1 --set "evaluation.pass_at=[1,4,8]"
    """
    from atropos_core import console

    made = evaluated(
        run, step=step, env=env, model=model, engine=engine, problems=problems, samples=samples, temperature=temperature,
        seed=seed, changes=changes, out=out, quiet=as_json,
    )  # fmt: skip
    if as_json:
        files = {"figures": made.figures, "replies": made.replies}
        console.document({**made.record, "files": {name: str(file) for name, file in files.items() if file}})
        return
    rows = []
    for name, value in sorted(made.evaluation.metrics.items()):
        share = made.evaluation.shares.get(name)
        rows.append(
            (name.removeprefix("eval/"), f"{value:.4g}", f"{share.low:.4g} to {share.high:.4g}" if share else "")
        )
    console.table(("metric", "value", "95 % interval"), rows)
    console.say(f"{made.evaluation.tokens:,} tokens in {made.evaluation.seconds:.1f} s")
    if made.figures is not None and made.replies is not None:
        console.facts([("figures", str(made.figures)), ("replies", str(made.replies))])


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the files that it is in."""

    evaluation: Evaluation
    record: Mapping[str, Any]  # the figures, and all that they depend on
    figures: Path | None
    replies: Path | None


def evaluated(
    run: Path | None,
    *,
    step: int | None,
    env: Sequence[str] | None,
    model: str | None,
    engine: str | None,
    problems: int | None,
    samples: int | None,
    temperature: float | None,
    seed: int | None,
    changes: Sequence[str] | None,
    out: Path | None,
    quiet: bool = False,
) -> Evaluated:
    """What `atropos eval` does, but for its table. `quiet`: nothing on standard output. Raises AtroposError."""
    import asyncio
    import json
    import time

    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.launch.assemble import make_plan
    from atropos_core.rollouts.evaluation import written

    if step is not None and (run is None or model is not None):
        raise ConfigError("--step is of a run's checkpoint: name the run's directory, and no --model.")
    if run is not None and model is None:
        model, step = _policy(run, step)
        if not quiet:
            console.facts([("policy", model)])
        out = out or run / "evaluations" / f"step-{step:06d}-{time.strftime('%Y%m%d-%H%M%S')}"
    own = {"problems": problems, "samples": samples, "temperature": temperature}
    loaded, resolved, plugins = configure(
        run / "config.toml" if run else None, env=env, model=model, engine=engine, seed=seed,
        changes=changes, flags={f"evaluation.{name}": value for name, value in own.items()}, uses=USES,
    )  # fmt: skip
    if not loaded.config.evaluation.problems:
        raise ConfigError(
            "evaluation.problems is 0: there is nothing to evaluate.", remedy="Say how many: --problems 512"
        )
    plan = make_plan(loaded.config, resolved, plugins, training=False)
    evaluation = asyncio.run(_evaluate(plan))
    record = _figures(plan, step, evaluation)
    if out is None:
        return Evaluated(evaluation, record, None, None)
    stem = out.with_suffix("") if out.suffix in (".json", ".jsonl") else out
    figures, replies = Path(f"{stem}.json"), Path(f"{stem}.jsonl")
    written(figures, json.dumps(record, indent=1, default=str) + "\n")
    evaluation.write(replies)
    return Evaluated(evaluation, record, figures, replies)


def _policy(run: Path, step: int | None) -> tuple[str, int]:
    """Where the checkpoint's policy is, and of which step it is."""
    from atropos_core import console
    from atropos_core.errors import RunDirectoryError
    from atropos_core.storage.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    checkpoint = checkpoints.latest(console.warn) if step is None else checkpoints.at(step)
    if checkpoint is None:
        raise RunDirectoryError(f"{run} has no checkpoint to evaluate.")
    return str(checkpoint.policy), checkpoint.step


def _figures(plan: Plan, step: int | None, evaluation: Evaluation) -> dict[str, Any]:
    """All that the figures depend on, and the figures."""
    from dataclasses import asdict

    from atropos_core.config.run_file import dump

    config = plan.config
    first_engine = plan.engines[0]
    return {
        "model": str(plan.model.directory),
        "step": step,
        "seed": config.seed,
        "environment": {name: dump(one.component) | dump(one.options) for name, one in plan.named["environment"].items()},
        "engine": dump(first_engine.component) | dump(first_engine.options),
        "evaluation": dump(config.evaluation) | {"sampling": asdict(config.evaluation.sampling(config.sampling.record()))},
        "metrics": evaluation.metrics,
        "intervals": {name: [share.low, share.high] for name, share in evaluation.shares.items()},
        "tokens": evaluation.tokens,
        "seconds": round(evaluation.seconds, 3),
    }  # fmt: skip


async def _evaluate(plan: Plan) -> Evaluation:
    import asyncio

    from atropos_core import console
    from atropos_core.errors import Interrupted
    from atropos_core.launch.assemble import build_for_evaluation
    from atropos_core.launch.signals import blocked_loop_alarm, own_process, requests_to_end
    from atropos_core.rollouts.evaluation import evaluate
    from atropos_core.rollouts.runner import RolloutRunner
    from atropos_core.rollouts.tokenizer import ChatTokenizer
    from atropos_core.storage.tempdirs import owned_directory

    config, task = plan.config, asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    with requests_to_end(lambda: task.cancel()), owned_directory("eval") as directory:
        (directory / "logs").mkdir()
        parts = await build_for_evaluation(plan, directory)
        try:
            await asyncio.gather(
                parts.engine.open(),
                *(
                    console.waited(f"environment {name} to open", one.open())
                    for name, one in parts.environments.items()
                ),
            )
            runner = RolloutRunner(
                parts.environments,
                parts.rewards,
                parts.engine,
                ChatTokenizer(plan.model.directory),
                deadline_s=config.training.rollout_deadline_s,
                deterministic=config.deterministic,
            )
            sampling = config.sampling.record()
            with blocked_loop_alarm(), own_process():
                return await evaluate(runner, parts.environments, config.evaluation, sampling, seed=config.seed)
        except asyncio.CancelledError:
            raise Interrupted("stopped: an evaluation that is not whole has no figures") from None
        finally:
            await parts.close()
