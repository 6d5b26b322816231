"""The checks. Each uses only the numbers of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from atropos_core.config import health_options as options
from atropos_core.health.check import LEAST_STEPS, Change, Check, Numbers, Settings
from atropos_core.health.reward_hacking import RewardHacking

FAR = 4  # times `broken_policy.nats`: an update that far is blamed for a fall of the reward
LEAST_REPLIES = 8  # of a step, to judge shares of them by
# Causes that leave all rewards of a step equal.
EXPLAINS_EQUAL_REWARDS = (
    "broken_policy",
    "policy_collapse",
    "chat_template",
    "cut_off",
    "answer_format",
    "length_reward",
)
BY_TEXT = " A base model without one can be ended by its text: add HEADER to sampling.stop."
BEFORE_TRAINING = "before_training"  # among the numbers of the evaluation before step 1

# -- rewards


class RewardDeterminism(Check[options.Tolerance]):
    name = "reward_determinism"
    needs = ("rescore/difference",)
    remedy = (
        "A reward or score must say the same of the same reply: look for sampling, clocks and shared state in it, or allow "
        "the noise of a judge with health.reward_determinism.tolerance."
    )

    def wrong(self, seen: Numbers) -> str | None:
        difference = seen["rescore/difference"]
        if difference <= self.options.tolerance:
            return None
        return f"scored twice, the same replies have rewards that differ by {difference:.3g} (relative to the largest)"


class RewardDrift(Check[options.Tolerance]):
    name = "reward_drift"
    needs = ("rescore/shift",)
    remedy = (
        "The reward changes while the policy is trained on it: look for running statistics, a judge that was replaced, or "
        "data that changed. Rewards are compared on replies kept from the first step."
    )

    def wrong(self, seen: Numbers) -> str | None:
        shift = seen["rescore/shift"]
        if abs(shift) <= self.options.tolerance:
            return None
        return f"the same replies score {abs(shift):.3g} {'higher' if shift > 0 else 'lower'} on average than at first"


class RewardCollapse(Check[options.Check]):
    name = "reward_collapse"
    needs = ("reward/std", "reward/mean", "rollouts/count")
    remedy = (
        "There is nothing to learn from. If the tasks are solved, end the run; else read replies with `atropos view`: is the "
        "reward's format ever met, is it one number for everything, or are the tasks too hard for this model? For hard tasks, "
        "take easier ones, a larger model, or a larger training.group_size."
    )
    explained_by = EXPLAINS_EQUAL_REWARDS
    first_replies = 32

    def wrong(self, seen: Numbers) -> str | None:
        if seen["rollouts/count"] < 2 or not seen["reward/std"] <= 1e-6 * max(1.0, abs(seen["reward/mean"])):
            return None
        if seen.get("accuracy") == 1.0 and BEFORE_TRAINING in seen:
            return None  # solved
        right = seen.get("replies/right_unscored", 0.0)
        unscored = f"; {right:.0%} of the replies end with the right answer all the same" if right else ""
        return f"all {seen['rollouts/count']:.0f} rollouts got the same reward, {seen['reward/mean']:.4g}{unscored}"


class Growing(Check[options.Growth]):
    """A size that should stay within a factor of what was usual, or of 1."""

    what: ClassVar[str]

    def wrong(self, seen: Numbers) -> str | None:
        [key], usual = self.needs, self.usual.value
        if math.isfinite(seen[key]) and (usual is None or seen[key] <= self.options.ratio * max(usual, 1.0)):
            return None
        return f"{self.what} is {seen[key]:.4g}" + ("" if usual is None else f", and was {usual:.4g}")

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen[self.needs[0]])


class RewardExplosion(Growing):
    name = "reward_explosion"
    needs = ("reward/max_abs",)
    what = "the largest reward of the step"
    remedy = "Look at the rollouts of this step for what earned it; clip the reward, or fix its scale."


class Advantages(Growing):
    name = "advantages"
    needs = ("advantage/max_abs",)
    what = "the largest advantage"
    remedy = "Look at the transforms: what divides by a spread near 0, or multiplies from step to step?"


# -- rollouts


class FailedRewards(Check[options.FailedRewards]):
    name = "failed_rewards"
    needs = ("rollouts/failed_reward", "rollouts/count", "rollouts/failed")
    remedy = "The rollouts that it should have scored are lost. rollouts/ names the reward and its error at each."

    def wrong(self, seen: Numbers) -> str | None:
        share = seen["rollouts/failed_reward"] / max(seen["rollouts/count"] + seen["rollouts/failed"], 1.0)
        if share <= self.options.share:
            return None
        return f"{share:.0%} of the rollouts ended and could not be scored"


class FailedRollouts(Check[options.FailedRollouts]):
    name = "failed_plays"
    needs = ("rollouts/failed_play", "rollouts/count", "rollouts/failed")
    remedy = "A helper, worker or engine of the environment may be dead. rollouts/ names the error of each rollout."

    def wrong(self, seen: Numbers) -> str | None:
        share = seen["rollouts/failed_play"] / max(seen["rollouts/count"] + seen["rollouts/failed"], 1.0)
        return None if share <= self.options.share else f"{share:.0%} of the rollouts failed"


class PartialGroups(Check[options.ShareAbove]):
    name = "partial_groups"
    needs = ("groups/partial",)
    remedy = (
        "Groups shrink, and what fails may be a kind of reply: their advantages are biased. rollouts/ names the error of "
        "each rollout; training.min_group drops what is too small."
    )

    def wrong(self, seen: Numbers) -> str | None:
        share = seen["groups/partial"]
        return None if share <= self.options.share else f"in {share:.0%} of the groups some of the rollouts failed"


class StaleShare(Check[options.ShareAbove]):
    name = "stale_share"
    needs = ("groups/stale", "groups/trained", "groups/flat", "groups/dropped")
    remedy = "Rollouts take longer than updates: raise training.max_staleness, add engines, or shorten the rollouts."

    def wrong(self, seen: Numbers) -> str | None:
        stale, used = seen["groups/stale"], sum(seen[name] for name in self.needs[1:])
        share = stale / max(stale + used, 1.0)
        return None if share <= self.options.share else f"{share:.0%} of the groups were too old to train"


class Entropy(Check[options.Entropy]):
    name = "entropy"
    needs = ("entropy/sampled",)
    remedy = (
        "The policy says one thing only, and explores no more: lower trainer.learning_rate, raise the temperature, or add an "
        "entropy bonus. To go back, move the newest of checkpoints/ away: `atropos resume` takes the one before."
    )

    def wrong(self, seen: Numbers) -> str | None:
        entropy, usual = seen["entropy/sampled"], self.usual.value
        floor = max(self.options.floor_nats, self.options.fall * usual) if usual else self.options.floor_nats
        if usual is None or usual <= self.options.floor_nats or entropy >= floor:  # a policy may begin that sure
            return None
        return f"the entropy of what is sampled fell to {entropy:.3g} nats a token, from {usual:.3g}"

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["entropy/sampled"])


class Length(Check[options.Length]):
    name = "length"
    explained_by = ("broken_policy", "policy_collapse", "length_reward")
    needs = ("tokens/mean", "rollouts/cut_off")
    remedy = "Look at rollouts/: what does the reward gain by it? `reward.length` pays for brevity; raise max_tokens if it is right."

    def wrong(self, seen: Numbers) -> str | None:
        length, cut = seen["tokens/mean"], seen["rollouts/cut_off"]
        usual, usual_cut = self.usual.value, self.usual_too.value
        if usual is None or usual_cut is None:
            return None
        if cut > usual_cut + self.options.cut_off:
            return f"{cut:.0%} of the rollouts are cut off at their longest, and {usual_cut:.0%} were"
        if usual / self.options.ratio <= length <= usual * self.options.ratio:
            return None
        return f"a rollout has {length:.0f} tokens on average, and had {usual:.0f}"

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["tokens/mean"])
        self.usual_too.add(seen["rollouts/cut_off"])


class ChatTemplate(Check[options.ChatTemplate]):
    """Judges the replies of the model that the run begins with. If that begins later, `policy_collapse` reports it."""

    name = "chat_template"
    needs = ("replies/other_turn", "replies/empty", "rollouts/count")
    remedy = (
        "The model does not follow its chat template. Train the instruct version of the model, or give this one the template that it "
        f"was trained with.{BY_TEXT}"
    )
    explained_by = ("broken_policy", "policy_collapse")
    first_replies = 16

    def wrong(self, seen: Numbers) -> str | None:
        if self.usual.values or seen["rollouts/count"] < LEAST_REPLIES:
            return None
        if seen["replies/empty"] > self.options.share:
            return f"{seen['replies/empty']:.0%} of the replies are empty: the model ends its turn at once"
        other = seen["replies/other_turn"]
        if other <= self.options.share:
            return None
        return f"{other:.0%} of the replies do not end, but continue with another turn of the conversation"

    def do(self, seen: Numbers) -> str:
        return self.remedy.replace(BY_TEXT, "") if seen["replies/empty"] > self.options.share else self.remedy

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["replies/other_turn"])


class CutOff(Check[options.CutOff]):
    """Finds replies that are cut off from the first step on. If that begins later, `length` or `policy_collapse` reports it."""

    name = "cut_off"
    needs = ("rollouts/cut_off", "rollouts/cut_off_lowest")
    remedy = "Such a reply ends before its answer: have the prompt ask for shorter replies, or raise OPTION to NUMBER."
    explained_by = ("broken_policy", "policy_collapse", "chat_template")
    first_replies = 16

    def wrong(self, seen: Numbers) -> str | None:
        if seen["rollouts/cut_off_lowest"] <= self.options.share or self.usual.values:
            return None
        option, limit = self._limit(seen)
        looping = seen.get("replies/looping", 0.0)
        repeats = f"; {looping:.0%} repeat one passage to the end" if looping > self.options.share else ""
        return (
            f"{seen['rollouts/cut_off']:.0%} of the rollouts are cut off at {option}{f' = {limit}' if limit else ''}, most of them "
            f"with the lowest reward{repeats}"
        )

    def do(self, seen: Numbers) -> str:
        option, limit = self._limit(seen)
        number, room = "twice as many", self._room(seen)
        if limit:  # a power of two times as many, for most replies to end
            factors = [one for one in (2, 4, 8) if one * limit >= seen.get("replies/needed_tokens", 0.0)]
            wanted = min(factors, default=8) * limit
            number = (
                str(wanted)
                if wanted <= room
                else f"{room}, all that the model's context of {self.run.context_tokens} tokens leaves"
            )
        said = self.remedy.replace("OPTION", option).replace("NUMBER", number)
        if room <= limit:
            said = (
                f"Such a reply ends before its answer, and the model's context of {self.run.context_tokens} tokens leaves no room "
                "for longer ones: have the prompt ask for shorter replies, or take a model with a longer context."
            )
        if seen.get("replies/looping", 0.0) <= self.options.share:
            return said
        return (
            "More tokens do not end a reply that repeats itself: the model may be too small for these tasks, or not follow its chat "
            f"template. Otherwise: {said}"
        )

    def _room(self, seen: Numbers) -> float:
        """Return the tokens that the model's context leaves for a reply."""
        context = self.run.context_tokens
        return context - int(seen.get("replies/prompt_tokens", 0.0)) if context else math.inf

    def _limit(self, seen: Numbers) -> tuple[str, int]:
        own = self.run.evaluation_max_tokens if BEFORE_TRAINING in seen else 0
        return ("evaluation.max_tokens", own) if own else ("sampling.max_tokens", self.run.max_tokens)

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["rollouts/cut_off_lowest"])


