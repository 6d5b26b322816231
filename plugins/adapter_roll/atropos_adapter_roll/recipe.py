"""Convert a run file to ROLL's YAML: its values come first, then base.yaml, which refers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_adapter_roll.config import AdapterOptions, EnvOptions, read_env_options
from atropos_adapter_roll.shared import build, shared_loop
from atropos_core.config.component import Weighted
from atropos_core.config.run_file import RunConfig, dump
from atropos_core.errors import ConfigError
from atropos_core.plugins.manager import load_plugins

VALIDATION_GROUPS = 64  # environments that run the held-out split at the same time
HEADER = """# For ROLL's agentic pipeline, written by Atropos's adapter `roll`.
# ROLL has its own settings for [trainer], [bridge], [engine], [launcher], [curriculum], [sink.*], [health], [watch], [hub], [api],
# date, deterministic, oversubscribe, plot and restarts. Of these only the learning rate is carried over. Also carried over are
# group_advantage of [transform.*]; steps, groups_per_step, group_size and max_staleness of [training]; problems and every of
# [evaluation]; every of [checkpoint].
"""
MANAGERS = {"trajectory": ("TrajEnvManager", "delta"), "native": ("AgentNativeStepEnvManager", "messages")}
# A native manager's rows are replies, and the score of an episode is on its last reply. `step_reinforce` credits each reply with
# what the episode earns from there on; `grpo` would set the earlier replies of a right episode below the mean. A mean over rows,
# ROLL's default, would count an episode once for each reply: `token-mean` weighs all tokens alike.
ESTIMATORS: Mapping[str, Mapping[str, Any]] = {  # by the observation that a manager shows
    "delta": {"adv_estimator": "grpo"},
    "messages": {"adv_estimator": "step_reinforce", "step_reward_gamma": 1.0, "loss_agg_mode": "token-mean"},
}


def recipe(run: RunConfig, options: AdapterOptions, model: str) -> dict[str, Any]:
    """Convert a run file to ROLL's settings. `model`: a directory, or an id of the hub. Raises ConfigError for settings that
    cannot be carried over."""
    _refuse(run)
    training, tokens = run.training, run.sampling.max_tokens
    if run.sampling.stop:
        raise ConfigError(
            "sampling.stop is not carried over to ROLL, which would sample past it.",
            remedy="Remove it, and set stop_strings of actor_infer.generating_args in the written file.",
        )
    if run.sampling.min_p:
        raise ConfigError(
            f"sampling.min_p={run.sampling.min_p} is not carried over: ROLL's generating_args have no min_p.",
            remedy="Remove it; sampling.top_p and sampling.top_k are carried over.",
        )
    batch = training.groups_per_step * training.group_size
    length = options.sequence_length or 1024 + options.max_turns * tokens
    problems = run.evaluation.problems
    groups = max(min(problems, VALIDATION_GROUPS), len(run.environment))
    reward = _reward(run, options)
    return {
        "seed": run.seed,
        "pretrain": model,
        "num_gpus_per_node": options.gpus,
        "max_steps": training.steps,
        "eval_steps": (run.evaluation.every or training.steps) if problems else 0,
        "save_steps": run.checkpoint.interval(training.steps),
        "async_generation_ratio": training.max_staleness,
        "rollout_batch_size": batch,
        "val_batch_size": problems // groups * groups or groups,
        "sequence_length": length,
        **ESTIMATORS[MANAGERS[options.manager][1]],
        "reward_normalization": _normalization(run),
        "atropos": {
            "learning_rate": run.trainer.options.get("learning_rate", 1e-6),
            "gradient_accumulation_steps": max(batch // options.gpus, 1),
            "max_tokens": tokens,
            "temperature": run.sampling.temperature,
            "top_p": run.sampling.top_p,
            "top_k": run.sampling.top_k or -1,
        },
        "train_env_manager": _manager(run, training.groups_per_step, training.group_size, "train"),
        "val_env_manager": _manager(run, groups, 1, "val"),
        "custom_envs": {
            f"{name}_{use}": _environment(one, options, tokens, reward, options.split if use == "train" else "test")
            for name, one in run.environment.items()
            for use in ("train", "val")
        },
    }


def _refuse(run: RunConfig) -> None:
    if not run.environment:
        raise ConfigError("the run file has no environment for ROLL.", remedy="Add one: --env gsm8k.")
    others = [name for name, reward in run.reward.items() if reward.use != "environment"]
    if others:
        raise ConfigError(
            f"reward.{others[0]}: ROLL receives only the environment's own score and the adapter's bonuses, no reward of "
            "a run file.",
            remedy="Remove it, and see `reward` of the adapter's options: bonuses for format and length.",
        )
    if run.teacher:
        raise ConfigError("a teacher of a run file cannot annotate ROLL's rollouts.", remedy="Remove [teacher].")
    if run.warmup:
        raise ConfigError(
            "[warmup] is not carried over to ROLL, which would train without it.",
            remedy="Run the warm start first, with training.steps=0, and name the policy that it exports as the model.",
        )


def _normalization(run: RunConfig) -> dict[str, Any]:
    """Return ROLL's `reward_normalization` for the run file's transforms. Raises ConfigError for transforms without one."""
    baseline, divided = "none", False
    for name, one in run.transform.items():
        if one.use == "group_advantage":
            baseline = one.options.get("baseline", "group")
            divided = baseline == "group" and one.options.get("divide_by_std") is not False
        elif one.use != "drop_flat":  # the advantages of a flat group are 0 in ROLL too
            raise ConfigError(
                f"[transform.{name}] changes advantages, but ROLL would train without it.",
                remedy=f"Remove [transform.{name}], or do its work in the environment.",
            )
    if baseline == "others":
        raise ConfigError(
            'transform.group_advantage.baseline="others": ROLL normalises by the mean of the whole group.',
            remedy="Set transform.group_advantage.baseline=group and transform.group_advantage.divide_by_std=false: with "
            f"groups of {run.training.group_size}, that is the same except for a constant factor.",
        )
    # A ROLL without the fields norm_*_type reads `method`; a newer one derives what is unset from `method`.
    method = {"none": "identity", "group": "mean_std" if divided else "mean"}[baseline]
    kinds = {"norm_mean_type": baseline == "group", "norm_std_type": divided}
    return {"grouping": "traj_group_id", "method": method, **{kind: "group" for kind, on in kinds.items() if on}}


def _manager(run: RunConfig, groups: int, size: int, use: str) -> dict[str, Any]:
    """One worker process holds whole groups: sixteen environments, or one larger group."""
    return {
        "max_env_num_per_worker": max(16 // size, 1) * size,
        "num_env_groups": groups,
        "group_size": size,
        "group_filter_cls": "atropos_adapter_roll.group.GroupFilter",
        "tags": [f"{name}_{use}" for name in run.environment],
        "num_groups_partition": shares([one.weight for one in run.environment.values()], groups),
    }


def _reward(run: RunConfig, options: AdapterOptions) -> dict[str, Any]:
    """The adapter's reward, with the run file's weight of the environment's own score."""
    reward, weight = options.reward, sum(one.weight for one in run.reward.values())
    weighted = reward.model_copy(update={"environment": reward.environment * weight})
    return weighted.model_dump(mode="json", exclude_none=True)


