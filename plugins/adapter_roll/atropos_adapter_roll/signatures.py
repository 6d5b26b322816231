"""The parts of ROLL that the adapter relies on, recognised by signatures and fields: ROLL's versions say less than its code does."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from typing import Any

KNOWN_AS_OF = "8eb27cc2"
_AGENTIC = "roll.pipeline.agentic."
_MANAGERS = _AGENTIC + "env_manager."
SIGNATURES = {
    _MANAGERS + "traj_env_manager:TrajEnvManager.__init__": (
        "worker_config", "pipeline_config", "env_config", "tokenizer", "generate_scheduler", "output_queue", "thread_lock", "mode",
        "args", "kwargs",
    ),
    _MANAGERS + "traj_env_manager:TrajEnvManager.run_rollout_loop": ("data",),
    _MANAGERS + "traj_env_manager:TrajEnvManager.step": ("llm_output",),
    _MANAGERS + "traj_env_manager:TrajEnvManager.formulate_rollouts": ("rollout_cache",),
    _MANAGERS + "agent_native_env_manager:AgentNativeStepEnvManager.run_rollout_loop": ("data",),
    _MANAGERS + "agent_native_env_manager:AgentNativeStepEnvManager.step": ("llm_output",),
    _MANAGERS + "agent_native_env_manager:AgentNativeStepEnvManager.formulate_rollouts": ("rollout_cache",),
    _AGENTIC + "llm_proxy:create_llm_proxy": ("generate_scheduler", "llm_proxy_config", "tokenizer", "env"),
    _AGENTIC + "llm_proxy:register_llm_proxy": ("name",),
    _AGENTIC + "llm_proxy:BaseLLMProxy.generate": ("messages", "lm_input", "generation_config"),
    "roll.distributed.scheduler.rollout_scheduler:GroupQueue.__init__": (
        "group_id", "progress_bar", "group_size", "group_size_redundancy", "max_traj_per_env", "async_generation_ratio",
        "group_filter", "env_monitor",
    ),
    "roll.distributed.scheduler.rollout_scheduler:GroupQueue.put": ("episode_id", "start_step", "rollout"),
    _AGENTIC + "agentic_pipeline:GroupFilter.__init__": ("config", "env_manager_config", "mode"),
    _AGENTIC + "agentic_pipeline:GroupFilter.filter": ("group_id", "episode_id", "group"),
    _AGENTIC + "utils:compute_discounted_returns": ("batch", "adv_estimator", "gamma"),
    _AGENTIC + "utils:compute_response_level_rewards": ("batch", "pipeline_config"),
}  # fmt: skip
FIELDS = {  # of dataclasses that roll.yaml fills; ROLL ignores unknown keys
    _AGENTIC + "agentic_config:AgenticConfig": (
        "seed", "pretrain", "reward_pretrain", "num_gpus_per_node", "max_steps", "eval_steps", "save_steps",
        "async_generation_ratio", "rollout_batch_size", "val_batch_size", "sequence_length", "adv_estimator", "step_reward_gamma",
        "loss_agg_mode",
        "reward_normalization", "train_env_manager", "val_env_manager", "custom_envs", "ppo_epochs", "init_kl_coef",
        "whiten_advantages", "entropy_loss_coef", "actor_train", "actor_infer", "reference", "logging_dir", "output_dir", "track_with",
        "tracker_kwargs", "logging_steps", "resume_from_checkpoint", "exp_name", "max_grad_norm",
    ),
    _AGENTIC + "agentic_config:EnvManagerConfig": (
        "max_env_num_per_worker", "num_env_groups", "group_size", "group_filter_cls", "tags", "num_groups_partition",
    ),
    _AGENTIC + "agentic_config:RewardNormalizationConfig": ("grouping", "method", "norm_mean_type", "norm_std_type"),
}  # fmt: skip


def differences() -> list[str]:
    """The differences between the installed ROLL and the known one, in words. Empty: none."""
    found: list[str] = []
    missing: dict[str, list[str]] = {}  # modules by the reason why they do not import
    for place, known in [*SIGNATURES.items(), *FIELDS.items()]:
        module, _, path = place.partition(":")
        try:
            target = _at(importlib.import_module(module), path)
        except Exception as error:  # noqa: BLE001 - the boundary to ROLL's code, of whatever version
            names = missing.setdefault(f"{type(error).__name__}: {error}", [])
            names += [_short(module)] if _short(module) not in names else []
            continue
        if target is None:
            found.append(f"there is no {_short(place)}")
        elif place in FIELDS:
            has = {field.name for field in fields(target)}
            if less := [name for name in known if name not in has]:
                found.append(
                    f"{_short(place)} does not know {', '.join(less)}: ROLL passes over what roll.yaml says there"
                )
        elif (takes := tuple(name for name in inspect.signature(target).parameters if name != "self")) != known:
            more = [name for name in takes if name not in known]
            less = [name for name in known if name not in takes]
            changes = [f"takes {', '.join(more)} as well"] * bool(more) + [f"takes no {', '.join(less)}"] * bool(less)
            found.append(f"{_short(place)} {' and '.join(changes) or 'takes the same in another order'}")
    return [*(f"no import of {', '.join(names)} ({why})" for why, names in missing.items()), *found]


def _at(module: Any, path: str) -> Any:
    target = module
    for name in path.split("."):
        target = inspect.getattr_static(target, name, None)
    return getattr(target, "__func__", target)


def _short(place: str) -> str:
    return place.removeprefix(_AGENTIC).replace(":", ".")