class AnswerFormat(Check[options.AnswerFormat]):
    """Looks at environments whose scores have the metric `answered`."""

    name = "answer_format"
    needs = ("replies/answered", "rollouts/count")
    remedy = "Show the format in the prompt, with an example, or have the score read what the model writes. FORMAT"
    explained_by = ("broken_policy", "policy_collapse", "chat_template", "cut_off")
    first_replies = 32

    def wrong(self, seen: Numbers) -> str | None:
        answered = seen["replies/answered"]
        if answered > self.options.share or seen["rollouts/count"] < LEAST_REPLIES:
            return None
        right = seen.get("replies/right_unscored", 0.0)
        unscored = f"; {right:.0%} end with the right answer, which is not scored" if right else ""
        cut = seen.get("rollouts/cut_off", 0.0)
        return f"{1 - answered:.0%} of the replies have no answer in the format that the score reads{unscored}" + (
            f"; {cut:.0%} are cut off" if cut > 0.1 else ""
        )


# -- trainer


class LengthReward(Check[options.LengthReward]):
    """`usual` holds the mean tokens of the first steps, `usual_too` their mean rewards, or accuracies if there are any."""

    name = "length_reward"
    needs = ("reward/length_correlation", "reward/mean", "tokens/mean")
    remedy = (
        "The reward pays for length. Have it score what an answer says, or take the gain back with the reward `length`, which costs 1 "
        "at reward.length.limit_tokens, and nothing up to reward.length.free_tokens, for example NUMBER."
    )
    explained_by = ("broken_policy", "policy_collapse", "reward_hacking")

    def applies(self, seen: Numbers) -> bool:
        return all(name in seen for name in self.needs[1:])  # replies that are all cut off have no correlation

    def wrong(self, seen: Numbers) -> str | None:
        if "reward/length_correlation" in seen:
            self.kept["correlation"] = seen["reward/length_correlation"]
        if not self.usual.values or "correlation" not in self.kept:
            return None
        length, had = statistics.mean(self.usual.values), statistics.mean(self.usual_too.values)
        gain, follows = self._gain(seen), self.kept["correlation"]
        if follows < self.options.correlation or seen["tokens/mean"] < self.options.ratio * length:
            return None
        if ("accuracy" in seen and gain > had + 0.05) or ("accuracy" not in seen and gain <= had):
            return None  # it learns, or gains nothing by it
        gained = (
            f"accuracy is {gain:.1%}, and was {had:.1%}"
            if "accuracy" in seen
            else f"the mean reward rose from {had:.3g} to {gain:.3g}"
        )
        return (
            f"replies grew from {length:.0f} to {seen['tokens/mean']:.0f} tokens, and {gained}: within a group, reward follows length "
            f"(correlation {follows:.2f})"
        )

    def do(self, seen: Numbers) -> str:
        return self.remedy.replace("NUMBER", f"{statistics.mean(self.usual.values):.0f}")

    def learn(self, seen: Numbers) -> None:
        if len(self.usual.values) < LEAST_STEPS:
            self.usual.add(seen["tokens/mean"])
            self.usual_too.add(self._gain(seen))

    @staticmethod
    def _gain(seen: Numbers) -> float:
        return seen.get("accuracy", seen["reward/mean"])


