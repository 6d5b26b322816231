"""Error messages for a wrong key or value in a run file, or in the options of a component."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

ALIASES = {  # another library's name: the path here
    "adam_beta1": "trainer.betas",
    "adam_beta2": "trainer.betas",
    "adam_epsilon": "trainer.eps",
    "beta": "trainer.kl.coefficient",
    "bf16": "trainer.dtype",
    "entropy_coeff": "trainer.entropy_coefficient",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "eval_steps": "evaluation.every",
    "grad_clip": "trainer.max_grad_norm",
    "gradient_accumulation_steps": "training.groups_per_step",
    "gradient_checkpointing": "trainer.gradient_checkpointing",
    "kl_coef": "trainer.kl.coefficient",
    "kl_loss_coef": "trainer.kl.coefficient",
    "learning_rate": "trainer.learning_rate",
    "lora_alpha": "trainer.lora.alpha",
    "lora_r": "trainer.lora.rank",
    "lora_rank": "trainer.lora.rank",
    "loss_type": "trainer.loss",
    "lr": "trainer.learning_rate",
    "lr_scheduler_type": "trainer.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "trainer.max_grad_norm",
    "max_new_tokens": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "training.steps",
    "max_tokens": "sampling.max_tokens",
    "min_p": "sampling.min_p",
    "num_generations": "training.group_size",
    "num_iterations": "trainer.epochs",
    "num_train_epochs": "training.steps",
    "optim": "trainer.optimizer",
    "per_device_train_batch_size": "trainer.tokens_per_microbatch",
    "ppo_epochs": "trainer.epochs",
    "ppo_mini_batch_size": "trainer.minibatches",
    "rollout_n": "training.group_size",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "steps": "training.steps",
    "target_modules": "trainer.lora.targets",
    "temperature": "sampling.temperature",
    "test_freq": "evaluation.every",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "total_epochs": "training.steps",
    "total_training_steps": "training.steps",
    "train_batch_size": "training.groups_per_step",
    "warmup_ratio": "trainer.warmup_steps",
    "warmup_steps": "trainer.warmup_steps",
    "weight_decay": "trainer.weight_decay",
}
FLAGS = {  # another library's name: what to write here instead (not a single key)
    "dataset_name": "--env dataset:FILE",
    "logger": "--set sink.NAME.use=NAME, with wandb, mlflow, tensorboard or trackio",
    "model_name_or_path": "--model",
    "output_dir": "--dir",
    "report_to": "--set sink.NAME.use=NAME, with wandb, mlflow, tensorboard or trackio",
    "run_name": "--dir",
}
NAMED = ("environment", "reward", "transform", "teacher", "sink")  # sections whose keys are names
NO_LIST = ("tuple_type", "list_type")
NO_TABLE = ("dict_type", "model_type", "model_attributes_type")


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str], prefix: str = "") -> str:
    """Turn pydantic's errors into one line each: the key, the value and its origin, the expected type, a similar key."""
    lines = []
    for problem in error.errors():
        path = (prefix + ".".join(str(part) for part in problem["loc"])).rstrip(".")
        from_here = [path, *(key for key in origins if key.startswith(path + "."))]
        origin = next((f" (from {origins[key]})" for key in from_here if key in origins), "")
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"unknown key {path!r}{origin}.{_hint(str(problem['loc'][-1]), path, model, problem['loc'][:-1])}"
            )
        elif problem["type"] == "missing":
            lines.append(f"{path!r} is missing{origin}.")
        elif problem["type"] in NO_TABLE and path and isinstance(problem["input"], str):
            lines.append(f"{path} is a table, not {problem['input']!r}{origin}: {_table(path, problem['input'])}")
        elif problem["type"] in NO_LIST and isinstance(problem["input"], str):
            given = problem["input"]
            lines.append(f"{path} is a list, not {given!r}{origin}: write {json.dumps([given], ensure_ascii=False)}.")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = f", not {problem['input']!r}" if problem["loc"] else ""
            lines.append(f"{path + ': ' if path else ''}{message[0].lower() + message[1:]}{given}{origin}.")
    return "\n".join(lines)


def _hint(key: str, path: str, model: type[BaseModel], at: Sequence[Any]) -> str:
    names = _names_at(model, at)
    section = path.partition(".")[0]
    if (known := ALIASES.get(key)) is not None and known != path and section not in NAMED:
        last = known.rpartition(".")[2]
        return f" It is called {path.removesuffix(key) + last if last in names else known!r} here."
    if key in FLAGS:
        return f" Write {FLAGS[key]}."
    near = difflib.get_close_matches(key, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Choose one of: {', '.join(names)}." if names else ""


def _table(path: str, given: str) -> str:
    """Return how to write a component that was given as a string."""
    name = given if given.replace("_", "").isalnum() else "NAME"
    if path in NAMED:
        return f"write [{path}.{name}]" + (f" with use = {given!r}." if name != given else ".")
    if path in ("training", "sampling", "evaluation", "checkpoint", "hub", "health", "watch", "api"):
        return f"write [{path}], and its keys under it."
    return f"write [{path}] with use = {given!r}."


def _names_at(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    at: type[BaseModel] = model
    for part in path:
        annotation = at.model_fields[part].annotation if part in at.model_fields else None
        inner = (one for one in (annotation, *get_args(annotation)) if isinstance(one, type))  # also `Model | None`
        found = next((one for one in inner if issubclass(one, BaseModel)), None)
        if found is None:
            return []
        at = found
    return list(at.model_fields)
