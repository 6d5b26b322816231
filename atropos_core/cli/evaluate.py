"""`atropos eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import runs
from atropos_core.cli.options import (
    ROLLOUT_SECTIONS,
    EngineOption,
    EnvOption,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    Uses,
    configure,
)

if TYPE_CHECKING:
    from atropos_core.errors import RunDirectoryError
    from atropos_core.launch.plan import Plan
    from atropos_core.rollouts.chat_model import ChatModel
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


ELSEWHERE = Uses(  # with --model-url
    "atropos eval --model-url", tuple(path for path in USES.paths if path not in ("model", "engine"))
)


def add(app: typer.Typer) -> None:
    app.command("eval", rich_help_panel="Train")(evaluate)


def evaluate(
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

    made = evaluated(
        run, step=step, env=env, model=model, engine=engine, reward=reward, model_url=model_url,
        model_name=model_name, key_variable=key_variable, concurrency=concurrency, problems=problems, samples=samples,
        temperature=temperature, seed=seed, changes=changes, out=out, quiet=as_json,
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
    tokens = made.record["tokens"]
    counted = "the server does not say how many tokens" if tokens is None else f"{tokens:,} tokens"
    console.say(f"{counted} in {made.evaluation.seconds:.1f} s")
    if made.figures is not None and made.replies is not None:
        console.facts([("figures", str(made.figures)), ("replies", str(made.replies))])


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and the files that it was written to."""

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
    reward: Sequence[str] | None,
    model_url: str | None = None,
    model_name: str | None = None,
    key_variable: str | None = None,
    concurrency: int | None = None,
    problems: int | None,
    samples: int | None,
    temperature: float | None,
    seed: int | None,
    changes: Sequence[str] | None,
    out: Path | None,
    quiet: bool = False,
) -> Evaluated:
    """Run an evaluation as `atropos eval` does, without printing its table. `quiet`: print nothing on standard output. Raises
    AtroposError."""
    import asyncio
    import json
    import time

    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.launch.plan import make_plan
    from atropos_core.rollouts.evaluation import written
    from atropos_core.storage.atomic import refuse_existing

    if step is not None and (run is None or model is not None):
        raise ConfigError("--step is of a run's checkpoint: name the run's directory, and no --model.")
    files = None if out is None else _files(out)
    if files is not None:
        refuse_existing(*files)
    elsewhere = _elsewhere(model_url, model_name, key_variable, concurrency, model=model, engine=engine, step=step)
    if run is not None and model is None and elsewhere is None:
        model, step = _policy(run, step)
        if not quiet:
            console.facts([("policy", model)])
        files = files or _files(run / "evaluations" / f"step-{step:06d}-{time.strftime('%Y%m%d-%H%M%S')}")
    own = {"problems": problems, "samples": samples, "temperature": temperature}
    loaded, resolved, plugins = configure(
        saved=run, env=env, model=model, engine=engine, reward=reward, seed=seed,
        changes=changes, flags={f"evaluation.{name}": value for name, value in own.items()}, uses=ELSEWHERE if elsewhere else USES,
        preset=elsewhere is None,
    )  # fmt: skip
    if not loaded.config.evaluation.problems:
        raise ConfigError(
            "evaluation.problems is 0: there is nothing to evaluate.", remedy="Say how many: --problems 512"
        )
    plan = make_plan(loaded.config, resolved, plugins, training=False, sampling=elsewhere is None)
    if elsewhere is not None:
        _refuse_unfit(plan, elsewhere)
        if not quiet:
            console.facts([("model", f"{elsewhere.name} at {elsewhere.url}"), ("not had", NOT_HAD)])
    evaluation = asyncio.run(_evaluate(plan, elsewhere, concurrency or CONCURRENCY))
    record = _figures(plan, step, evaluation, elsewhere)
    if files is None:
        return Evaluated(evaluation, record, None, None)
    figures, replies = files
    written(figures, json.dumps(record, indent=1, default=str) + "\n")
    evaluation.write(replies)
    return Evaluated(evaluation, record, figures, replies)


def _files(out: Path) -> tuple[Path, Path]:
    """Return the files for figures and for replies."""
    stem = out.with_suffix("") if out.suffix in (".json", ".jsonl") else out
    return Path(f"{stem}.json"), Path(f"{stem}.jsonl")


CONCURRENCY = 32
NOT_HAD = "token ids and logprobs: environments see numbers of no meaning, and zeros"


def _elsewhere(
    url: str | None,
    name: str | None,
    key_variable: str | None,
    concurrency: int | None,
    *,
    model: str | None,
    engine: str | None,
    step: int | None,
) -> ChatModel | None:
    """Return the model behind --model-url, or None without that flag. Raises ConfigError for flags that contradict each other."""
    from atropos_core.errors import ConfigError

    beside = {"--model-name": name, "--key-variable": key_variable, "--concurrency": concurrency}
    if url is None:
        if idle := [flag for flag, value in beside.items() if value is not None]:
            raise ConfigError(f"{idle[0]} has no effect without --model-url.")
        return None
    if idle := [
        flag for flag, value in {"--model": model, "--engine": engine, "--step": step}.items() if value is not None
    ]:
        raise ConfigError(f"{idle[0]} has no effect with --model-url: the model is elsewhere.")
    if name is None:
        raise ConfigError("--model-url wants the model's name there.", remedy="--model-name NAME")
    from atropos_core.rollouts.chat_model import ChatModel

    return ChatModel(url, name, key_variable=key_variable, concurrency=concurrency or CONCURRENCY)