class BrokenPolicy(Check[options.BrokenPolicy]):
    """Finds one update after which replies are garbage. `usual` holds entropies of the steps before, `usual_too` how far the probe was
    after each of the last three steps, or 0 before the first."""

    name = "broken_policy"
    needs = ("entropy/sampled", "policy/probe_shift_nats", "reward/mean")
    remedy = (
        "The learning rate is too high for this model: set trainer.learning_rate to NUMBER or less, or leave it out to have the "
        "default, and begin a new run."
    )

    def wrong(self, seen: Numbers) -> str | None:
        shifts = self.usual_too.values or [0.0]
        moved = max((abs(now - before) for before, now in pairwise(shifts)), default=0.0)
        self.usual_too.values = [*shifts, seen["policy/probe_shift_nats"]][-3:]
        if "learning_rate" in seen:
            self.kept["rate"] = seen["learning_rate"]
        if not self.usual.values or (moved <= self.options.nats and self.state == "ok"):
            return None
        self.kept["moved"] = max(moved, self.kept.get("moved", 0.0))
        entropy, reward, looping = seen["entropy/sampled"], seen["reward/mean"], seen.get("replies/looping", 0.0)
        usual, had = statistics.median(self.usual.values), self.kept["reward"]
        noise = entropy > usual + self.options.rise_nats
        loops = looping > self.kept["looping"] + 0.4 and reward <= had
        fell = had - reward > 0.5 * abs(had) and self.kept["moved"] > FAR * self.options.nats
        if not (noise or loops or fell):
            return None
        return (
            f"replies are garbage after an update that moved a logprob of the policy by {self.kept['moved']:.3g} nats: the entropy of "
            f"what is sampled is {entropy:.3g} nats a token, and was {usual:.3g}; the mean reward is {reward:.3g}, and was {had:.3g}"
            + (f"; the learning rate is {self.kept['rate']:g}" if self.kept.get("rate") else "")
        )

    def do(self, seen: Numbers) -> str:
        rate = self.kept.get("rate")
        return self.remedy.replace("NUMBER", f"{rate / 100:g}" if rate else "a hundredth of it")

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["entropy/sampled"])
        self.kept |= {"reward": seen["reward/mean"], "looping": seen.get("replies/looping", 0.0)}
        self.kept.pop("moved", None)


