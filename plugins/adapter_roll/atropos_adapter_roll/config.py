"""The keys of ROLL's YAML under `env_config`, and the options of the adapter itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from atropos_core.config.error_text import explain
from atropos_core.errors import ConfigError
from atropos_core.plugins.options import Options

# Of Qwen, Phi, Llama, Gemma, Mistral, DeepSeek, GLM, gpt-oss and Command.
KNOWN_ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_text|>", "<end_of_turn>", "<eos>",
    "</s>", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_REWARD = "the environment's own score and bonuses: what the trainer receives"
HUNG_TIMEOUT_S = 3600.0  # ROLL's default, after which it calls an episode hung


class FormatBonus(Options):
    """A bonus for marks in the last reply."""

    weight: float = Field(0.1, ge=0, allow_inf_nan=False, description="added to the reward for each mark")
    markers: tuple[str, ...] = Field(
        ("\\boxed{}",),
        min_length=1,
        description="<tag>: closed and not empty; \\name{}: not empty; /regex/; any other text: literally",
    )

    @model_validator(mode="after")
    def _compiles(self) -> FormatBonus:
        for marker in self.markers:
            if not marker:
                raise ValueError("a marker must not be empty")
            if len(marker) > 2 and marker[0] == marker[-1] == "/":
                try:
                    re.compile(marker[1:-1])
                except re.error as error:
                    raise ValueError(f"marker {marker!r} is not a regular expression: {error}") from None
        return self


class LengthBonus(Options):
    """A bonus for brevity, in characters of all replies of the episode."""

    weight: float = Field(0.1, ge=0, allow_inf_nan=False, description="the whole bonus, in reward")
    at_least: int = Field(1, ge=0, description="shorter replies earn nothing")
    free: int = Field(400, ge=0, description="longest replies that earn the whole bonus")
    limit: int = Field(
        2000, ge=1, description="length from which they earn nothing; the bonus falls linearly in between"
    )

    @model_validator(mode="after")
    def _agrees(self) -> LengthBonus:
        if not self.at_least <= self.free < self.limit:
            raise ValueError(f"at_least {self.at_least} <= free {self.free} < limit {self.limit} does not hold")
        return self


class RewardOptions(Options):
    """The reward that the trainer receives: the environment's own score, plus bonuses."""

    environment: float = Field(1.0, allow_inf_nan=False, description="weight of the environment's own score")
    format: FormatBonus | None = Field(None, description="a bonus for marks in the last reply; unset: none")
    length: LengthBonus | None = Field(None, description="a bonus for brevity; unset: none")
    right_first: bool = Field(
        True, description="bonuses of a wrong reply are 0 or less, so that it cannot beat a right one"
    )

    @model_validator(mode="after")
    def _agrees(self) -> RewardOptions:
        if self.right_first and self.environment <= 0:
            raise ValueError(
                f"environment = {self.environment:g} does not rank a right answer first: give it a weight above 0, or set "
                "right_first to false"
            )
        return self


class EnvOptions(Options):
    """`env_config` of one of ROLL's `custom_envs`, or the keywords of `gem.make`."""

    environment: str = Field(description="as in --env: gsm8k, pkg.mod:Class, ./file.py:Class")
    options: Mapping[str, Any] = Field(default_factory=dict, description="options of the environment")
    split: Literal["train", "test"] = Field("train", description="split of the environment's tasks")
    observation: Literal["delta", "messages"] = Field(
        "delta",
        description="delta: only new text (TrajEnvManager); messages: all messages (AgentNativeStepEnvManager)",
    )
    system: str | None = Field(
        None,
        description="text of agent_system_template; a first system message must be the same, and is not repeated",
    )
    turn_rewards: bool = Field(
        False,
        description="give each reply's row the part of the reward that it earned, if the environment says it (AgentNativeStepEnvManager); "
        "false: the whole reward on the last row",
    )
    max_steps: int | None = Field(None, ge=1, description="replies after which an unfinished episode is cut off")
    end_of_turn: tuple[str, ...] | None = Field(
        None,
        description="texts removed from the end of a reply, next to the special tokens of ROLL's tokenizer; unset: none, or in gem, "
        "which has no tokenizer, those that end a turn of widely used models",
    )
    seed: int | None = Field(None, ge=0, description="for reset() without a seed; gem.make_vec gives one to each")
    open_deadline_s: float = Field(600.0, gt=0, lt=HUNG_TIMEOUT_S, description="seconds for the environment to open")
    step_deadline_s: float = Field(
        300.0, gt=0, lt=HUNG_TIMEOUT_S, description="seconds for the environment between two replies"
    )
    action_deadline_s: float = Field(1800.0, gt=0, lt=HUNG_TIMEOUT_S, description="seconds for the trainer to answer")
    episode_deadline_s: float = Field(3000.0, gt=0, lt=HUNG_TIMEOUT_S, description="seconds for one episode")
    cleanup_deadline_s: float = Field(
        30.0, gt=0, lt=HUNG_TIMEOUT_S, description="seconds for an ended episode to clean up"
    )
    reward: RewardOptions = Field(default_factory=RewardOptions, description=_REWARD)

    @model_validator(mode="after")
    def _agrees(self) -> EnvOptions:
        longest = max(self.episode_deadline_s, self.action_deadline_s, self.step_deadline_s)
        if longest + self.cleanup_deadline_s >= HUNG_TIMEOUT_S:
            raise ValueError(
                f"the longest deadline, {longest:g} s, and cleanup_deadline_s {self.cleanup_deadline_s:g} come to "
                f"{HUNG_TIMEOUT_S:g} s or more, after which ROLL calls an episode hung"
            )
        return self


class AdapterOptions(Options):
    """Options of `atropos adapter roll`."""

    manager: Literal["trajectory", "native"] = Field(
        "trajectory", description="trajectory: one token history an episode; native: one sample a reply"
    )
    max_turns: int = Field(1, ge=1, description="most replies in an episode")
    sequence_length: int | None = Field(None, ge=16, description="tokens of an episode; unset: 1,024 plus its replies")
    gpus: int = Field(1, ge=1, description="GPUs of one machine, shared by training and sampling")
    split: Literal["train", "test"] = Field("train", description="split of the environment's tasks")
    reward: RewardOptions = Field(default_factory=RewardOptions, description=_REWARD)
    trial_environment: str | None = Field(
        None, description="environment that `doctor` runs; unset: a small built-in one"
    )


def read_env_options(given: Mapping[str, Any]) -> EnvOptions:
    """Raises ConfigError that names the key. Also accepts ROLL's nested DictConfig."""
    try:
        return EnvOptions.model_validate(plain(given))
    except ValidationError as error:
        raise ConfigError(explain(error, EnvOptions, {}, "env_config.")) from error


def plain(value: Any) -> Any:
    """Convert any mappings and sequences to dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
