"""Run an evaluation: choose the policy, run the held-out problems, and write the figures and the replies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import console
from atropos_core.cli.options import ROLLOUT_SECTIONS, Uses, configure
from atropos_core.config.run_file import dump
from atropos_core.errors import ConfigError, Interrupted
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.guards.exits import own_process
from atropos_core.health.check import Settings
from atropos_core.health.watch import findings, measured_before_training
from atropos_core.interfaces import Environment
from atropos_core.launch.builder import build_for_evaluation
from atropos_core.launch.model_checks import check_model
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.launch.signals import cancelled_by_signals
from atropos_core.models.model_size import context_tokens
from atropos_core.rollouts.evaluation import Evaluation, evaluate
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.scripting.results import EvaluationResult
from atropos_core.storage.atomic import refuse_existing, write_output
from atropos_core.storage.tempdirs import owned_directory
from atropos_core.training.metrics import group_metrics
from atropos_evaluation.policies import checkpoint_policy

if TYPE_CHECKING:
    from atropos_evaluation.chat_model import ChatModel

SECTION = ("problems", "samples", "pass_at", "temperature", "top_p", "top_k", "min_p", "max_tokens")
USES = Uses(
    "atropos eval",
    (*ROLLOUT_SECTIONS, *(f"evaluation.{name}" for name in SECTION), "training.rollout_deadline_s"),
)
USES_WITH_URL = Uses("atropos eval --model-url", tuple(path for path in USES.paths if path not in ("model", "engine")))
CONCURRENCY = 32


def evaluate_in_python(run: Path | None, **flags: Any) -> EvaluationResult:
    """Run an evaluation for `atropos_core.evaluate`."""
    return evaluate_policy(run, **flags)[0]


def evaluate_policy(
    run: Path | None,
    *,
    step: int | None,
    env: Sequence[str] | None,
    model: str | None,
    engine: str | None,
    reward: Sequence[str] | None,
    model_url: str | None,
    model_name: str | None,
    key_variable: str | None,
    concurrency: int | None,
    problems: int | None,
    samples: int | None,
    temperature: float | None,
    seed: int | None,
    changes: Sequence[str] | None,
    out: Path | None,
    quiet: bool = False,
) -> tuple[EvaluationResult, dict[str, Any]]:
    """Run an evaluation as `atropos eval` does, without printing its table. Return its result, and a record of the figures with
    everything that they depend on. `quiet`: print nothing on standard output. Raises AtroposError."""
    if step is not None and (run is None or model is not None):
        raise ConfigError("--step names a checkpoint of a run: give the run's directory, and no --model.")
    files = None if out is None else _files(out)
    if files is not None:
        refuse_existing(*files)
    remote = _remote_model(model_url, model_name, key_variable, concurrency, model=model, engine=engine, step=step)
    if run is not None and model is None and remote is None:
        model, step = checkpoint_policy(run, step)
        if not quiet:
            console.facts([("policy", model)])
        files = files or _files(run / "evaluations" / f"step-{step:06d}-{time.strftime('%Y%m%d-%H%M%S')}")
    own = {"problems": problems, "samples": samples, "temperature": temperature}
    loaded, resolved, plugins = configure(
        saved=run, env=env, model=model, engine=engine, reward=reward, seed=seed, changes=changes,
        flags={f"evaluation.{name}": value for name, value in own.items()}, uses=USES_WITH_URL if remote else USES,
        preset=remote is None,
    )  # fmt: skip
    if not loaded.config.evaluation.problems:
        raise ConfigError(
            "evaluation.problems is 0: there is nothing to evaluate.", remedy="Say how many: --problems 512"
        )
    plan = make_plan(loaded.config, resolved, plugins, training=False, sampling=remote is None)
    if remote is not None:
        _refuse_unfit(plan, remote)
        if not quiet:
            missing = "token ids and logprobs: environments see numbers of no meaning, and zeros"
            console.facts([("model", f"{remote.name} at {remote.url}"), ("not had", missing)])
    evaluation = asyncio.run(_evaluate(plan, remote, concurrency or CONCURRENCY))
    record = _record(plan, step, evaluation, remote)
    figures, replies = files or (None, None)
    if figures is not None and replies is not None:
        write_output(figures, json.dumps(record, indent=1, default=str) + "\n")
        evaluation.write(replies)
    result = EvaluationResult(
        evaluation.metrics, evaluation.shares, evaluation.seconds, record["tokens"], figures, replies
    )
    return result, record


def _files(out: Path) -> tuple[Path, Path]:
    """Return the files for figures and for replies."""
    stem = out.with_suffix("") if out.suffix in (".json", ".jsonl") else out
    return Path(f"{stem}.json"), Path(f"{stem}.jsonl")


def _remote_model(
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
    if url is None:
        of_url = {"--model-name": name, "--key-variable": key_variable, "--concurrency": concurrency}
        if idle := [flag for flag, value in of_url.items() if value is not None]:
            raise ConfigError(f"{idle[0]} has no effect without --model-url.")
        return None
    local = {"--model": model, "--engine": engine, "--step": step}
    if idle := [flag for flag, value in local.items() if value is not None]:
        raise ConfigError(f"{idle[0]} has no effect with --model-url: the model is on another server.")
    if name is None:
        raise ConfigError("--model-url needs the name that the model has there.", remedy="--model-name NAME")
    from atropos_evaluation.chat_model import ChatModel  # and httpx, which other evaluations do without

    return ChatModel(url, name, key_variable=key_variable, concurrency=concurrency or CONCURRENCY)


def _refuse_unfit(plan: Plan, remote: ChatModel) -> None:
    """Raise ConfigError for what a model behind a chat URL cannot do."""
    sampling = plan.config.evaluation.sampling(plan.config.sampling.record())
    for name in ("top_k", "min_p"):
        if getattr(sampling, name):
            raise ConfigError(f"evaluation.{name}: OpenAI's API has none.", remedy="Leave it at 0 with --model-url.")
    for name, one in plan.named["environment"].items():
        if "baseline" in type(one.options).model_fields:
            raise ConfigError(
                f"environment {name!r} calls another model through its own option, not through --model-url.",
                remedy=f"--set {console.quoted(f'environment.{name}.baseline.url={remote.url}')} --set "
                f"{console.quoted(f'environment.{name}.baseline.model={remote.name}')}, and its baseline.key_variable for a key",
            )


def _warn(
    plan: Plan, environments: Mapping[str, Environment], evaluation: Evaluation, remote: ChatModel | None
) -> None:
    """Say what explains missing rewards, as a run does after its evaluation before step 1."""
    measured = measured_before_training(
        evaluation.groups, group_metrics([group for group in evaluation.groups if group.episodes])
    )
    if remote is not None:  # its token ids have no meaning, and its lengths may be unknown
        measured.pop("eval/replies/looping", None)
        if remote.uncounted:
            measured.pop("eval/replies/needed_tokens", None)
    context = context_tokens(plan.model.directory) if remote is None else 0
    formats = {name: one.answer_format for name, one in environments.items()}
    for finding in findings(
        measured, evaluation.groups, plan.config.health, Settings.of(plan.config, context), formats
    ):
        console.warn(f"health.{finding.check}: {finding.says}.\n  {finding.remedy}")


def _record(plan: Plan, step: int | None, evaluation: Evaluation, remote: ChatModel | None) -> dict[str, Any]:
    """Return the figures, and everything that they depend on."""
    config = plan.config
    if remote is None:
        model, engine = str(plan.model.directory), dump(plan.engines[0].component) | dump(plan.engines[0].options)
    else:
        model, engine = remote.name, {"url": remote.url, "retries": remote.retries}
    return {
        "model": model,
        "step": step,
        "seed": config.seed,
        "environment": {name: dump(one.component) | dump(one.options) for name, one in plan.named["environment"].items()},
        "engine": engine,
        "evaluation": dump(config.evaluation) | {"sampling": config.evaluation.sampling(config.sampling.record()).of_run()},
        "metrics": evaluation.metrics,
        "intervals": {name: [share.low, share.high] for name, share in evaluation.shares.items()},
        "tokens": None if remote is not None and remote.uncounted else evaluation.tokens,
        "seconds": round(evaluation.seconds, 3),
    }  # fmt: skip


async def _evaluate(plan: Plan, remote: ChatModel | None, concurrency: int) -> Evaluation:
    try:
        with cancelled_by_signals(), owned_directory("eval") as directory:
            return await _evaluate_in(directory, plan, remote, concurrency)
    except asyncio.CancelledError:
        raise Interrupted("stopped: an evaluation that is not whole has no figures") from None


async def _evaluate_in(directory: Path, plan: Plan, remote: ChatModel | None, concurrency: int) -> Evaluation:
    config = plan.config
    (directory / "logs").mkdir()
    plan.check_files()
    if remote is None:
        check_model(plan, directory, trains=False)
    parts = await build_for_evaluation(plan, directory, remote)
    try:
        if remote is not None:  # a rollout that waits for a connection would spend its own deadline
            for environment in parts.environments.values():
                environment.at_once = min(environment.at_once or concurrency, concurrency)
        await parts.engine.open()
        runner = RolloutRunner(
            parts.environments,
            parts.rewards,
            parts.engine,
            remote or plan.tokenizer(),
            deadline_s=config.training.rollout_deadline_s,
            deterministic=config.deterministic,
        )
        sampling = config.sampling.record()
        with blocked_loop_alarm(), own_process():
            evaluation = await evaluate(runner, parts.environments, config.evaluation, sampling, seed=config.seed)
        _warn(plan, parts.environments, evaluation, remote)
        return evaluation
    finally:
        await parts.close()