class PolicyCollapse(Check[options.Collapse]):
    """`usual` holds mean rewards. `usual_too` holds how far the probe was after each of the last updates. Once the reward has fallen,
    the nearest and the farthest are kept, since no update may follow."""

    name = "policy_collapse"
    explained_by = ("broken_policy",)
    needs = ("reward/mean", "policy/probe_shift_nats", "learning_rate")
    remedy = (
        "The updates break the policy: lower trainer.learning_rate, to a tenth of it first. To go back, move the newer of "
        "checkpoints/ away: `atropos resume` takes the newest that is left."
    )

    def applies(self, seen: Numbers) -> bool:
        return all(name in seen for name in self.needs[:2])  # a step without an update has no rate

    def wrong(self, seen: Numbers) -> str | None:
        shifts = self.usual_too.values or [0.0]  # before the first update
        moved = max(shifts) - min(shifts)
        kept = shifts[-3:] if self.state == "ok" else [min(shifts), max(shifts)]
        self.usual_too.values = [*kept, seen["policy/probe_shift_nats"]]
        if not self.usual.values:
            return None
        usual, reward = statistics.median(self.usual.values), seen["reward/mean"]
        if usual - reward <= self.options.fall * abs(usual) or (moved <= self.options.nats and self.state == "ok"):
            return None
        rate = f"; the learning rate is {seen['learning_rate']:g}" if "learning_rate" in seen else ""
        return (
            f"the mean reward fell to {reward:.3g}, from {usual:.3g}, after updates that moved logprobs of the policy by up to "
            f"{moved:.3g} nats{rate}"
        )

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["reward/mean"])


