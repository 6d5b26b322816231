"""The contract of a curriculum: it draws existing tasks, with unique ids, and draws the same again after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import get_args

from atropos_core.interfaces import Curriculum, Finding, Outcome, TaskSource
from atropos_core.types import Draw
from atropos_testing import eventloop
from atropos_testing.report import Report, of_error
from atropos_testing.samples import make_group
from atropos_testing.subject import Subject

CHECKS = ("opens", "draws", "unique ids", "seeds", "settling", "state", "unsettled draws", "event loop")
SOURCES = {"large": TaskSource(23, 2.0), "small": TaskSource(5, 1.0), "off": TaskSource(9, 0.0)}
OUTCOMES: Sequence[Outcome] = get_args(Outcome)


class CurriculumContract:
    """Checks one curriculum over two environments, and a third whose weight is 0."""

    def __init__(self, subject: Subject, *, skip: Sequence[str] = ()) -> None:
        self._subject = subject
        self._report = Report(CHECKS, skip)

    def findings(self) -> list[Finding]:
        eventloop.run(self._check())
        return self._report.findings

    async def _check(self) -> None:
        with eventloop.watched() as watch:
            if self._try(
                "opens",
                self._opens,
                "built and opened over three environments",
                "Everything else is checked once it opens.",
            ):
                self._try(
                    "draws",
                    self._draws,
                    "120 draws, each of a task that there is",
                    "draw(n) gives n draws, of environments with weight, at indices below their sizes.",
                )
                self._try(
                    "unique ids",
                    self._unique,
                    "no id twice in 120 draws",
                    "Number the draws, and continue the numbers after a resume.",
                )
                self._try(
                    "seeds",
                    self._seeds,
                    "the same draws from two instances with one seed",
                    "Derive every choice from RunContext.seed (atropos_core.seeds.derive).",
                )
                self._try(
                    "settling",
                    self._settles,
                    f"takes {', '.join(OUTCOMES)}, with a group and without",
                    "settle() is called once for each draw, in any order, with any outcome.",
                )
                self._try(
                    "state",
                    self._state,
                    "saved as JSON, loaded, and gone on with",
                    "state() gives JSON values, and load() takes up exactly there.",
                )
                self._try(
                    "unsettled draws",
                    self._unsettled,
                    "draws that were never settled come again first",
                    "Keep the draws that were handed out in state(), and hand them out first after load().",
                )
        self._report.check(
            "event loop",
            watch.blocked,
            good="never blocked",
            remedy="draw() and settle() are called on the event loop: keep them quick.",
        )

    def _try(self, name: str, work: Callable[[], list[str]], good: str, remedy: str) -> bool:
        try:
            problems = work()
        except (Exception, eventloop.Blocked) as error:  # noqa: BLE001 - the plugin boundary: a curriculum's code
            problems = [of_error(error)]
        return self._report.check(name, problems, good=good, remedy=remedy)

    def _opened(self) -> Curriculum:
        curriculum: Curriculum = self._subject.make()
        curriculum.open(SOURCES)
        return curriculum

    def _opens(self) -> list[str]:
        self._opened()
        return []

    def _draws(self) -> list[str]:
        curriculum = self._opened()
        problems = [] if not curriculum.draw(0) else ["draw(0) gives draws"]
        for n in (1, 7, 32, 80):
            drawn = curriculum.draw(n)
            if len(drawn) != n:
                problems.append(f"draw({n}) gave {len(drawn)}")
            for draw in drawn:
                if draw.environment not in SOURCES or SOURCES[draw.environment].weight == 0:
                    problems.append(f"draw {draw.id} is of environment {draw.environment!r}, which has no weight")
                elif not 0 <= draw.index < SOURCES[draw.environment].size or draw.split != "train":
                    problems.append(
                        f"draw {draw.id} is {draw.split}[{draw.index}] of {SOURCES[draw.environment].size} tasks"
                    )
        return problems

    def _unique(self) -> list[str]:
        drawn = [draw for curriculum in [self._opened()] for _ in range(12) for draw in curriculum.draw(10)]
        twice = len(drawn) - len({draw.id for draw in drawn})
        seeds = len(drawn) - len({draw.seed for draw in drawn})
        return ([f"{twice} ids came twice"] if twice else []) + ([f"{seeds} seeds came twice"] if seeds else [])

    def _seeds(self) -> list[str]:
        one, other = [self._course(self._opened()) for _ in range(2)]
        return (
            []
            if one == other
            else [f"they part at draw {next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)}"]
        )

    def _settles(self) -> list[str]:
        curriculum = self._opened()
        drawn = curriculum.draw(2 * len(OUTCOMES))
        for at, draw in reversed(list(enumerate(drawn))):
            group = make_group(draw.id, (0, 1)) if at % 2 else None
            curriculum.settle(draw, OUTCOMES[at // 2], group)
        curriculum.draw(3)
        return []

    def _state(self) -> list[str]:
        curriculum = self._opened()
        self._course(curriculum)
        resumed = self._resumed(curriculum)
        return [] if self._course(curriculum) == self._course(resumed) else ["the resumed one draws other tasks"]

    def _unsettled(self) -> list[str]:
        curriculum = self._opened()
        drawn = curriculum.draw(10)
        for draw in drawn[:6]:
            curriculum.settle(draw, "trained", make_group(draw.id, (0, 1)))
        resumed = self._resumed(self._resumed(curriculum))  # a run may die twice
        again = resumed.draw(4)
        if sorted(again, key=lambda draw: draw.id) != sorted(drawn[6:], key=lambda draw: draw.id):
            return [f"draws {[draw.id for draw in drawn[6:]]} were open, {[draw.id for draw in again]} came"]
        for one in drawn[6:]:
            for each in (curriculum, resumed):
                each.settle(one, "trained", make_group(one.id, (0, 1)))
        return (
            []
            if self._course(curriculum) == self._course(resumed)
            else ["afterwards the resumed one draws other tasks"]
        )

    def _resumed(self, curriculum: Curriculum) -> Curriculum:
        state = json.loads(json.dumps(curriculum.state()))
        made = self._opened()
        made.load(state)
        return made

    def _course(self, curriculum: Curriculum) -> list[Draw]:
        """Run some steps and return their draws."""
        course = []
        for step in range(6):
            drawn = curriculum.draw(5)
            course += drawn
            for draw in drawn:
                rewards = (0, 1) if (draw.index + step) % 3 else (1, 1)
                curriculum.settle(draw, "trained" if (draw.index + step) % 3 else "flat", make_group(draw.id, rewards))
        return course
