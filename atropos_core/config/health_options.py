"""The section [health] of a run file: one table a check, with its thresholds and what it does."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from atropos_core.plugins.options import NoBooleanIsANumber

Action = Literal["off", "warn", "pause", "stop"]
ActionOrRollback = Literal["off", "warn", "pause", "stop", "rollback"]
STEPS = "wrong steps in a row that make the check ill; as many right ones make it ok again"


class Check(NoBooleanIsANumber):
    """A check becomes suspect at the first wrong step, ill after `steps` in a row, and ok again after as many right steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    action: Action | None = Field(None, description="what to do once it is ill; unset: health.action")
    steps: int = Field(3, ge=1, description=STEPS)


class AtOnce(Check):
    steps: int = Field(1, ge=1, description=STEPS)


class Soon(Check):
    steps: int = Field(2, ge=1, description=STEPS)


class Tolerance(AtOnce):
    tolerance: float = Field(1e-3, ge=0, description="relative to the largest score, or absolute if that is below 1")


class Growth(Soon):
    ratio: float = Field(10.0, gt=1, description="wrong above this multiple of the usual value")


class ShareAbove(Check):
    share: float = Field(0.5, ge=0, lt=1, description="wrong above this share, from 0 to 1")


class FailedRewards(Soon):
    share: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="wrong if more than this share of the rollouts, from 0 to 1, could not be scored",
    )


class FailedRollouts(Soon):
    share: float = Field(
        0.2, ge=0, lt=1, description="wrong if more than this share of the rollouts, from 0 to 1, failed"
    )


class Entropy(Check):
    floor_nats: float = Field(
        0.003, ge=0, description="wrong if the mean -log p of sampled tokens, in nats, is below this"
    )
    fall: float = Field(0.1, ge=0, lt=1, description="wrong below this share of the usual value, from 0 to 1")


class Surprise(Check):
    z: float = Field(6.0, gt=0, description="standard errors by which the mean of -log p may differ from the entropy")
    floor_nats: float = Field(0.02, ge=0, description="nats by which it must also differ")


class Unexplained(AtOnce):
    nats: float = Field(
        10.0, gt=0, description="wrong if a sequence differs by this many nats more than the policy's movement explains"
    )


class Drift(Check):
    ratio: float = Field(10.0, gt=1, description="wrong above this multiple of the usual value")
    floor_nats: float = Field(1e-3, ge=0, description="differences below this many nats count as rounding")


class Length(Check):
    ratio: float = Field(2.5, gt=1, description="wrong above this multiple of the usual length, or below its inverse")
    cut_off: float = Field(
        0.5,
        gt=0,
        le=1,
        description="wrong if the share of rollouts that are cut off, from 0 to 1, exceeds the usual by this",
    )


class CutOff(AtOnce):
    share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="wrong if more than this share of the rollouts, from 0 to 1, are cut off with the step's lowest reward",
    )


class ChatTemplate(AtOnce):
    share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="wrong if more than this share of the replies, from 0 to 1, write another turn, or are empty",
    )


class AnswerFormat(Check):
    share: float = Field(
        0.05, ge=0, lt=1, description="wrong if no more than this share of the replies, from 0 to 1, have an answer"
    )


class LengthReward(Check):
    correlation: float = Field(
        0.8, gt=0, lt=1, description="wrong from this correlation of reward and length within groups on"
    )
    ratio: float = Field(1.3, gt=1, description="if replies have also grown by this factor since the first steps")


class BrokenPolicy(AtOnce):
    nats: float = Field(5.0, gt=0, description="nats by which an update must have moved a logprob of the probe")
    rise_nats: float = Field(
        2.0, gt=0, description="nats by which the entropy of what is sampled must have risen after it"
    )


class Collapse(Soon):
    fall: float = Field(0.5, gt=0, description="share of the usual mean reward that must be lost")
    nats: float = Field(
        1.0, gt=0, description="nats by which one of the last three updates must have moved a logprob of the probe"
    )


class RewardHacking(Soon):
    action: ActionOrRollback | None = Field(  # type: ignore[assignment] # frozen, so that a wider type is safe
        None,
        description="what to do once it is ill; unset: health.action. rollback: continue from a checkpoint before the exploit, with "
        "a lower weight of the reward that was gamed",
    )
    least: float = Field(
        0.5,
        gt=0,
        description="standard deviations of a rollout by which the trained reward must have risen, and the gold reward not half as far",
    )
    z: float = Field(4.0, gt=0, description="standard errors that the difference of the two must have")
    canary_rise: float = Field(
        0.1, gt=0, le=1, description="wrong if the share of rollouts that use a canary, from 0 to 1, rises by this"
    )
    rollback_weight: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="what a rollback multiplies the weight of the gamed reward by; 0: it is no longer trained on",
    )
    rollbacks: int = Field(1, ge=1, description="how often the run may roll back; a finding after that pauses the run")

    @model_validator(mode="after")
    def _has_effect(self) -> RewardHacking:
        for name in ("rollback_weight", "rollbacks"):
            if self.action != "rollback" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} has no effect without action = "rollback": remove it, or set the action')
        return self