class DeadGradients(Check[options.Soon]):
    name = "dead_gradients"
    needs = ("grad_norm", "groups/trained")
    remedy = "Are all advantages 0, all tokens masked, or all parameters frozen? Look at `trained` and advantages in rollouts/."

    def wrong(self, seen: Numbers) -> str | None:
        if not seen["groups/trained"] or seen["grad_norm"] != 0.0:
            return None
        return f"{seen['groups/trained']:.0f} groups were trained, and the gradient is exactly 0"


class FrozenWeights(Check[options.Check]):
    name = "frozen_weights"
    needs = ("policy/probe_shift_nats", "groups/trained")
    remedy = (
        "The update does not reach the policy: are its parameters in the optimiser, and is trainer.learning_rate large "
        "enough for weights of this precision?"
    )

    def applies(self, seen: Numbers) -> bool:
        still = not seen.get("groups/trained") or seen.get("grad_norm") == 0.0 or seen.get("learning_rate") == 0.0
        return super().applies(seen) and not still

    def wrong(self, seen: Numbers) -> str | None:
        shift, last = seen["policy/probe_shift_nats"], self.usual.values or [0.0]  # 0 before the first update
        self.usual.values = [shift]
        if last != [shift]:
            return None
        return "updates are made, and the policy's logprobs of the probe do not move"


