"""Check a run's model before anything is started, only from its files and the options, without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import console
from atropos_core.errors import ConfigError, DataError, FitError, TokenizerMismatch
from atropos_core.health.alignment import largest_rounding
from atropos_core.interfaces import Environment
from atropos_core.launch.memory_plan import workloads
from atropos_core.launch.text_checks import warn_of_rewards
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.model_provider import DeviceProvider, TrainerProvider
from atropos_core.rollouts.chat_template import OTHER_TEMPLATE
from atropos_core.rollouts.prompt_lengths import long_prompts
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import most_kept

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent
    from atropos_core.launch.plan import Plan
    from atropos_core.plugins.model_provider import Workload
    from atropos_core.types import Split

LOOK_S = 1.0  # at the prompts of one split: enough for 100,000 rows of data
TRIED_TASKS = 4  # of each environment, at most, before a run starts
SHARED_MEMORY = ("posix_shm", "cuda_ipc")


def check_model(plan: Plan, directory: Path, *, trains: bool = True) -> None:
    """Raises ConfigError, FitError or TokenizerMismatch for what would end this run, or each of its rollouts, after the model was
    loaded. Does not find what only loading can show. An evaluation, which does not train, may use an adapter as its model."""
    if trains:
        refuse_adapter(plan.model.directory)
    tokenizer = plan.tokenizer()
    _check_ends(plan, tokenizer)
    _check_shape(plan, tokenizer)
    check_components(plan, workloads(plan, directory))
    _check_template(plan, directory, tokenizer)
    warn_of_rewards(plan.named, tokenizer)


def refuse_adapter(directory: Path) -> None:
    """Raises ConfigError for the directory of a LoRA adapter: training starts from a whole model."""
    adapter = directory / "adapter_config.json"
    if not adapter.is_file():
        return
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    base = base or "a base model that its adapter_config.json does not name"
    run = next((str(one.parent) for one in directory.parents if one.name == "checkpoints"), "RUN")
    raise ConfigError(
        f"{directory} is a LoRA adapter of {base}, and training starts from a whole model.",
        remedy=f"Merge the two: `atropos export {console.quoted(run)} --as hf --merged --out MODEL`, then --model MODEL. An adapter from "
        "elsewhere is merged by peft: merge_and_unload(), save_pretrained().",
    )


def check_components(plan: Plan, components: Sequence[tuple[ResolvedComponent, Workload]]) -> None:
    """Raises the error of a component that cannot use this model, or FitError if their precisions do not match."""
    for resolved, workload in components:
        resolved.check(workload)
    check_dtypes(plan, components)


def check_disk(plan: Plan, directory: Path) -> None:
    """Raises FitError if the run directory's disk has no room for the checkpoints that the run keeps, and for one more, which is
    written before the oldest is removed."""
    keep = plan.config.checkpoint.keep
    for resolved, workload in workloads(plan, directory):
        provider = resolved.offer.provider
        if not isinstance(provider, TrainerProvider) or not (each := provider.saves(resolved.options, workload)):
            continue
        checkpoints = directory / "checkpoints"
        there = sum(
            path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()
        )  # of a run that is resumed
        every, steps = plan.config.checkpoint.every, max(plan.config.all_steps, 1)
        most = 1 if every == 0 else min(keep + 1, steps)
        older = ""
        if plan.config.health.rolls_back:
            most = min(most_kept(keep, every, steps) + 1, steps) + plan.config.health.reward_hacking.rollbacks
            older = ", older ones for a rollback"
        needed = most * each - there
        exists = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(exists).free
        if needed > free:
            raise FitError(
                f"this run needs {_mb(needed)} for checkpoints in {directory}, where {_mb(free)} are free: up to {most} of {_mb(each)} "
                f"each (checkpoint.keep = {keep}{older}, and one more while it is written).",
                remedy="Free some of that disk, or name another with --dir; --set checkpoint.keep=1 keeps one and "
                "checkpoint.every=0 writes only the last; --set oversubscribe=true starts regardless.",
            )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


def _check_ends(plan: Plan, tokenizer: ChatTokenizer) -> None:
    if not tokenizer.has_end:
        raise FitError(
            f"nothing ends a reply of the model in {plan.model.directory}: its tokenizer_config.json names no eos_token that the "
            "tokenizer has, and neither generation_config.json nor config.json an eos_token_id, so each reply would run up to "
            "sampling.max_tokens.",
            remedy='Name the token that ends a turn: "eos_token" in tokenizer_config.json, such as "<|im_end|>".',
        )


def check_dtypes(plan: Plan, components: Sequence[tuple[ResolvedComponent, Workload]]) -> None:
    """Raises FitError if an engine that shares the trainer's memory has another precision, or if another engine's precision
    rounds by more than the run allows."""
    said = {
        resolved.label: (provider.dtype(resolved.options, workload), workload.context.transport, resolved.offer.kind)
        for resolved, workload in components
        if isinstance(provider := resolved.offer.provider, DeviceProvider)
    }
    trainer = next((dtype for dtype, _, kind in said.values() if kind == "trainer"), "")
    for label, (dtype, transport, kind) in said.items():
        if kind != "engine" or not dtype or not trainer or dtype == trainer:
            continue
        if transport in SHARED_MEMORY:
            raise FitError(
                f"the trainer's weights are {trainer} and those of {label} {dtype}, and the two are one memory ({transport}).",
                remedy=f"--set {label}.dtype={trainer}, or another trainer.dtype; with --bridge checkpoint they may differ.",
            )
        bound, rounding = largest_rounding(trainer), largest_rounding(dtype)
        if rounding > bound and plan.config.training.max_logprob_diff is None:
            raise FitError(
                f"the weights of {label} are {dtype} and the trainer's {trainer}: rounding moves the engine's logprobs by more "
                f"than the {bound:g} nats to which a run with {trainer} weights holds them (training.max_logprob_diff).",
                remedy=f"--set {label}.dtype={trainer}; or --set training.max_logprob_diff={rounding:g}, what weights of 16 bits are "
                "held to, which trains on logprobs that far off.",
            )


def _check_shape(plan: Plan, tokenizer: ChatTokenizer) -> None:
    config = _shape(plan.model.directory)
    vocabulary, longest = config.get("vocab_size"), config.get("max_position_embeddings")
    if isinstance(vocabulary, int) and tokenizer.vocabulary > vocabulary:
        raise TokenizerMismatch(
            f"the tokenizer in {plan.model.directory} has {tokenizer.vocabulary} ids, and the model only {vocabulary} embeddings "
            "(vocab_size in its config.json).",
            remedy="Put the model's own tokenizer there, or resize the model's embeddings: "
            "model.resize_token_embeddings(len(tokenizer)).",
        )
    samplings = (("sampling", plan.config.sampling.max_tokens), ("evaluation", plan.config.evaluation.max_tokens or 0))
    for section, max_tokens in samplings:
        if isinstance(longest, int) and max_tokens >= longest:
            raise FitError(
                f"{section}.max_tokens = {max_tokens} leaves no room for a prompt: the model in {plan.model.directory} has "
                f"{longest} positions (max_position_embeddings in its config.json).",
                remedy=f"--set {section}.max_tokens={longest // 2}, or a model with a longer context.",
            )


def say_long_prompts(plan: Plan, tokenizer: ChatTokenizer, name: str, environment: Environment) -> None:
    """Warn of tasks in an open environment whose prompts leave no room for a reply, as far as LOOK_S seconds suffice. Raises
    FitError if no task has room."""
    longest, config = context_tokens(plan.model.directory), plan.config
    if not longest or not _is_usual(type(environment)):
        return  # one that renders its prompts itself
    options = getattr(plan.named["environment"][name], "options", None)
    evaluated = config.evaluation.max_tokens
    splits: list[tuple[Split, str, int]] = [("train", "sampling", config.sampling.max_tokens)]
    if config.evaluation.problems:
        is_own = evaluated is not None
        splits.append(("test", "evaluation" if is_own else "sampling", evaluated or config.sampling.max_tokens))
    for split, section, max_tokens in splits:
        tasks = environment.tasks(split)
        found = long_prompts(tasks, tokenizer, longest - max_tokens, environment.tools_of, deadline_s=LOOK_S)
        if not found.tokens:
            continue
        named = ", ".join(f"{tasks[at].id!r:.40} ({count:,} tokens)" for at, count in list(found.tokens.items())[:5])
        fact = (
            f"environment {name!r}: {len(found.tokens):,} of {found.looked_at:,} tasks of the {split} split have a prompt of more than "
            f"{found.most:,} tokens: {named}{', ...' if len(found.tokens) > 5 else ''}. With {section}.max_tokens = {max_tokens} that is "
            f"more than the model's {longest:,} positions, so that their rollouts fail."
        )
        drop = f"Leave them out: --set environment.{name}.max_prompt_tokens={found.most}; or lower"
        remedy = f"{drop if hasattr(options, 'max_prompt_tokens') else 'Lower'} {section}.max_tokens."
        if len(found.tokens) == len(tasks):
            raise FitError(fact, remedy=f"Lower {section}.max_tokens, or use a model with a longer context.")
        console.warn(f"{fact} {remedy}")


def _shape(directory: Path) -> dict[str, Any]:
    """Return the part of config.json that describes the decoder; empty if the file is missing or has none."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return dict(config.get("text_config", config))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _check_template(plan: Plan, directory: Path, tokenizer: ChatTokenizer) -> None:
    """Check that the chat template renders a question. A model without one passes if the environments render their prompts."""
    try:
        tokenizer.render([{"role": "user", "content": "What is 38 + 7?"}])
    except (ConfigError, DataError) as error:
        from atropos_core.launch.builder import environments

        if tokenizer.template is None and not any(
            _is_usual(type(one)) for one in environments(plan, directory).values()
        ):
            return
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the model in {plan.model.directory} cannot be trained on conversations: {Exception.__str__(error)}",
            remedy=error.remedy or OTHER_TEMPLATE,
        ) from error


def check_first_tasks(environments: Mapping[str, Environment], tokenizer: ChatTokenizer) -> None:
    """Raises DataError if the model's chat template refuses the first task of an environment, with its tools, for every first task
    tried. (A single refused task only fails its own rollouts.)"""
    for name, environment in environments.items():
        if not _is_usual(type(environment)):
            continue
        refused: list[tuple[str, DataError]] = []
        tasks = environment.tasks("train")
        for number in range(min(len(tasks), TRIED_TASKS)):
            try:
                task = tasks[number]
                tools = environment.tools_of(task)
            except Exception:  # noqa: BLE001 - the plugin boundary: a rollout of this task will say so
                break
            try:
                tokenizer.render(task.messages, tools)
                break
            except DataError as error:
                refused.append((task.id, error))
        else:
            if refused:
                task_id, first = refused[0]
                raise DataError(
                    f"environment {name!r}: task {task_id!r}, and the others at the beginning, cannot be shown to the model: "
                    f"{Exception.__str__(first)}",
                    remedy=first.remedy or "Write the tasks as this chat template takes them, or use another model.",
                ) from first


def _is_usual(kind: type[Environment]) -> bool:
    return kind.rollout is Environment.rollout and kind.rollout_group is Environment.rollout_group
