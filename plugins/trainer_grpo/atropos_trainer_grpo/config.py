"""The options of `[trainer]` with `use = "grpo"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from atropos_core.registry import Options

Loss = Literal["grpo", "dr_grpo", "dapo"]
Source = Literal["rollout", "recompute"]

LORA_RATE = (
    10.0  # times the rate of full training: "LoRA Without Regret", Thinking Machines Lab 2025, for SL and RL alike
)


class LoraOptions(Options):
    """`[trainer.lora]`: what is trained beside a base model that stays as it is."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="of the adapter's input, in the training forward pass alone: README.md, LoRA"
    )
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description='linear layers by their last name, as ["q_proj", "v_proj"]; all-linear: all but the head',
    )
    layers: tuple[int, ...] | None = Field(None, description="indices of the layers that are adapted; unset: all")
    learning_rate: float | None = Field(
        None, ge=0, description="of the adapter; unset: ten times trainer.learning_rate"
    )

    @field_validator("targets", "layers")
    @classmethod
    def _names_something(cls, value: object) -> object:
        if value == ():
            raise ValueError("an empty list would train nothing: leave it out, or name something")
        return value


class GrpoOptions(Options):
    """Defaults are one update a batch, strictly on-policy; README.md says what each loss is."""

    loss: Loss = Field("grpo", description="how token losses are averaged: README.md, Losses")
    clip_low: float = Field(0.2, ge=0, lt=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float | None = Field(
        None, ge=0, description="ratios above 1 + clip_high are clipped; unset: clip_low, or 0.28 for dapo"
    )
    loss_length: int | None = Field(
        None, gt=0, description="dr_grpo only: the constant number of tokens that a sequence's sum is divided by"
    )
    old_logprobs: Source = Field(
        "rollout",
        description="the denominator of the ratio: what the engine said, or the trainer's own before updating",
    )
    missing_logprobs: Literal["recompute", "refuse"] = Field(
        "recompute", description="for sequences that came without logprobs, where old_logprobs is rollout"
    )

    epochs: int = Field(1, ge=1, description="passes over one batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps in one pass")
    tokens_per_microbatch: int = Field(16384, ge=1, description="bounds the memory of activations; changes no result")
    logprob_chunk: int = Field(8192, ge=1, description="rows of logits that exist at once")
    share_prompts: bool = Field(True, description="compute the common prefix of a group's sequences once")
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activation memory")

    learning_rate: float = Field(1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is scaled down to this global norm")
    warmup_steps: int = Field(0, ge=0, description="optimiser steps over which the learning rate rises linearly")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the parameters; auto: float32 on a CPU, otherwise as config.json says (as engine_hf)"
    )
    lora: LoraOptions | None = Field(
        None,
        description="train an adapter; unset: the whole model, or, where the bridge carries adapters, one by default",
    )

    def with_lora(self) -> GrpoOptions:
        """As they are where an adapter is trained: `lora` is set, and the learning rate is the adapter's."""
        lora = self.lora or LoraOptions()
        rate = LORA_RATE * self.learning_rate if lora.learning_rate is None else lora.learning_rate
        return self.model_copy(update={"lora": lora, "learning_rate": rate})

    @property
    def clip_above(self) -> float:
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.loss == "dapo" else self.clip_low

    @model_validator(mode="after")
    def _loss_length_goes_with_dr_grpo(self) -> GrpoOptions:
        if self.loss == "dr_grpo" and self.loss_length is None:
            raise ValueError('loss = "dr_grpo" divides by a constant length: set loss_length, e.g. to max_tokens')
        if self.loss != "dr_grpo" and self.loss_length is not None:
            raise ValueError(f'loss_length has no meaning for loss = "{self.loss}": remove it, or use dr_grpo')
        return self