class NotFinite(Check[options.AtOnce]):
    name = "not_finite"
    needs = ()
    remedy = (
        "Look at what computes them: for a metric of an environment or a reward, its code; for one of the trainer, look at "
        "grad_norm and ratio/mean of the step before."
    )

    def wrong(self, seen: Numbers) -> str | None:
        broken = [name for name, value in seen.items() if not math.isfinite(value) and not name.startswith("time/")]
        return f"not a finite number: {', '.join(broken[:5])}" if broken else None


class LogprobDrift(Check[options.Drift]):
    name = "logprob_drift"
    needs = ("alignment/max_abs_logprob_diff",)
    remedy = (
        "The engine samples from other weights than the trainer has, or computes otherwise: look at the bridge first, then at an "
        "environment that changes logprobs."
    )

    def wrong(self, seen: Numbers) -> str | None:
        difference, usual = seen["alignment/max_abs_logprob_diff"], self.usual.value
        if usual is None or difference <= max(self.options.ratio * usual, self.options.floor_nats):
            return None
        return f"engine and trainer differ by {difference:.3g} nats about the same tokens; usual is {usual:.3g}"

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["alignment/max_abs_logprob_diff"])


class SampledAsClaimed(Check[options.Surprise]):
    """Not used if transforms leave groups out: groups kept for their rewards are not as surprising as what was sampled."""

    name = "sampling"
    needs = ("alignment/surprise_z", "alignment/surprise_nats")
    remedy = (
        "The tokens are not sampled as their logprobs say: look for another temperature, top_p, top_k or a filter of replies "
        "behind the engine, or in what the workers send."
    )

    def applies(self, seen: Numbers) -> bool:
        if seen.get("groups/flat") or seen.get("groups/dropped"):
            self.usual.values = [1.0]
        return super().applies(seen) and not self.usual.values

    def wrong(self, seen: Numbers) -> str | None:
        z, nats = (seen[name] for name in self.needs)
        if abs(z) <= self.options.z or abs(nats) <= self.options.floor_nats:
            return None
        likelier = "likelier" if nats < 0 else "less likely"
        return f"sampled tokens are {abs(nats):.3g} nats {likelier} than the policy's entropy says, {abs(z):.1f} standard errors"


class Unchecked(Check[options.ShareAbove]):
    name = "unchecked"
    needs = ("alignment/unchecked_share",)
    remedy = (
        "The run would not notice if they were not sampled from the policy: have clients send logprobs, or turn the check off with "
        "health.unchecked.action."
    )

    def wrong(self, seen: Numbers) -> str | None:
        # Tokens that were cut to unknown tokens are compared on one side: `health.alignment`.
        share = seen["alignment/unchecked_share"] - seen.get("alignment/truncated_share", 0.0)
        if share <= self.options.share:
            return None
        return f"{share:.0%} of the sampled tokens came without logprobs that could be compared with the trainer's own"


class ClaimedLogprobs(Check[options.Unexplained]):
    name = "claimed_logprobs"
    needs = ("alignment/unexplained_nats",)
    remedy = (
        "Look at who sends tokens of older or unknown versions: another model, template, temperature or top_p than is reported, or "
        "made-up numbers?"
    )

    def wrong(self, seen: Numbers) -> str | None:
        nats = seen["alignment/unexplained_nats"]
        if nats <= self.options.nats:
            return None
        return f"a rollout's logprobs are {nats:.4g} nats farther from the trainer's own than the policy has moved"


