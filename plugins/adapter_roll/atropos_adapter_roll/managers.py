"""ROLL's env managers, for `env_manager_cls`. Importing this module registers the environment `atropos` with gem in the
worker that imports it.

    env_manager_cls: atropos_adapter_roll.managers.TrajEnvManager              # observation: delta
    env_manager_cls: atropos_adapter_roll.managers.AgentNativeStepEnvManager   # observation: messages

They are ROLL's own classes. In addition, each rollout carries the outcome of its episode, for the group filter.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from atropos_adapter_roll import env as env  # registers
from atropos_adapter_roll.replies import reader_of
from atropos_core.errors import ConfigError, FitError
from atropos_core.rollouts.replies import opening_of

PROMPTS_END = 16  # tokens at the end of a prompt that may open reasoning
FILTER = "atropos_adapter_roll.group.GroupFilter"
_PACKAGE = "roll.pipeline.agentic.env_manager."
BASES = {
    "TrajEnvManager": (_PACKAGE + "traj_env_manager", "delta"),
    "AgentNativeStepEnvManager": (_PACKAGE + "agent_native_env_manager", "messages"),
}
BY_STEP = ("step_reinforce", "gigpo")  # estimators of ROLL that know which rows are replies of one episode
log = logging.getLogger(__name__)


def adapted(base: type, observation: str) -> type:
    """`base`, one of ROLL's env managers, whose rollouts carry `meta_info["atropos"]`."""

    class Adapted(base):  # type: ignore[misc] # ROLL has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found = self.env.options.observation
            if found != observation:
                raise ConfigError(
                    f"{base.__name__} shows an environment by {observation!r}, but env_config.observation is {found!r}.",
                    remedy=f"Set env_config.observation: {observation}.",
                )
            if self.env.options.turn_rewards and observation == "delta":
                raise ConfigError(
                    f"turn_rewards has no effect with {base.__name__}, which makes one row of an episode, with one reward.",
                    remedy="Set turn_rewards: false in env_config, or use atropos_adapter_roll.managers.AgentNativeStepEnvManager.",
                )
            if self.worker_config.group_filter_cls != FILTER:
                raise ConfigError(
                    f"group_filter_cls is {self.worker_config.group_filter_cls!r}: failed episodes would be trained as a score "
                    "of 0, and groups that their environment scores as a whole would have no score.",
                    remedy=f"Set group_filter_cls: {FILTER} in train_env_manager and val_env_manager.",
                )
            _check_estimator(base.__name__, observation, self.pipeline_config, self.env_config)
            self.env.score_in_group(self.worker_config.group_size)
            self._reader = reader_of(self.tokenizer)

        def step(self, llm_output: Any) -> Any:
            """Give the environment the reply without special tokens, and with the `<think>` that its prompt may end in; ROLL decodes
            it with special tokens."""
            responses = responses_of(llm_output)
            if responses is None:  # the prompt left no room for a reply
                return super().step(SimpleNamespace(batch=None))
            decoded = self.tokenizer.batch_decode(responses, skip_special_tokens=False)[0]
            prompt = list(self.rollout_cache.history[-1]["prompt_ids"])[-PROMPTS_END:]
            opening = opening_of(str(self.tokenizer.decode(prompt, skip_special_tokens=False)))
            self.env.read_as(decoded, opening + self._reader.text(responses[0].tolist()))
            return super().step(llm_output)

        def formulate_rollouts(self, rollout_cache: Any) -> Any:
            too_long = self._add_missing_reply(rollout_cache.history)
            place_turn_rewards(rollout_cache.history, self.env.record()["turns"])
            rollout = super().formulate_rollouts(rollout_cache)
            record = self.env.record()
            if too_long or not record["ended"]:  # ROLL itself stops an episode at max_steps and at sequence_length
                record["failed"] = (
                    too_long or "the trainer ended the episode before its environment did (max_steps, sequence_length)"
                )
                rollout.meta_info.setdefault("metrics", {})[f"env/{self.rollout_cache.tag}/failed"] = 1.0
            rollout.meta_info["atropos"] = {**record, "tag": self.rollout_cache.tag}
            rollout.meta_info["drop_flag"] = bool(record["failed"])
            return rollout

        def _add_missing_reply(self, history: list[dict[str, Any]]) -> str:
            """The reason why there is no reply, if the first prompt left no room for one. ROLL makes rollouts of replies, so it then gets
            a reply of one token, for a rollout that is marked as failed."""
            if not history or any("response_ids" in one for one in history):
                return ""
            first, length = history[0], self.pipeline_config.sequence_length
            tokens = len(first["prompt_ids"])
            first["prompt_ids"] = list(first["prompt_ids"])[: length - 1]
            first["response_ids"] = [self.tokenizer.eos_token_id]
            first.setdefault("reward", 0.0)
            if len(history) == 1:
                history.append({"observation": "", "actions_left": 0, "messages": None})  # ROLL leaves the last one out
            if tokens < length:
                return "the trainer gave no reply to the first prompt"
            return (
                f"the first prompt has {tokens} tokens and leaves no room for a reply in sequence_length {length}: raise it, or "
                "leave out such long tasks"
            )

    Adapted.__name__ = Adapted.__qualname__ = base.__name__
    Adapted.__module__ = __name__
    return Adapted


