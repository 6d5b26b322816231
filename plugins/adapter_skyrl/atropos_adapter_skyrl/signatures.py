"""Recognize the installed SkyRL by its signatures: the published 0.3.0 and later sources both report version 0.3.0."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError

_PASSED = {
    "skyrl.train.utils.trainer_utils:validate_generator_output": ("num_prompts", "generator_output", "step_wise"),
    "skyrl.train.generators.utils:prepare_generator_input": (
        "prompts", "n_samples_per_prompt", "sampling_params", "default_env_class", "training_phase", "global_step",
    ),
    "skyrl.train.trainer:RayPPOTrainer.postprocess_generator_output": ("self", "generator_output", "uids"),
    "skyrl.train.trainer:RayPPOTrainer.convert_to_training_input": ("self", "generator_output", "uids"),
    "skyrl.train.trainer:RayPPOTrainer.init_weight_sync_state": ("self",),
    "skyrl.train.trainer:RayPPOTrainer.save_checkpoints": ("self",),
    "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer._run_generate_for_a_group_loop":
        ("self", "generation_output_group_buffer"),
    "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer._run_training": ("self", "training_input"),
    "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer._collect_generation_mini_batch":
        ("self", "generation_output_group_buffer", "all_generators_done"),
}  # fmt: skip


def batch_tensors(convert: Callable[..., Any], tokenizer: Any, *columns: Any) -> Any:
    """SkyRL's `convert_prompts_responses_to_batch_tensors`, whichever of its two forms this is. Raises DataError for a third."""
    first = next(iter(inspect.signature(convert).parameters), "nothing")
    given = {"tokenizer": tokenizer, "pad_token_id": tokenizer.pad_token_id}
    if first not in given:
        raise DataError(
            f"SkyRL's convert_prompts_responses_to_batch_tensors takes {first!r} first; known are {' and '.join(given)}.",
            remedy="This SkyRL is newer than this adapter: install the version that `atropos adapter skyrl doctor` names.",
        )
    return convert(given[first], *columns)


def form() -> str:
    """Describe the installed SkyRL: its features that are newer than the published 0.3.0, and its path."""
    import skyrl
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors as convert
    from skyrl.train.generators.base import GeneratorOutput

    newer = {
        "convert_prompts_responses_to_batch_tensors takes pad_token_id": "pad_token_id" in inspect.signature(convert).parameters,
        "dispatch.finalize_pending_saves": hasattr(WorkerDispatch, "finalize_pending_saves"),
        "GeneratorOutput.trajectory_time_splits": "trajectory_time_splits" in GeneratorOutput.__annotations__,
        "overrides in a dict keep their types":
            SkyRLTrainConfig.from_cli_overrides({"trainer.run_name": "1"}).trainer.run_name == "1",
    }  # fmt: skip
    found = [name for name, holds in newer.items() if holds]
    named = f"newer than what was published as 0.3.0 ({', '.join(found)})" if found else "as published with 0.3.0"
    return f"{named}, in {Path(skyrl.__path__[0])}"


def unknown(ours: Mapping[str, Any]) -> Sequence[str]:
    """Describe the parts of this SkyRL that the adapter was not written for.

    These are fields of a GeneratorOutput that are not in `ours`, and functions that the adapter calls or replaces and that are
    missing or take different parameters."""
    from importlib import import_module

    from skyrl.train.generators.base import GeneratorOutput

    found = [f"GeneratorOutput.{name} stays empty" for name in sorted(set(GeneratorOutput.__annotations__) - set(ours))]
    for where, wanted in _PASSED.items():
        module, _, path = where.partition(":")
        try:
            one: Any = import_module(module)
            for name in path.split("."):
                one = getattr(one, name)
            parameters = inspect.signature(one).parameters
        except (ImportError, AttributeError):
            found.append(f"{path} is not there")
            continue
        needed = [
            name for name, one in parameters.items() if one.default is one.empty and one.kind < one.VAR_POSITIONAL
        ]
        if tuple(parameters)[: len(wanted)] != wanted or not set(needed) <= set(wanted):
            found.append(f"{path} takes {', '.join(parameters)}")
    return found