def _environment(
    one: Weighted, options: AdapterOptions, tokens: int, reward: Mapping[str, Any], split: str
) -> dict[str, Any]:
    manager, observation = MANAGERS[options.manager]
    name = one.use
    if (file := name.partition(":")[0]).endswith(".py"):
        name = str(Path(file).resolve()) + name.removeprefix(file)
    env_config: dict[str, Any] = {
        "environment": name,
        "options": _options(one),
        "split": split,
        "observation": observation,
        "max_steps": options.max_turns,
        "reward": reward,
    }
    known = read_env_options(env_config)
    system = _system(known) if observation == "delta" else None
    if system is not None:
        env_config["system"] = system
    return {
        "env_type": "atropos",
        "env_manager_cls": f"atropos_adapter_roll.managers.{manager}",
        "max_steps": options.max_turns,
        "max_tokens_per_step": tokens,
        "agent_system_template": system or "",
        "agent_template": "{observation}",
        "env_config": env_config,
    }


def _options(one: Weighted) -> dict[str, Any]:
    """The run file's options of the environment, with paths resolved from that file."""
    found = load_plugins().registry.find("environment", one.use).provider.options.model_validate(one.options)
    values = dump(found)
    return {name: values[name] for name in one.options if name in values}


def _system(options: EnvOptions) -> str | None:
    """The system message at the start of the environment's first task."""

    async def first() -> str | None:
        environment = build(options)
        await environment.open()
        try:
            tasks = environment.tasks(options.split)
            message = tasks[0].messages[0] if len(tasks) and tasks[0].messages else {}
            return str(message["content"]) if message.get("role") == "system" else None
        finally:
            await environment.close()

    return shared_loop().call(first(), options.open_deadline_s, f"opening {options.environment!r}")


def shares(weights: Sequence[float], groups: int) -> list[int]:
    """`groups` divided by weight, at least one to each; the largest remainders first."""
    if len(weights) > groups:
        raise ConfigError(f"{len(weights)} environments cannot share {groups} groups: raise training.groups_per_step.")
    total = sum(weights)
    exact = [weight / total * (groups - len(weights)) if total else 0.0 for weight in weights]
    given = [1 + int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda at: int(exact[at]) - exact[at])
    for at in range(groups - sum(given)):
        given[order[at % len(order)]] += 1
    return given


def whole(run: RunConfig, options: AdapterOptions, model: str) -> str:
    """The whole file for ROLL."""
    return HEADER + to_yaml(recipe(run, options, model)) + (Path(__file__).parent / "base.yaml").read_text()


def to_yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Block mappings; everything else as JSON, which is YAML. `${` is escaped: OmegaConf would fill it in."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{key}:\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML reads 1e-06 as text
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_scalar(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(key)}: {_scalar(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value.replace("${", "\\${") if isinstance(value, str) else value, ensure_ascii=False)