class SlowDisk(Check):
    share: float = Field(0.3, gt=0, lt=1, description="wrong above this share of the wall time, from 0 to 1")
    floor_s: float = Field(0.5, ge=0, description="fewer seconds per step are never wrong")


class Throughput(Check):
    ratio: float = Field(4.0, gt=1, description="wrong above this multiple of a step's usual time")
    floor_s: float = Field(1.0, ge=0, description="fewer seconds per step are never wrong")


class Silence(AtOnce):
    after_s: float = Field(120.0, gt=0, description="seconds in which no rollout, reply or reward ends, and")
    ratio: float = Field(10.0, ge=1, description="this many times the usual wait for the groups of a step")


class HealthSection(NoBooleanIsANumber):
    """The name of a check is the name of its metric, `health/NAME`: 0 ok, 1 suspect, 2 ill."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    action: Action = Field(
        "warn",
        description="what to do once a check without its own action is ill: off (the check does not run), warn, pause (the run "
        "can be resumed), or stop",
    )
    rescore_every: int = Field(
        2, ge=0, description="steps between two checks that rewards give the same scores again; 0: never"
    )
    rescore_groups: int = Field(
        1, ge=1, description="groups of the step that are scored again, and as many kept from the first step"
    )
    reward_determinism: Tolerance = Field(Tolerance(), description="two scorings of the same replies differ")
    reward_drift: Tolerance = Field(
        Tolerance(),
        description="replies kept from the first step now score higher or lower: a biased or drifting reward",
    )
    reward_collapse: Check = Field(Check(), description="all rewards of a step are equal")
    reward_explosion: Growth = Field(Growth(), description="the largest reward is far above the usual one")
    failed_rewards: FailedRewards = Field(
        FailedRewards(), description="rollouts could not be scored: NaN, an error, a deadline"
    )
    failed_plays: FailedRollouts = Field(FailedRollouts(), description="rollouts failed: a dead worker or helper")
    partial_groups: ShareAbove = Field(ShareAbove(), description="groups in which some rollouts failed")
    stale_share: ShareAbove = Field(ShareAbove(), description="groups that were too old to train")
    advantages: Growth = Field(Growth(), description="the largest advantage is far above the usual one")
    entropy: Entropy = Field(Entropy(), description="the mean -log p of sampled tokens has fallen")
    length: Length = Field(
        Length(), description="rollouts are much longer or shorter than usual, or more of them are cut off"
    )
    cut_off: CutOff = Field(CutOff(), description="most rollouts are cut off at max_tokens, and earn least")
    chat_template: ChatTemplate = Field(
        ChatTemplate(),
        description="most replies continue with another turn, or are empty: the template is not followed",
    )
    answer_format: AnswerFormat = Field(
        AnswerFormat(), description="replies never have an answer in the format that the score reads"
    )
    reward_hacking: RewardHacking = Field(
        RewardHacking(),
        description="the trained reward rises and the gold reward does not, or rollouts begin to use a canary",
    )
    length_reward: LengthReward = Field(LengthReward(), description="the reward only grows because replies grow")
    broken_policy: BrokenPolicy = Field(
        BrokenPolicy(), description="replies are garbage after one update: a learning rate much too high"
    )
    policy_collapse: Collapse = Field(
        Collapse(), description="the mean reward fell after updates that moved the policy far: a learning rate too high"
    )
    dead_gradients: Soon = Field(Soon(), description="groups were trained, but the gradient is exactly 0")
    frozen_weights: Check = Field(Check(), description="updates are made, but the logprobs of the probe do not change")
    not_finite: AtOnce = Field(AtOnce(), description="a metric is NaN or infinite")
    logprob_drift: Drift = Field(Drift(), description="engine and trainer differ more than usual")
    sampling: Surprise = Field(Surprise(), description="tokens are not sampled as their logprobs say")
    unchecked: ShareAbove = Field(ShareAbove(), description="sampled tokens without logprobs that can be compared")
    claimed_logprobs: Unexplained = Field(
        Unexplained(), description="a rollout's logprobs differ from the trainer's by more than the policy has moved"
    )
    slow_disk: SlowDisk = Field(SlowDisk(), description="sinks and checkpoints take much of a step's time")
    throughput: Throughput = Field(
        Throughput(), description="a step takes much longer than usual, with correspondingly fewer tokens per second"
    )
    silence: Silence = Field(
        Silence(), description="nothing that a step waits for ends; reported by a timer, before any deadline"
    )

    def action_of(self, name: str) -> ActionOrRollback:
        check: Check | RewardHacking = getattr(self, name)
        return "off" if self.action == "off" else check.action or self.action

    @property
    def rolls_back(self) -> bool:
        return self.action_of("reward_hacking") == "rollback"
