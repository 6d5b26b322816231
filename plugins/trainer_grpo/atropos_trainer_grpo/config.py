"""The options of `[trainer]` with `use = "grpo"`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from atropos_core.plugins.options import Options

if TYPE_CHECKING:
    from atropos_core.interfaces import Transport

Average = Literal["sequence", "token", "constant", "sum"]
Correction = Literal["tis", "mis", "icepop", "kpop", "sequence_tis", "sequence_mis", "geometric_mis"]
Estimator = Literal["k1", "k2", "k3", "k3_ratio"]
Source = Literal["auto", "rollout", "recompute"]
CLIPS = {"grpo": 3, "dr_grpo": 3, "dapo": 3, "gspo": 3, "cispo": 2, "reinforce": 0}  # of clip_low, clip_high, dual_clip
CLIPS |= {"sapo": 0, "vespo": 0, "luspo": 3, "kpop": 0, "gmpo": 2, "dppo": 0}
BOUNDS: dict[Correction, tuple[float, float]] = {  # of rho: low, high; kpop: of the divergence
    "tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "kpop": (0.0, 0.1),
    "sequence_tis": (0.0, 2.0),
    "sequence_mis": (0.0, 2.0),
    "geometric_mis": (0.999, 1.001),
}
TABLES = ("sapo", "vespo", "kpop", "dppo")  # losses with their own options
Moments = Literal["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8"]

Decay = Annotated[float, Field(ge=0, lt=1)]

LORA_RATE = (
    10.0  # times the rate of full training: "LoRA Without Regret", Thinking Machines Lab 2025, for SL and RL alike
)


SUPERVISED_RATE = 2e-5  # of a whole model in supervised steps: the default of TRL's SFTConfig


class LoraOptions(Options):
    """`[trainer.lora]`: an adapter that is trained on top of a frozen base model."""

    rank: int = Field(16, ge=1, description="of the adapter's matrices")
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="of the adapter's input, only in the training forward pass: README.md, LoRA"
    )
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description='last names of linear layers, such as ["q_proj", "v_proj"], or of tensors of experts; all-linear: all of these except '
        "the head and routers",
    )
    layers: tuple[int, ...] | None = Field(None, description="indices of the adapted layers; unset: all")
    learning_rate: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="of the adapter; unset: ten times trainer.learning_rate"
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None, description="hold the base in 4 or 8 bits; round it first with `atropos quantize`"
    )

    @field_validator("targets", "layers")
    @classmethod
    def _names_something(cls, value: object) -> object:
        if value == ():
            raise ValueError("an empty list would train nothing: leave it out, or give at least one entry")
        return value


class KlOptions(Options):
    """`[trainer.kl]`: keeps the policy near a reference, the model that the run began with. It is a frozen copy; under LoRA
    it is the base."""

    coefficient: float = Field(
        0.04, gt=0, allow_inf_nan=False, description="times the divergence, in the loss or in the advantages"
    )
    estimator: Estimator = Field(
        "k3",
        description="k2 and k3_ratio (k3 times the ratio, TRL's default) have the gradient of KL(policy || reference): README.md",
    )
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: added to the loss; reward: k1 is taken from the advantages of each token and those before it",
    )

    @model_validator(mode="after")
    def _check_reward_estimator(self) -> KlOptions:
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError('place = "reward" needs estimator = "k1": only the sum of k1 is the divergence itself')
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                'estimator = "k1" has an expected gradient of 0 as a loss: use k2, k3 or k3_ratio, or place = "reward"'
            )
        return self


class DistillationOptions(Options):
    """`[trainer.distillation]`: learn from the teacher's logprobs in the groups (`[teacher.NAME]`, or columns of old
    environments)."""

    kind: Literal["forward", "reverse"] = Field(
        "forward",
        description="forward: KL(teacher || policy) over the teacher's likeliest tokens and one bucket for the rest; reverse: "
        "coefficient x (teacher's - policy's logprob) of the sampled token is added to its advantage",
    )
    coefficient: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="factor of the distillation; unset: 0.1, or 1 with alone = true"
    )
    alone: bool = Field(False, description="train without a policy loss")

    @property
    def weight(self) -> float:
        if self.coefficient is not None:
            return self.coefficient
        return 1.0 if self.alone else 0.1


class SapoOptions(Options):
    """`[trainer.sapo]`: how fast the gate of loss = "sapo" closes as a ratio leaves 1."""

    temperature_pos: float = Field(1.0, gt=0, allow_inf_nan=False, description="for positive advantages")
    temperature_neg: float = Field(1.05, gt=0, allow_inf_nan=False, description="for other advantages")


class VespoOptions(Options):
    """`[trainer.vespo]`: the kernel W^k exp(lambda (1 - W)) of loss = "vespo", by the sign of the advantage."""

    k_pos: float = Field(2.0, ge=0, allow_inf_nan=False, description="power for advantages >= 0")
    lambda_pos: float = Field(3.0, gt=0, allow_inf_nan=False, description="decay for advantages >= 0")
    k_neg: float = Field(3.0, ge=0, allow_inf_nan=False, description="power for negative advantages")
    lambda_neg: float = Field(2.0, gt=0, allow_inf_nan=False, description="decay for negative advantages")


class KpopOptions(Options):
    """`[trainer.kpop]`: the bound above which loss = "kpop" leaves a token out."""

    threshold: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="the largest divergence of a token that is kept, in nats"
    )


class DppoOptions(Options):
    """`[trainer.dppo]`: how far a token may move before loss = "dppo" leaves it out, by the sign of the advantage."""

    divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="of the sampled token against all others: tv: |p - q|; kl: KL(sampled from || policy), in nats",
    )
    threshold_pos: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="for positive advantages; unset: 0.2 with tv, 0.05 with kl"
    )
    threshold_neg: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="for negative advantages; unset: 0.2 with tv, 0.05 with kl"
    )


class RateOptions(Options):
    """One of `[[trainer.learning_rates]]`: another rate for some parameters. The first that matches a parameter counts."""

    pattern: str = Field(min_length=1, description="a regular expression that is searched in parameter names")
    factor: float | None = Field(None, ge=0, allow_inf_nan=False, description="factor of the trainer's learning rate")
    learning_rate: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="the rate itself, instead of a factor"
    )

    @model_validator(mode="after")
    def _says_one_thing(self) -> RateOptions:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        if (self.factor is None) == (self.learning_rate is None):
            raise ValueError(f"pattern {self.pattern!r} needs a factor or a learning_rate: give exactly one")
        return self


class CorrectionOptions(Options):
    """`[trainer.correction]`: weights for tokens that another policy sampled; needs old_logprobs = "recompute"."""

    kind: Correction = Field("tis", description="see README.md, Corrections")
    low: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="smaller ratios are left out (not with tis, sequence_tis, kpop); unset: the kind's default",
    )
    high: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="larger ratios are cut or left out; unset: the kind's default"
    )

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = BOUNDS[self.kind]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionOptions:
        from_above = self.kind in ("tis", "sequence_tis", "kpop")
        self.refuse_idle(
            not from_above,
            f'with kind = "{self.kind}", which has only an upper bound (mis and icepop have both)',
            "low",
        )
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low = {low:g} is not below high = {high:g}: every token would be left out")
        return self


BY_DEFAULT = CorrectionOptions(kind="tis")  # of old_logprobs = "auto"
CORRECTED = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "luspo",
    "gmpo",
    "reinforce",
)  # the other losses bound the ratio to the engine themselves


class GrpoOptions(Options):
    """Options of `grpo`. The defaults make one update a batch, strictly on-policy. README.md explains each loss."""

    loss: str = Field(
        "grpo",
        min_length=1,
        description=f"{', '.join(CLIPS)}, or your own: README.md, Losses",
    )
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
    dual_clip: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="bound on the ratio for negative advantages (verl: 3); unset: none",
    )
    loss_length: int | None = Field(
        None, gt=0, description="divisor of a sequence's sum, with average = constant (the default of dr_grpo)"
    )
    sapo: SapoOptions | None = Field(None, description='with loss = "sapo"; unset: the values of the paper')
    vespo: VespoOptions | None = Field(None, description='with loss = "vespo"; unset: the values of the paper')
    kpop: KpopOptions | None = Field(None, description='with loss = "kpop"; unset: the defaults')
    dppo: DppoOptions | None = Field(None, description='with loss = "dppo"; unset: the defaults')
    old_logprobs: Source = Field(
        "auto",
        description="denominator of the ratio. rollout: the engine's logprob; recompute: the trainer's before the update; auto: rollout, "
        "or if engine and trainer differ, recompute with correction tis: README.md, Corrections",
    )
    missing_logprobs: Literal["recompute", "refuse"] = Field(
        "recompute",
        description="for sequences without logprobs; not with old_logprobs = recompute",
    )

    correction: CorrectionOptions | None = Field(None, description="unset: none, except what old_logprobs = auto adds")
    kl: KlOptions | None = Field(None, description="unset: no reference model")
    distillation: DistillationOptions | None = Field(None, description="unset: a teacher's columns are ignored")
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="the entropy of each distribution, times this, is subtracted from the loss",
    )
    whiten_advantages: bool = Field(
        False, description="scale to mean 0 and standard deviation 1 over the batch's tokens (REINFORCE++)"
    )

    epochs: int = Field(1, ge=1, description="passes over one batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps in one pass")
    tokens_per_microbatch: int = Field(
        16384, ge=1, description="bounds the memory of activations; changes results only by rounding"
    )
    logprob_chunk: int = Field(8192, ge=1, description="rows of logits that exist at once, at most")
    layout: Literal["auto", "packed", "rows"] = Field(
        "auto",
        description="sequences in one row, or each in a row of its own; auto: packed if that is exact for the model: README.md, Layout",
    )
    router_replay: bool = Field(
        False,
        description="of a mixture of experts: take the experts that the engine chose for each token: README.md, Router replay",
    )
    share_prompts: bool = Field(
        True,
        description="compute a common beginning of a micro-batch's sequences once: prompts, turns before a branch",
    )
    attention: Literal["auto", "padded", "flash"] = Field(
        "auto",
        description="over packed rows; auto: flash if sequences share most of their tokens: README.md, Attention",
    )
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activation memory")
    checkpointed_layers: int | None = Field(
        None, ge=1, description="how many layers gradient_checkpointing computes again, from the first; unset: all"
    )
    activation_offloading: bool = Field(
        False,
        description="inputs of checkpointed layers wait in host memory; with gradient_checkpointing, on CUDA: README.md, Memory",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch",
        description="of norms, rotary embedding and gated MLPs; liger: liger-kernel's, on CUDA: README.md, Kernels",
    )
    compile_layers: bool = Field(
        False, description="compile decoder layers by torch.compile; the first updates take longer: README.md, Kernels"
    )

    optimizer: Moments = Field(
        "adamw", description="AdamW with moments in fp32, or in fewer bits by torchao: README.md, Optimisers"
    )
    optimizer_offloading: bool = Field(
        False, description="moments and fp32 masters in host memory, and AdamW runs there; on CUDA: README.md, Memory"
    )
    learning_rate: float = Field(1e-6, ge=0, allow_inf_nan=False, description="of the optimiser, after warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="decay of AdamW's first and second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="of AdamW's denominator")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="of parameters with two or more axes; not of norms and biases"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="the gradient is scaled down to this global norm"
    )
    warmup_steps: int = Field(0, ge=0, description="optimiser steps over which the learning rate rises linearly")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after warm-up, over all optimiser steps of the run"
    )
    schedule_floor: float = Field(0.0, ge=0, le=1, description="fraction of the learning rate at which a schedule ends")
    learning_rates: tuple[RateOptions, ...] = Field((), description="other rates for some parameters, by name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the parameters; auto: float32 on a CPU, otherwise that of config.json (as in engine_hf)"
    )
    lora: LoraOptions | None = Field(
        None,
        description="train an adapter; unset: the whole model, or a default adapter if the bridge carries adapters",
    )

    @property
    def loss_values(self) -> dict[str, float | str | None]:
        """Options of the loss's own table, if it has one."""
        table = getattr(self, self.loss) if self.loss in TABLES else None
        return {} if table is None else table.model_dump()

    @property
    def takes_dual_clip(self) -> bool:
        return CLIPS.get(self.loss, 0) == 3

    @property
    def updates_once(self) -> bool:
        """True if the ratio to the trainer's own logprobs before the update is always 1."""
        return self.epochs * self.minibatches == 1 and not (self.lora is not None and self.lora.dropout)

    def adapts(self, transports: Sequence[Transport | None]) -> bool:
        """Return whether an adapter is trained. `transports`: how weights travel to each engine."""
        return self.lora is not None or "adapter" in transports

    def with_lora(self) -> GrpoOptions:
        """Return the options for training an adapter: `lora` is set, and the learning rate is the adapter's."""
        lora = self.lora or LoraOptions()
        rate = LORA_RATE * self.learning_rate if lora.learning_rate is None else lora.learning_rate
        return self.model_copy(update={"lora": lora, "learning_rate": rate})

    def supervised(self) -> GrpoOptions:
        """Return the options for a supervised step: one update of the whole batch, without advantages, ratios or a reference."""
        off = (
            "average", "clip_low", "clip_high", "dual_clip", "loss_length", "old_logprobs", "missing_logprobs", "correction", "kl",
            "distillation", "entropy_coefficient", "whiten_advantages", "epochs", "minibatches", "router_replay",
            *TABLES,
        )  # fmt: skip
        fields = GrpoOptions.model_fields
        return self.model_copy(update={"loss": "supervised"} | {name: fields[name].get_default() for name in off})

    def corrected(self) -> GrpoOptions:
        """Return the options for an engine and a trainer that differ: `auto` with a correction acts like "recompute".

        They stay as they are if an option of the ratio to the engine's logprobs is set, or if there is nothing to weight.
        """
        kept = self.changed("clip_low", "clip_high", "dual_clip", "missing_logprobs")
        learns = self.distillation is None or not self.distillation.alone or self.distillation.kind == "reverse"
        if self.old_logprobs != "auto" or kept or self.loss not in CORRECTED or not learns:
            return self
        return self.model_copy(update={"correction": BY_DEFAULT})

    @model_validator(mode="after")
    def _check_loss_length(self) -> GrpoOptions:
        constant = self.average == "constant" or (self.average is None and self.loss == "dr_grpo")
        if constant and self.loss_length is None:
            raise ValueError(
                f'loss = "{self.loss}" averages over a constant length: set loss_length, for example to max_tokens'
            )
        if not constant and self.loss_length is not None and self.loss in CLIPS:
            raise ValueError(
                f'loss_length has no effect with loss = "{self.loss}": remove it, or use dr_grpo or average = "constant"'
            )
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> GrpoOptions:
        if self.correction is not None and self.old_logprobs != "recompute":
            raise ValueError(
                "correction compares the trainer's own logprobs with the engine's: set old_logprobs = \"recompute\""
            )
        return self

    @model_validator(mode="after")
    def _check_effect(self) -> GrpoOptions:
        for name in TABLES:
            self.refuse_idle(self.loss == name, f'with loss = "{self.loss}": it belongs to loss = "{name}"', name)
        clips = ("clip_low", "clip_high", "dual_clip")
        for name in clips[CLIPS.get(self.loss, 3) :]:
            self.refuse_idle(False, f'with loss = "{self.loss}", which has no such bound', name)
        self.refuse_idle(
            not (self.updates_once and self.old_logprobs == "recompute"),
            'with old_logprobs = "recompute" and one update a batch: the ratio is 1 (raise epochs or minibatches)',
            *clips,
            *TABLES,
        )
        self.refuse_idle(
            self.old_logprobs != "recompute",
            'with old_logprobs = "recompute", which recomputes all',
            "missing_logprobs",
        )
        self.refuse_idle(
            self.gradient_checkpointing,
            "without gradient_checkpointing: no layer is computed again",
            "checkpointed_layers",
            "activation_offloading",
        )
        self.refuse_idle(
            self.layout != "rows",
            'with layout = "rows", which takes the model\'s own attention',
            "attention",
            "share_prompts",
        )
        self.refuse_idle(
            self.schedule != "constant", 'with schedule = "constant", which does not end', "schedule_floor"
        )
        alone = self.distillation is not None and self.distillation.alone
        where = "with distillation.alone = true, which ignores the rewards' advantages"
        self.refuse_idle(not alone, where, "whiten_advantages")
        if alone and self.kl is not None and self.kl.place == "reward":
            raise ValueError(f'kl.place = "reward" has no effect {where}: use place = "loss"')
        if alone and self.distillation is not None and self.distillation.kind == "forward":
            self.refuse_idle(False, "with distillation.alone = true: there is no policy loss", *clips, "correction")
        return self
