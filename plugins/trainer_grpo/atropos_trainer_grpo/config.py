"""The options of `[trainer]` with `use = "grpo"`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from atropos_core.plugins.provider import Options

if TYPE_CHECKING:
    from atropos_core.interfaces import Transport

Average = Literal["sequence", "token", "constant", "sum"]
Correction = Literal["tis", "mis", "icepop", "kpop", "sequence_tis", "sequence_mis", "geometric_mis"]
Estimator = Literal["k1", "k2", "k3", "k3_ratio"]
Source = Literal["auto", "rollout", "recompute"]
CLIPS = {"grpo": 3, "dr_grpo": 3, "dapo": 3, "gspo": 3, "cispo": 2, "reinforce": 0}  # of clip_low, clip_high, dual_clip
CLIPS |= {"sapo": 0, "vespo": 0, "luspo": 3, "kpop": 0}
BOUNDS: dict[Correction, tuple[float, float]] = {  # of rho: low, high; kpop: of the divergence
    "tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "kpop": (0.0, 0.1),
    "sequence_tis": (0.0, 2.0),
    "sequence_mis": (0.0, 2.0),
    "geometric_mis": (0.999, 1.001),
}
TABLES = ("sapo", "vespo", "kpop")  # losses with options of their own
Moments = Literal["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8"]

Decay = Annotated[float, Field(ge=0, lt=1)]

LORA_RATE = (
    10.0  # times the rate of full training: "LoRA Without Regret", Thinking Machines Lab 2025, for SL and RL alike
)


class LoraOptions(Options):
    """`[trainer.lora]`: what is trained beside a base model that stays as it is."""

    rank: int = Field(16, ge=1, description="of the adapter's matrices")
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="of the adapter's input, in the training forward pass alone: README.md, LoRA"
    )
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description='linear layers by their last name, as ["q_proj", "v_proj"]; all-linear: all but the head',
    )
    layers: tuple[int, ...] | None = Field(None, description="indices of the layers that are adapted; unset: all")
    learning_rate: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="of the adapter; unset: ten times trainer.learning_rate"
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None, description="hold the base in 4 or 8 bits; its weights must lie on that grid: `atropos quantize`"
    )

    @field_validator("targets", "layers")
    @classmethod
    def _names_something(cls, value: object) -> object:
        if value == ():
            raise ValueError("an empty list would train nothing: leave it out, or name something")
        return value


class KlOptions(Options):
    """`[trainer.kl]`: keeps the policy near a reference, which is the model that the run began with: a frozen copy, or
    under LoRA the base itself."""

    coefficient: float = Field(
        0.04, gt=0, allow_inf_nan=False, description="times the divergence, in the loss or in the advantages"
    )
    estimator: Estimator = Field(
        "k3",
        description="k3_ratio, k3 times the ratio as TRL has it by default, and k2 have the gradient of KL(policy || reference): README.md",
    )
    place: Literal["loss", "reward"] = Field(
        "loss", description="beside the loss; or, with k1, taken from the advantages of each token and those before it"
    )

    @model_validator(mode="after")
    def _a_reward_takes_k1(self) -> KlOptions:
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                'place = "reward" is for estimator = "k1": it is the one whose sum is the divergence itself'
            )
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                'estimator = "k1" has no gradient on average as a loss: use k2, k3 or k3_ratio, or place = "reward"'
            )
        return self


class DistillationOptions(Options):
    """`[trainer.distillation]`: learn from the teacher's logprobs that groups bring (`[teacher.NAME]`, or columns of old
    environments)."""

    kind: Literal["forward", "reverse"] = Field(
        "forward",
        description="forward: KL(teacher || policy) over the teacher's likeliest tokens and the rest as one; reverse: "
        "coefficient x (teacher's - policy's logprob) of the sampled token is added to its advantage",
    )
    coefficient: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="times the distillation; unset: 0.1, or 1 where it is alone"
    )
    alone: bool = Field(False, description="no policy loss beside it")

    @property
    def weight(self) -> float:
        if self.coefficient is not None:
            return self.coefficient
        return 1.0 if self.alone else 0.1


class SapoOptions(Options):
    """`[trainer.sapo]`: how fast the gate of loss = "sapo" closes as a ratio leaves 1."""

    temperature_pos: float = Field(1.0, gt=0, allow_inf_nan=False, description="where the advantage is positive")
    temperature_neg: float = Field(1.05, gt=0, allow_inf_nan=False, description="where it is not")


class VespoOptions(Options):
    """`[trainer.vespo]`: the kernel W^k exp(lambda (1 - W)) of loss = "vespo", by the sign of the advantage."""

    k_pos: float = Field(2.0, ge=0, allow_inf_nan=False, description="its power, where the advantage is not negative")
    lambda_pos: float = Field(3.0, gt=0, allow_inf_nan=False, description="its decay there")
    k_neg: float = Field(3.0, ge=0, allow_inf_nan=False, description="its power, where the advantage is negative")
    lambda_neg: float = Field(2.0, gt=0, allow_inf_nan=False, description="its decay there")


class KpopOptions(Options):
    """`[trainer.kpop]`: which tokens loss = "kpop" leaves out."""

    threshold: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="the largest divergence of a token that is kept, in nats"
    )


class RateOptions(Options):
    """One of `[[trainer.learning_rates]]`: what other parameters learn at. The first that matches a parameter counts."""

    pattern: str = Field(min_length=1, description="a regular expression, found anywhere in the parameter's name")
    factor: float | None = Field(None, ge=0, allow_inf_nan=False, description="times the learning rate of the others")
    learning_rate: float | None = Field(None, ge=0, allow_inf_nan=False, description="in place of a factor")

    @model_validator(mode="after")
    def _says_one_thing(self) -> RateOptions:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error
        if (self.factor is None) == (self.learning_rate is None):
            raise ValueError(f"pattern {self.pattern!r} takes a factor or a learning_rate: give one of them")
        return self


class CorrectionOptions(Options):
    """`[trainer.correction]`: weights for tokens that another policy sampled; needs old_logprobs = "recompute"."""

    kind: Correction = Field("tis", description="README.md, Corrections")
    low: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="ratios below are left out, but by the kinds of tis and kpop; unset: as the kind has it",
    )
    high: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="ratios above are cut or left out; unset: as the kind has it"
    )

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = BOUNDS[self.kind]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> CorrectionOptions:
        from_above = self.kind in ("tis", "sequence_tis", "kpop")
        self.refuse_idle(
            not from_above, f'with kind = "{self.kind}", which only bounds from above (mis, icepop leave out)', "low"
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
    "reinforce",
)  # the others bound the ratio to the engine themselves


class GrpoOptions(Options):
    """Defaults are one update a batch, strictly on-policy; README.md says what each loss is."""

    loss: str = Field(
        "grpo",
        min_length=1,
        description=f"{', '.join(CLIPS)}, or one of your own: README.md, Losses",
    )
    average: Average | None = Field(None, description="how token losses are averaged; unset: as the loss has it")
    clip_low: float | None = Field(
        None, ge=0, le=1, description="ratios below 1 - clip_low are clipped; unset: as the loss has it, most often 0.2"
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="ratios above 1 + clip_high are clipped; unset: clip_low, where the loss has both alike, or its own",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="the ratio's bound where the advantage is negative (verl: 3); unset: none",
    )
    loss_length: int | None = Field(
        None, gt=0, description="with average = constant, as dr_grpo has it: what a sequence's sum is divided by"
    )
    sapo: SapoOptions | None = Field(None, description='with loss = "sapo"; unset: the paper\'s')
    vespo: VespoOptions | None = Field(None, description='with loss = "vespo"; unset: the paper\'s')
    kpop: KpopOptions | None = Field(None, description='with loss = "kpop"; unset: the defaults')
    old_logprobs: Source = Field(
        "auto",
        description="the denominator of the ratio: the engine's logprob, or the trainer's own before updating; auto: the engine's, "
        "and where engine and trainer differ the trainer's, with correction tis: README.md, Corrections",
    )
    missing_logprobs: Literal["recompute", "refuse"] = Field(
        "recompute",
        description="for sequences without logprobs, or with those that top_p or top_k renormalised, where old_logprobs is not "
        "recompute",
    )

    correction: CorrectionOptions | None = Field(None, description="unset: none, but for what old_logprobs = auto does")
    kl: KlOptions | None = Field(None, description="unset: no reference model")
    distillation: DistillationOptions | None = Field(None, description="unset: a teacher's columns are not looked at")
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="this much of the entropy of each distribution is taken from the loss",
    )
    whiten_advantages: bool = Field(
        False, description="to mean 0 and standard deviation 1 over the batch's tokens (REINFORCE++)"
    )

    epochs: int = Field(1, ge=1, description="passes over one batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps in one pass")
    tokens_per_microbatch: int = Field(
        16384, ge=1, description="bounds the memory of activations; changes results only by rounding"
    )
    logprob_chunk: int = Field(8192, ge=1, description="rows of logits that exist at once, at most")
    share_prompts: bool = Field(
        True,
        description="compute once what sequences of a micro-batch begin with in common: prompts, turns before a branch",
    )
    attention: Literal["auto", "padded", "flash"] = Field(
        "auto",
        description="over packed rows; auto: flash where sequences share most of their tokens: README.md, Attention",
    )
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activation memory")
    checkpointed_layers: int | None = Field(
        None, ge=1, description="layers that gradient_checkpointing computes again, from the first on; unset: all"
    )
    activation_offloading: bool = Field(
        False,
        description="what layers are computed again from waits in host memory; with gradient_checkpointing, on CUDA: README.md, Memory",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch", description="of norms, rotation and gated MLPs; liger: liger-kernel's, on CUDA: README.md, Kernels"
    )

    optimizer: Moments = Field(
        "adamw", description="AdamW, with moments in fp32, or in fewer bits by torchao: README.md, Optimisers"
    )
    optimizer_offloading: bool = Field(
        False, description="moments and fp32 masters in host memory, where AdamW runs; on CUDA: README.md, Memory"
    )
    learning_rate: float = Field(1e-6, ge=0, allow_inf_nan=False, description="of the optimiser, after warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="decay of AdamW's first and second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="of AdamW's denominator")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="of parameters with two or more axes: not of norms and biases"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="the gradient is scaled down to this global norm"
    )
    warmup_steps: int = Field(0, ge=0, description="optimiser steps over which the learning rate rises linearly")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after warm-up, over all optimiser steps of the run"
    )
    schedule_floor: float = Field(0.0, ge=0, le=1, description="the part of the learning rate that a schedule ends at")
    learning_rates: tuple[RateOptions, ...] = Field((), description="other rates for some parameters, by their names")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the parameters; auto: float32 on a CPU, otherwise as config.json says (as engine_hf)"
    )
    lora: LoraOptions | None = Field(
        None,
        description="train an adapter; unset: the whole model, or, where the bridge carries adapters, one by default",
    )

    @property
    def loss_values(self) -> dict[str, float]:
        """Options that are the loss's own, where it has a table of them."""
        table = getattr(self, self.loss) if self.loss in TABLES else None
        return {} if table is None else table.model_dump()

    @property
    def takes_dual_clip(self) -> bool:
        return CLIPS.get(self.loss, 0) == 3

    @property
    def updates_once(self) -> bool:
        """Whether the ratio to the trainer's own logprobs before the update is 1 throughout."""
        return self.epochs * self.minibatches == 1 and not (self.lora is not None and self.lora.dropout)

    def adapts(self, transports: Sequence[Transport | None]) -> bool:
        """Whether an adapter is trained. `transports`: how weights travel to each engine."""
        return self.lora is not None or "adapter" in transports

    def with_lora(self) -> GrpoOptions:
        """As they are where an adapter is trained: `lora` is set, and the learning rate is the adapter's."""
        lora = self.lora or LoraOptions()
        rate = LORA_RATE * self.learning_rate if lora.learning_rate is None else lora.learning_rate
        return self.model_copy(update={"lora": lora, "learning_rate": rate})

    def corrected(self) -> GrpoOptions:
        """As they are where engine and trainer differ: `auto` with a correction, under which it is "recompute". Unless an option
        is set that is of the ratio to the engine's logprobs, or nothing would be weighed."""
        kept = self.changed("clip_low", "clip_high", "dual_clip", "missing_logprobs")
        learns = self.distillation is None or not self.distillation.alone or self.distillation.kind == "reverse"
        if self.old_logprobs != "auto" or kept or self.loss not in CORRECTED or not learns:
            return self
        return self.model_copy(update={"correction": BY_DEFAULT})

    @model_validator(mode="after")
    def _loss_length_goes_with_a_constant(self) -> GrpoOptions:
        constant = self.average == "constant" or (self.average is None and self.loss == "dr_grpo")
        if constant and self.loss_length is None:
            raise ValueError(
                f'loss = "{self.loss}" averages over a constant length here: set loss_length, e.g. to max_tokens'
            )
        if not constant and self.loss_length is not None and self.loss in CLIPS:
            raise ValueError(
                f'loss_length has no meaning for loss = "{self.loss}": remove it, or use dr_grpo or average = "constant"'
            )
        return self

    @model_validator(mode="after")
    def _a_correction_needs_our_own_logprobs(self) -> GrpoOptions:
        if self.correction is not None and self.old_logprobs != "recompute":
            raise ValueError(
                "correction weighs the trainer's own logprobs against the engine's: set old_logprobs = \"recompute\""
            )
        return self

    @model_validator(mode="after")
    def _every_option_has_an_effect(self) -> GrpoOptions:
        for name in TABLES:
            self.refuse_idle(self.loss == name, f'with loss = "{self.loss}": it is of loss = "{name}"', name)
        clips = ("clip_low", "clip_high", "dual_clip")
        for name in clips[CLIPS.get(self.loss, 3) :]:
            self.refuse_idle(False, f'with loss = "{self.loss}", which has no such bound', name)
        self.refuse_idle(
            not (self.updates_once and self.old_logprobs == "recompute"),
            'with old_logprobs = "recompute" and one update a batch, where the ratio is 1 (epochs and minibatches make more)',
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
            "without gradient_checkpointing, where no layer is computed again",
            "checkpointed_layers",
            "activation_offloading",
        )
        self.refuse_idle(
            self.schedule != "constant", 'with schedule = "constant", which ends nowhere', "schedule_floor"
        )
        alone = self.distillation is not None and self.distillation.alone
        where = "with distillation.alone = true, which leaves the rewards' advantages out"
        self.refuse_idle(not alone, where, "whiten_advantages")
        if alone and self.kl is not None and self.kl.place == "reward":
            raise ValueError(f'kl.place = "reward" has no effect {where}: use place = "loss"')
        if alone and self.distillation is not None and self.distillation.kind == "forward":
            self.refuse_idle(
                False, "with distillation.alone = true, where there is no policy loss", *clips, "correction"
            )
        return self
