"""The section [health] of a run file: one table a check, with its thresholds and what it does."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Action = Literal["off", "warn", "pause", "stop"]


class Check(BaseModel):
    """`steps` in a row that look wrong make a run ill, and as many that look right make it well again; the first wrong one
    makes it suspect."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    action: Action | None = None  # None: health.action
    steps: int = Field(3, ge=1)


class AtOnce(Check):
    steps: int = Field(1, ge=1)


class Soon(Check):
    steps: int = Field(2, ge=1)


class Tolerance(AtOnce):
    tolerance: float = Field(1e-3, ge=0)  # relative to the largest score, or absolute where that is below 1


class Growth(Soon):
    ratio: float = Field(10.0, gt=1)  # times what was usual


class ShareAbove(Check):
    share: float = Field(0.5, ge=0, lt=1)


class FailedRewards(Soon):
    share: float = Field(0.02, ge=0, lt=1)


class FailedRollouts(Soon):
    share: float = Field(0.2, ge=0, lt=1)


class Entropy(Check):
    floor_nats: float = Field(0.003, ge=0)
    fall: float = Field(0.1, ge=0, lt=1)  # of what was usual


class Surprise(Check):
    z: float = Field(6.0, gt=0)  # standard errors that the mean of -log p may be off the entropy
    floor_nats: float = Field(0.02, ge=0)  # and nats; below it nobody minds


class Unexplained(AtOnce):
    nats: float = Field(10.0, gt=0)  # of one sequence, beyond what the policy's movement explains


class Drift(Check):
    ratio: float = Field(10.0, gt=1)
    floor_nats: float = Field(1e-3, ge=0)  # below it, rounding


class Length(Check):
    ratio: float = Field(2.5, gt=1)  # times, or one over, what was usual
    cut_off: float = Field(0.5, gt=0, le=1)  # more of the rollouts cut off than usual


class SlowDisk(Check):
    share: float = Field(0.3, gt=0, lt=1)  # of the wall time
    floor_s: float = Field(0.5, ge=0)  # a step; below it nobody minds


class Throughput(Check):
    ratio: float = Field(4.0, gt=1)  # times slower than usual
    floor_s: float = Field(1.0, ge=0)  # a step


class Silence(AtOnce):
    after_s: float = Field(120.0, gt=0)  # without the groups of a step, and
    ratio: float = Field(10.0, ge=1)  # times what waiting for them usually takes


class HealthSection(BaseModel):
    """The name of a check is the name of its metric, `health/NAME`: 0 ok, 1 suspect, 2 ill."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    action: Action = "warn"
    rescore_every: int = Field(2, ge=0)  # steps between two looks at whether rewards say the same again; 0: never
    rescore_groups: int = Field(1, ge=1)  # of the step, and as many that are kept from the first one
    reward_determinism: Tolerance = Tolerance()
    reward_drift: Tolerance = Tolerance()
    reward_collapse: Check = Check()
    reward_explosion: Growth = Growth()
    failed_rewards: FailedRewards = FailedRewards()
    failed_plays: FailedRollouts = FailedRollouts()
    partial_groups: ShareAbove = ShareAbove()
    stale_share: ShareAbove = ShareAbove()
    advantages: Growth = Growth()
    entropy: Entropy = Entropy()
    length: Length = Length()
    dead_gradients: Soon = Soon()
    frozen_weights: Check = Check()
    not_finite: AtOnce = AtOnce()
    logprob_drift: Drift = Drift()
    sampling: Surprise = Surprise()
    unchecked: ShareAbove = ShareAbove()
    claimed_logprobs: Unexplained = Unexplained()
    slow_disk: SlowDisk = SlowDisk()
    throughput: Throughput = Throughput()
    silence: Silence = Silence()

    def action_of(self, name: str) -> Action:
        check: Check = getattr(self, name)
        return "off" if self.action == "off" else check.action or self.action
