"""The options of trainer, engine and bridge `tinker`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from atropos_core.advantages import Average
from atropos_core.plugins.options import Options

Decay = Annotated[float, Field(ge=0, lt=1)]
Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce"]


class TinkerTrainerOptions(Options):
    """Options of the trainer `tinker`. Losses, averages and bounds are those of the trainer `grpo`: the README there explains them."""

    base_model: str = Field("", description="the model's name at the server; unset: the only one that it offers")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of the server's weights: bounds by how much its sampler and its trainer may differ"
    )
    loss: Loss = Field("grpo", description="grpo, dr_grpo, dapo, gspo, cispo or reinforce")
    average: Average | None = Field(None, description="how token losses are averaged; unset: the loss's own way")
    clip_low: float | None = Field(
        None, ge=0, le=1, description="ratios below 1 - clip_low are clipped; unset: the loss's own, usually 0.2"
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="ratios above 1 + clip_high are clipped; unset: clip_low if the loss has equal bounds, else its own",
    )
    loss_length: int | None = Field(
        None, gt=0, description="divisor of a sequence's sum, with average = constant (the default of dr_grpo)"
    )
    rank: int = Field(32, ge=1, description="of the adapter's matrices")
    train_attention: bool = Field(True, description="adapt the layers of attention")
    train_mlp: bool = Field(True, description="adapt the MLPs")
    train_head: bool = Field(True, description="adapt the language-model head")
    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False, description="of the adapter")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="decay of AdamW's first and second moment")
    eps: float = Field(1e-12, gt=0, allow_inf_nan=False, description="of AdamW's denominator")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="of AdamW")
    max_grad_norm: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="the gradient is scaled down to this global norm; 0: it is not"
    )

    @model_validator(mode="after")
    def _check_loss(self) -> TinkerTrainerOptions:
        constant = self.average == "constant" or (self.average is None and self.loss == "dr_grpo")
        if constant and self.loss_length is None:
            raise ValueError(
                f'loss = "{self.loss}" averages over a constant length: set loss_length, for example to max_tokens'
            )
        if not constant and self.loss_length is not None:
            raise ValueError(
                f'loss_length has no effect with loss = "{self.loss}": remove it, or use dr_grpo or average = "constant"'
            )
        self.refuse_idle(
            self.loss != "reinforce", 'with loss = "reinforce", which has no such bound', "clip_low", "clip_high"
        )
        if not (self.train_attention or self.train_mlp or self.train_head):
            raise ValueError("train_attention, train_mlp and train_head are all false: nothing would be trained")
        return self


class TinkerEngineOptions(Options):
    """Options of the engine `tinker`."""

    base_model: str = Field("", description="the model's name at the server; unset: the only one that it offers")
    concurrency: int = Field(64, ge=1, description="requests that are at the server at once; more wait here")


class TinkerBridgeOptions(Options):
    """Options of the bridge `tinker`."""

    every: int = Field(1, ge=1, description="publish each version that this divides")
    ttl_hours: float = Field(
        24.0, ge=1, description="hours after which the server may delete the weights that were published for sampling"
    )
    deadline_s: float = Field(600.0, gt=0, description="seconds for one publication")
