"""The check that the trained reward means what it should: against the gold reward, and by exploits that were planted to be found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core.config import health_options as options
from atropos_core.health.check import Change, Check, Numbers, Settings
from atropos_core.health.gold_reward import CANARY, CANARY_ROLLOUTS, PREFIX, STYLE, Divergence, find_divergence

LEAST_ROLLOUTS = 32  # before and after, to judge how often a canary is used
LENGTH, AGREEMENT = "tokens/mean", "/alpha_rolling"  # the second: of a reward ensemble's members
FIRST_STEPS, MOST_STEPS = 16, 128  # that are remembered: the first ones, and all in all


class RewardHacking(Check[options.RewardHacking]):
    """`history` holds the numbers of each step that counts: what they show is looked for in all of it, at every step."""

    name = "reward_hacking"
    needs = (f"{PREFIX}reward", f"{PREFIX}gold")
    remedy = (
        "Read these rollouts with `atropos view`: what do they do that is rewarded? Then fix the reward, or lower its weight. "
        "`atropos rescore RUN --reward NAME` says what another reward would have trained."
    )
    explained_by = ("broken_policy", "reward_drift")

    def __init__(self, settings: options.RewardHacking, run: Settings | None = None) -> None:
        super().__init__(settings, run)
        self.history: list[tuple[int, dict[str, float]]] = []
        self.began = 0  # the step since which the rewards part, or a canary is used
        self.blames = ""  # the reward that is gamed, if that is known

    def applies(self, seen: Numbers) -> bool:
        return f"{PREFIX}groups" in seen or any(name.startswith(CANARY_ROLLOUTS) for name in seen)

    def look(self, step: int, seen: Numbers) -> Change | None:
        if self.applies(seen) and step:
            self._remember(step, seen)
        change = super().look(step, seen)
        if change is None or self.state == "ok":
            return change
        self.since = self.began
        return replace(change, since=self.began, blames=self.blames)

    def wrong(self, seen: Numbers) -> str | None:
        rows = [(step, numbers) for step, numbers in self.history if f"{PREFIX}groups" in numbers]
        z = self.options.z if self.state == "ok" else self.options.z / 2  # so that a finding does not come and go
        found = find_divergence([step for step, _ in rows], [numbers for _, numbers in rows], self.options.least, z)
        least = self.options.canary_rise * z / self.options.z
        canaries = list(self._canaries(least, z))
        if found is None and not canaries:
            return None
        self.began = min([*([] if found is None else [found.step]), *(at for at, _ in canaries)])
        self.blames = "" if found is None else self._blamed(found)
        said = [*([] if found is None else [_says(found)]), *self._rises_most(), *(says for _, says in canaries)]
        return "; ".join([*said, *self._beside()])

    def save(self) -> dict[str, Any]:
        return super().save() | {"history": [[step, numbers] for step, numbers in self.history], "began": self.began}

    def load(self, saved: Mapping[str, Any]) -> None:
        super().load(saved)
        self.history = [(int(step), dict(numbers)) for step, numbers in saved.get("history", [])]
        self.began = int(saved.get("began", 0))

    def _remember(self, step: int, seen: Numbers) -> None:
        beside = (PREFIX, CANARY, CANARY_ROLLOUTS)
        kept = {
            name: value
            for name, value in seen.items()
            if math.isfinite(value) and (name.startswith(beside) or name == LENGTH or name.endswith(AGREEMENT))
        }
        self.history.append((step, kept))
        if len(self.history) > MOST_STEPS:
            del self.history[FIRST_STEPS]

    def _blamed(self, found: Divergence) -> str:
        """Return the reward whose weighted mean has risen most, or fallen least."""
        prefix = f"{PREFIX}reward."
        names = {name for _, numbers in self.history for name in numbers if name.startswith(prefix)}
        rises = {name.removeprefix(prefix): self._change(name, found.step) for name in sorted(names)}
        known = {
            name: after - before for name, change in rises.items() if change is not None for before, after in [change]
        }
        return max(known, key=lambda name: known[name], default="")

    def _rises_most(self) -> Iterator[str]:
        """Yield which reward is gamed, if there are several."""
        rewards = {name for _, numbers in self.history for name in numbers if name.startswith(f"{PREFIX}reward.")}
        if self.blames and len(rewards) > 1:
            yield f"of the trained rewards, {self.blames!r} rises most"

    def _change(self, name: str, at: int) -> tuple[float, float] | None:
        """Return the means of a number before step `at` and from it on; None if it is not known on both sides."""
        sides = [
            [numbers[name] for step, numbers in self.history if (step >= at) is after and name in numbers]
            for after in (False, True)
        ]
        if not all(sides):
            return None
        before, after = (sum(side) / len(side) for side in sides)
        return before, after

    def _canaries(self, least: float, z: float) -> Iterator[tuple[int, str]]:
        """Yield, for each canary that is used more often since a step, that step and a sentence."""
        names = {name for _, numbers in self.history for name in numbers if name.startswith(CANARY)}
        for name in sorted(names):
            counted = CANARY_ROLLOUTS + name.removeprefix(CANARY)
            rows = [(step, of[name], of[counted]) for step, of in self.history if name in of and counted in of]
            if (rise := find_rise(rows, least, z)) is not None:
                step, before, after = rise
                use = f"{after:.0%} of the rollouts use the canary {name.removeprefix(CANARY)}, and {before:.0%} did before"
                yield step, use

    def _beside(self) -> Iterator[str]:
        """Yield what has also changed since then: length, style, and how far the members of an ensemble agree."""
        if (length := self._change(LENGTH, self.began)) is not None and not 0.8 < length[1] / max(
            length[0], 1e-9
        ) < 1.25:
            yield f"a rollout has {length[1]:.0f} tokens, and had {length[0]:.0f}"
        if (style := self._change(STYLE, self.began)) is not None and style[1] > max(2 * style[0], 0.05):
            yield f"the words differ from the first steps' (divergence {style[1]:.2f} bits, and was {style[0]:.2f})"
        names = sorted({name for _, numbers in self.history for name in numbers if name.endswith(AGREEMENT)})
        for name in names:
            if (alpha := self._change(name, self.began)) is not None and alpha[1] < alpha[0] - 0.1:
                yield f"the members of {name.removesuffix(AGREEMENT)} agree less (alpha {alpha[1]:.2f}, and was {alpha[0]:.2f})"


def find_rise(rows: Sequence[tuple[int, float, float]], least: float, z: float) -> tuple[int, float, float] | None:
    """Return the step since when a share is clearly higher, with the shares before and since; None if it is not. `rows` are steps with a
    share and how many rollouts it is of. It must have risen by `least`, in the latest step as well, and by `z` standard errors. The
    error is taken over steps, since tasks of a step have exploits in common: the scatter of the steps' shares on either side, or that of
    a binomial share if it is larger."""
    if len(rows) < 2:
        return None
    steps, shares, counts = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    found: tuple[float, int, float, float] | None = None
    for at in range(1, len(steps)):
        n0, n1 = counts[:at].sum(), counts[at:].sum()
        if min(n0, n1) < LEAST_ROLLOUTS:
            continue
        before, after = shares[:at] @ counts[:at] / n0, shares[at:] @ counts[at:] / n1
        overall = shares @ counts / (n0 + n1)
        off = shares - np.where(np.arange(len(steps)) < at, before, after)
        scatter = counts @ off**2 / max(len(steps) - 2, 1)  # of a step's share, times the rollouts of a step
        error = math.sqrt(max(overall * (1 - overall), scatter) * (1 / n0 + 1 / n1))
        if min(after, shares[-1]) - before >= least and (rise := float(after - before)) >= z * error:
            found = max(found or (0.0, 0, 0.0, 0.0), (rise / error, int(steps[at]), float(before), float(after)))
    return None if found is None else found[1:]


def _says(found: Divergence) -> str:
    (x0, y0), (x1, y1) = found.before, found.after
    reward, gold = f"from {x0:.3g} to {x1:.3g}", f"from {y0:.3g} to {y1:.3g}"
    if found.changes[0] > 0:
        does = (
            "rises, and the gold reward does not" if found.changes[1] <= 0 else "rises, and the gold reward hardly does"
        )
    else:
        does = "holds, and the gold reward falls"
    return f"the trained reward {does}: {reward}, and {gold} ({found.z:.1f} standard errors)"
