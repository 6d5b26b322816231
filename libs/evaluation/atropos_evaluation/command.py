"""`atropos eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.completion import runs
from atropos_core.cli.options import EngineOption, EnvOption, ModelOption, RewardOption, SeedOption, SetOption


def add(app: typer.Typer) -> None:
    app.command("eval", rich_help_panel="Train")(eval_)


def eval_(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run directory: evaluate one of its checkpoints.", show_default=False, autocompletion=runs
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The step of the checkpoint. \\[default: the newest checkpoint]")
    ] = None,
    env: EnvOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    reward: RewardOption = None,
    model_url: Annotated[
        str | None,
        typer.Option(help="Evaluate a model behind this OpenAI-compatible chat URL, which ends in /v1."),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name at --model-url.")] = None,
    key_variable: Annotated[
        str | None, typer.Option(help="The environment variable that holds the key for --model-url.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent rollouts with --model-url. \\[default: 32]")
    ] = None,
    problems: Annotated[int | None, typer.Option(help="Held-out problems. \\[default: as the run, 512]")] = None,
    samples: Annotated[int | None, typer.Option(help="Rollouts of each problem. \\[default: as the run, 1]")] = None,
    temperature: Annotated[float | None, typer.Option(help="\\[default: as the run, 0]")] = None,
    seed: SeedOption = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write results to FILE.json, and one line per problem with its replies to FILE.jsonl; both must be new. "
            "\\[default: RUN/evaluations/; without RUN, none]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Evaluate a policy on held-out problems.

    [bold]Examples[/]

      atropos eval --env gsm8k --model tiny

      atropos eval runs/gsm8k-20260131-120000

      atropos eval --env gsm8k --model-url http://127.0.0.1:8000/v1 --model-name Qwen/Qwen3-4B

      atropos eval runs/gsm8k-20260131-120000 --samples 8 --temperature 1 --set "evaluation.pass_at=[1,4,8]"
    """
    from atropos_core import console
    from atropos_evaluation.evaluate import evaluate_policy

    result, record = evaluate_policy(
        run, step=step, env=env, model=model, engine=engine, reward=reward, model_url=model_url,
        model_name=model_name, key_variable=key_variable, concurrency=concurrency, problems=problems, samples=samples,
        temperature=temperature, seed=seed, changes=changes, out=out, quiet=as_json,
    )  # fmt: skip
    if as_json:
        files = {"figures": result.figures, "replies": result.replies}
        console.document({**record, "files": {name: str(file) for name, file in files.items() if file}})
        return
    rows = []
    for name, value in sorted(result.metrics.items()):
        share = result.intervals.get(name)
        rows.append(
            (name.removeprefix("eval/"), f"{value:.4g}", f"{share.low:.4g} to {share.high:.4g}" if share else "")
        )
    console.table(("metric", "value", "95 % interval"), rows)
    unknown = "the server does not say how many tokens"
    console.say(f"{unknown if result.tokens is None else f'{result.tokens:,} tokens'} in {result.seconds:.1f} s")
    if result.figures is not None and result.replies is not None:
        console.facts([("figures", str(result.figures)), ("replies", str(result.replies))])