def _refuse_unfit(plan: Plan, elsewhere: ChatModel) -> None:
    """Raises ConfigError for what a model behind a chat URL cannot do."""
    from atropos_core import console
    from atropos_core.errors import ConfigError

    if plan.config.evaluation.sampling(plan.config.sampling.record()).top_k:
        raise ConfigError("evaluation.top_k: OpenAI's API has none.", remedy="Leave it at 0 with --model-url.")
    for name, one in plan.named["environment"].items():
        if "baseline" in type(one.options).model_fields:
            raise ConfigError(
                f"environment {name!r} calls another model through its own option, not through --model-url.",
                remedy=f"--set {console.quoted(f'environment.{name}.baseline.url={elsewhere.url}')} --set "
                f"{console.quoted(f'environment.{name}.baseline.model={elsewhere.name}')}, and its baseline.key_variable for a key",
            )


def _policy(run: Path, step: int | None) -> tuple[str, int]:
    """Return the directory of the checkpoint's policy, and its step."""
    from atropos_core import console
    from atropos_core.errors import RunDirectoryError
    from atropos_core.storage.run_directory import RunDirectory

    checkpoints = RunDirectory(run).checkpoints
    checkpoint = checkpoints.latest(console.warn) if step is None else checkpoints.at(step)
    if checkpoint is None:
        raise no_checkpoint(run)
    if not any((checkpoint.policy / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RunDirectoryError(
            f"the checkpoints of {run} cannot be opened by an engine: {checkpoint.policy} has no config.json. The trainer `toy` "
            "saves a table that only its own run can load.",
            remedy="Its own evaluations are in metrics.jsonl (eval/...); more of them: `atropos resume` with more --steps. "
            "Runs of `--model tiny` and others can be evaluated.",
        )
    return str(checkpoint.policy), checkpoint.step


def no_checkpoint(run: Path) -> RunDirectoryError:
    from atropos_core import console
    from atropos_core.errors import RunDirectoryError

    if (run / "config.toml").is_file():
        return RunDirectoryError(
            f"{run} has no checkpoint to evaluate.", remedy=f"Go on with it: atropos resume {console.quoted(run)}"
        )
    saved = next((one for one in (run, *run.parents) if one.name.startswith("step-")), None)
    if saved is not None and (saved.parents[1] / "config.toml").is_file():
        step = saved.name.removeprefix("step-").lstrip("0")
        return RunDirectoryError(
            f"{run} is a checkpoint, not a run directory.",
            remedy=f"atropos eval {console.quoted(saved.parents[1])} --step {step}",
        )
    if (run / "config.json").is_file() or (run / "adapter_config.json").is_file():
        return RunDirectoryError(
            f"{run} is a model, not a run directory.",
            remedy=f"atropos eval --env NAME --model {console.quoted(run)}",
        )
    return RunDirectoryError(
        f"{run} is not a run directory: it has no config.toml.", remedy="`ls -t runs` shows the newest."
    )


def _figures(plan: Plan, step: int | None, evaluation: Evaluation, elsewhere: ChatModel | None) -> dict[str, Any]:
    """Return the figures, and everything that they depend on."""

    from atropos_core.config.run_file import dump

    config = plan.config
    if elsewhere is None:
        model, engine = str(plan.model.directory), dump(plan.engines[0].component) | dump(plan.engines[0].options)
    else:
        model, engine = elsewhere.name, {"url": elsewhere.url, "retries": elsewhere.retries}
    return {
        "model": model,
        "step": step,
        "seed": config.seed,
        "environment": {name: dump(one.component) | dump(one.options) for name, one in plan.named["environment"].items()},
        "engine": engine,
        "evaluation": dump(config.evaluation) | {"sampling": config.evaluation.sampling(config.sampling.record()).of_run()},
        "metrics": evaluation.metrics,
        "intervals": {name: [share.low, share.high] for name, share in evaluation.shares.items()},
        "tokens": None if elsewhere is not None and elsewhere.uncounted else evaluation.tokens,
        "seconds": round(evaluation.seconds, 3),
    }  # fmt: skip


async def _evaluate(plan: Plan, elsewhere: ChatModel | None, concurrency: int) -> Evaluation:
    import asyncio

    from atropos_core.errors import Interrupted
    from atropos_core.guards.blocked_loop import blocked_loop_alarm
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.builder import build_for_evaluation
    from atropos_core.launch.model_checks import check_model
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.rollouts.evaluation import evaluate
    from atropos_core.rollouts.runner import RolloutRunner
    from atropos_core.storage.tempdirs import owned_directory

    config = plan.config
    with cancelled_by_signals(), owned_directory("eval") as directory:
        (directory / "logs").mkdir()
        if elsewhere is None:
            check_model(plan, directory, trains=False)
        try:
            parts = await build_for_evaluation(plan, directory, elsewhere)
            try:
                if elsewhere is not None:  # or those that wait for a connection would spend their own deadlines
                    for environment in parts.environments.values():
                        environment.at_once = min(environment.at_once or concurrency, concurrency)
                await parts.engine.open()
                runner = RolloutRunner(
                    parts.environments,
                    parts.rewards,
                    parts.engine,
                    elsewhere or plan.tokenizer(),
                    deadline_s=config.training.rollout_deadline_s,
                    deterministic=config.deterministic,
                )
                sampling = config.sampling.record()
                with blocked_loop_alarm(), own_process():
                    return await evaluate(runner, parts.environments, config.evaluation, sampling, seed=config.seed)
            finally:
                await parts.close()
        except asyncio.CancelledError:
            raise Interrupted("stopped: an evaluation that is not whole has no figures") from None
