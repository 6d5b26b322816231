"""What is said of a wrong key or value in a run file, or of an option of a component."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

ALIASES = {  # what other libraries call it: the whole path here
    "beta": "trainer.kl.coefficient",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "gradient_accumulation_steps": "training.groups_per_step",
    "kl_coef": "trainer.kl.coefficient",
    "kl_loss_coef": "trainer.kl.coefficient",
    "learning_rate": "trainer.learning_rate",
    "loss_type": "trainer.loss",
    "lr": "trainer.learning_rate",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "training.steps",
    "max_tokens": "sampling.max_tokens",
    "num_generations": "training.group_size",
    "num_iterations": "trainer.epochs",
    "per_device_train_batch_size": "trainer.tokens_per_microbatch",
    "ppo_epochs": "trainer.epochs",
    "save_steps": "checkpoint.every",
    "steps": "training.steps",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "total_training_steps": "training.steps",
    "train_batch_size": "training.groups_per_step",
}
NAMED = ("environment", "reward", "transform", "teacher", "sink")  # sections whose keys are names
NO_LIST = ("tuple_type", "list_type")
NO_TABLE = ("dict_type", "model_type", "model_attributes_type")


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str], prefix: str = "") -> str:
    """pydantic's complaints in one line each: the key, what was given and by whom, what is wanted, the near miss."""
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
    near = difflib.get_close_matches(key, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" There is: {', '.join(names)}." if names else ""


def _table(path: str, given: str) -> str:
    """How a component that was given as a text is written."""
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