# -- machine


class SlowDisk(Check[options.SlowDisk]):
    name = "slow_disk"
    needs = ("time/step_s", "time/disk_s")
    remedy = (
        "Choose a faster disk with --dir, write rollouts less often (sink.jsonl.rollouts_every), or save less often."
    )

    def wrong(self, seen: Numbers) -> str | None:
        disk, step = seen["time/disk_s"], seen["time/step_s"]
        share = disk / max(disk + step, 1e-9)
        if disk <= self.options.floor_s or share <= self.options.share:
            return None
        return f"sinks and checkpoints took {disk:.2f} s, {share:.0%} of the time of a step"


class Throughput(Check[options.Throughput]):
    name = "throughput"
    needs = ("time/step_s", "tokens/s")
    remedy = "`time/` in metrics.jsonl says which stage grew; look for another program on the machine, or an engine that lost a GPU."

    def wrong(self, seen: Numbers) -> str | None:
        step, usual_step, usual = seen["time/step_s"], self.usual.value, self.usual_too.value
        if usual_step is None or usual is None or step <= self.options.floor_s:
            return None
        if step <= self.options.ratio * usual_step or seen["tokens/s"] * self.options.ratio >= usual:
            return None
        return f"{seen['tokens/s']:,.0f} tokens/s, and {usual:,.0f} were usual; the step took {step:.1f} s"

    def learn(self, seen: Numbers) -> None:
        self.usual.add(seen["time/step_s"])
        self.usual_too.add(seen["tokens/s"])


class Silence(Check[options.Silence]):
    """Reported by a timer, and ok again when the step ends. If groups only came late, that was not a silence: their time counts as
    usual from then on."""

    name = "silence"
    needs = ()
    remedy = "Is a rollout, a reward or a worker hanging? rollout_deadline_s ends the wait at last; logs/ has the output of its processes."

    def patience_s(self) -> float:
        """Return how long a step may wait without anything ending."""
        usual = self.usual.value or max(self.usual.values, default=0.0)
        return max(self.options.after_s, self.options.ratio * usual)

    def wrong(self, seen: Numbers) -> str | None:
        silent = seen.get("silence/silent_s", 0.0)
        if silent <= self.patience_s():
            return None
        usual = f"; {self.usual.value:.1f} s are usual for all groups of a step" if self.usual.value else ""
        return f"no rollout, reply or reward has ended for {silent:.0f} s{usual}"

    def learn(self, seen: Numbers) -> None:
        if "time/waiting_s" in seen:
            self.usual.add(seen["time/waiting_s"])


CHECKS: tuple[type[Check], ...] = (  # type: ignore[type-arg] # of different options; those that explain others come first
    BrokenPolicy, PolicyCollapse, ChatTemplate, CutOff, AnswerFormat, RewardDeterminism, RewardDrift, RewardHacking, LengthReward,
    RewardCollapse, RewardExplosion, FailedRewards, FailedRollouts, PartialGroups, StaleShare, Advantages, Entropy, Length,
    DeadGradients, FrozenWeights,
    NotFinite, LogprobDrift, SampledAsClaimed, Unchecked, ClaimedLogprobs, SlowDisk, Throughput, Silence,
)  # fmt: skip


def checks(section: options.HealthSection, run: Settings | None = None) -> list[Check[options.Check]]:
    """Return the checks that are not off."""
    return [kind(getattr(section, kind.name), run) for kind in CHECKS if section.action_of(kind.name) != "off"]


def judge(every: Sequence[Check[options.Check]], step: int, seen: Numbers) -> list[Change]:
    """Return the changes that a step causes. A check does not look while another one names the cause of what it would find. Step 0 is
    the evaluation before step 1."""
    wrong: set[str] = set()
    changes = []
    for check in every:
        if wrong.isdisjoint(check.explained_by):
            changes += [change] if (change := check.look(step, seen)) is not None else []
        if check.state != "ok":
            wrong.add(check.name)
    return changes
