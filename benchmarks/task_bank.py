"""Simulated task banks: a learner whose success on a task follows from its ability and the task's difficulty, and that
learns from a group of rollouts as much as the group's outcomes vary, as a policy gradient against the group's mean does.

Success is 1 / (1 + exp(-steepness * (ability - difficulty))) (item response theory, Rasch). A group of outcomes with mean x adds
`rate * 4 x (1 - x)` to the ability in the task's skill: nothing where all rollouts fail, and nothing where all succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atropos_core.interfaces import Curriculum, TaskSource
from atropos_core.types import Draw, Episode, ScoredGroup, Task

STEP, GROUP = 16, 8  # groups of a step, rollouts of a group
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TaskBank:
    """`counted` tasks are those whose mean success is the accuracy; it must reach `threshold`."""

    difficulty: Floats  # [N]
    skill: NDArray[np.int64]  # [N]
    counted: NDArray[np.bool_]  # [N]
    threshold: float
    rate: float = 0.02
    steepness: float = 2.0
    needs: Sequence[int] = ()  # the skill that each skill builds on; -1: none
    coin: NDArray[np.bool_] | None = None  # [N] success is 1/2, whatever the ability


Recipe = Callable[[np.random.Generator], TaskBank]


def ladder(rng: np.random.Generator) -> TaskBank:
    """One skill from trivial to far out of reach: only what is near the frontier teaches."""
    difficulty = rng.uniform(-1, 12, 1000)
    return TaskBank(difficulty, np.zeros(1000, np.int64), np.ones(1000, bool), 0.8)


def extremes(rng: np.random.Generator) -> TaskBank:
    """Six in ten tasks are impossible, a quarter is solved from the start; the rest can be learned."""
    kind = rng.permutation(np.repeat([0, 1, 2], [600, 250, 150]))
    difficulty = np.where(kind == 0, 50.0, np.where(kind == 1, -50.0, rng.uniform(-0.5, 3, 1000)))
    return TaskBank(difficulty, np.zeros(1000, np.int64), kind == 2, 0.8)


def skills(rng: np.random.Generator) -> TaskBank:
    """Eight skills, each of which only begins to be learned once the one before it is."""
    skill = rng.permutation(np.arange(800) % 8)
    return TaskBank(rng.normal(0.5, 0.5, 800), skill, np.ones(800, bool), 0.8, needs=range(-1, 7), rate=0.02)


def even(rng: np.random.Generator) -> TaskBank:
    """Every task can be learned from the start, and all are alike: there is nothing to choose."""
    return TaskBank(rng.normal(0.5, 0.4, 1000), np.zeros(1000, np.int64), np.ones(1000, bool), 0.9, rate=0.005)


def many(rng: np.random.Generator) -> TaskBank:
    """More tasks than are ever drawn, from easy to hard: what is known of one must come from others."""
    difficulty = rng.normal(1, 2, 100_000)
    return TaskBank(difficulty, np.zeros(100_000, np.int64), np.ones(100_000, bool), 0.85, rate=0.01)


def coins(rng: np.random.Generator) -> TaskBank:
    """Two in ten tasks are coin flips, which look worth learning and teach nothing."""
    coin = rng.permutation(np.arange(1000) < 200)
    counted = ~coin
    return TaskBank(rng.uniform(-1, 5, 1000), np.zeros(1000, np.int64), counted, 0.8, coin=coin)


BANKS: Mapping[str, Recipe] = {
    "ladder": ladder, "extremes": extremes, "skills": skills, "even": even, "many": many, "coins": coins,
}  # fmt: skip


@dataclass
class Learner:
    """Runs tasks of the bank and learns from them."""

    bank: TaskBank
    rng: np.random.Generator
    ability: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.ability = np.zeros(int(self.bank.skill.max()) + 1)

    def success(self) -> Floats:
        """True success of every task [N]."""
        bank = self.bank
        exponent = bank.steepness * (self._effective()[bank.skill] - bank.difficulty)
        success = 1 / (1 + np.exp(-np.clip(exponent, -60, 60)))
        return success if bank.coin is None else np.where(bank.coin, 0.5, success)

    def accuracy(self) -> float:
        return float(self.success()[self.bank.counted].mean())

    def step(self, draws: Sequence[Draw]) -> list[ScoredGroup]:
        """Run a step's draws with the ability as it is, then learn from all of them."""
        bank, index = self.bank, np.array([draw.index for draw in draws])
        outcomes = self.rng.random((len(draws), GROUP)) < self.success()[index][:, None]
        mean = outcomes.mean(axis=1)
        gain = bank.rate * 4 * mean * (1 - mean)
        if bank.coin is not None:
            gain[bank.coin[index]] = 0.0
        np.add.at(self.ability, bank.skill[index], gain)
        return [_group(draw, of) for draw, of in zip(draws, outcomes, strict=True)]

    def _effective(self) -> Floats:
        """A skill is out of reach while the one that it builds on is not mastered."""
        if not self.bank.needs:
            return self.ability
        handicap = np.array([0.0 if need < 0 else max(0.0, 3 * (1 - self.ability[need])) for need in self.bank.needs])
        return np.asarray(self.ability - handicap)


class BankTasks(Sequence[Task]):
    """The tasks as a curriculum may see them: with a difficulty in their data, right but for some noise."""

    def __init__(self, bank: TaskBank, noise: Floats) -> None:
        self._difficulty, self._skill = bank.difficulty + noise, bank.skill

    def __len__(self) -> int:
        return len(self._difficulty)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of a sequence, an index alone is used
        return Task(
            str(index), (), data={"difficulty": float(self._difficulty[index]), "skill": int(self._skill[index])}
        )


def samples_to_threshold(recipe: Recipe, curriculum: Curriculum, seed: int, most: int = 40_000) -> int:
    """Draws until the accuracy is there; `most` where it is not."""
    rng = np.random.default_rng(seed)
    bank = recipe(rng)
    tasks = BankTasks(bank, rng.normal(0, 1.0, len(bank.difficulty)))
    learner = Learner(bank, rng)
    curriculum.open({"bank": TaskSource(len(tasks), 1.0, tasks)})
    for drawn in range(STEP, most + 1, STEP):
        draws = curriculum.draw(STEP)
        for group in learner.step(draws):
            curriculum.settle(group.draw, "trained", group)
        if learner.accuracy() >= bank.threshold:
            return drawn
    return most


NO_TASK = Task("", ())


def _group(draw: Draw, outcomes: NDArray[np.bool_]) -> ScoredGroup:
    episodes = tuple(Episode((), float(of), bool(of)) for of in outcomes)
    return ScoredGroup(draw, NO_TASK, episodes, outcomes.astype(np.float32))