def place_turn_rewards(history: list[dict[str, Any]], turns: Sequence[float]) -> None:
    """Give each reply the part of the reward that it earned, and the last one the rest, so that their sum stays what it was. Does nothing
    without `turns`."""
    replies = [one for one in history if "response_ids" in one]
    if len(turns) != len(replies) or len(turns) < 2:
        return
    total = sum(one["reward"] for one in replies)
    for one, reward in zip(replies, turns, strict=True):
        one["reward"] = reward
    replies[-1]["reward"] = math.fsum([total, *(-reward for reward in turns[:-1])])


def responses_of(llm_output: Any) -> Any:
    """The responses of a DataProto, or None. ROLL checks `batch is None`, which never holds since its batch became a proxy (v0.3)."""
    try:
        return llm_output.batch["responses"]
    except (KeyError, TypeError):
        return None


def _check_estimator(manager: str, observation: str, pipeline: Any, environment: Any) -> None:
    """Raises ConfigError if `adv_estimator` does not work with this manager's rows, or credits them wrongly."""
    estimator = getattr(pipeline, "adv_estimator", None)
    gamma = float(getattr(pipeline, "step_reward_gamma", 1.0))
    if observation == "delta" and estimator in BY_STEP:
        raise ConfigError(
            f"adv_estimator: {estimator} needs a row of each reply, but {manager} makes one row of an episode.",
            remedy="Set adv_estimator: grpo, or use atropos_adapter_roll.managers.AgentNativeStepEnvManager.",
        )
    if observation == "messages" and estimator is not None and (estimator not in BY_STEP or gamma <= 0):
        named = estimator if estimator not in BY_STEP else f"{estimator} with step_reward_gamma: {gamma:g}"
        raise ConfigError(
            f"adv_estimator: {named} gives each reply its own row's score, but an episode's score is only on its last reply: "
            f"with {manager} the earlier replies of a right episode would be trained as wrong.",
            remedy="Set adv_estimator: step_reinforce and step_reward_gamma: 1.0.",
        )
    if observation == "messages" and getattr(pipeline, "loss_agg_mode", None) == "seq-mean-token-mean":
        log.warning(
            "loss_agg_mode: seq-mean-token-mean is a mean over rows, and with %s a row is a reply: an episode counts once for "
            "each of its replies; token-mean gives every token the same weight.", manager,
        )  # fmt: skip
    if observation == "messages" and gamma < 1:
        log.warning(
            "step_reward_gamma is %g: of %s replies the first is credited with %.3g of what its episode earned, and where "
            "that is below its group's mean, a right episode's first reply is trained as wrong; 1.0 credits all alike.",
            gamma, environment["max_steps"], gamma ** (environment["max_steps"] - 1),
        )  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import ROLL when a manager is first used: gem's users do not have it."""
    if name not in BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(BASES)}")
    module, observation = BASES[name]
    try:
        base = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "roll":
            raise FitError(
                f"{name} needs ROLL, but there is no module {error.name!r}.",
                remedy="Put a checkout of ROLL on PYTHONPATH (the package index's `roll` is something else).",
            ) from error
        raise
    made = globals()[name] = adapted(base, observation)
    return made
