"""Register five curricula."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Curriculum
    from atropos_curriculum.config import CurriculumOptions

CONFIG = "atropos_curriculum.config"


def build(options: CurriculumOptions, context: RunContext) -> Curriculum:
    from atropos_curriculum.curriculum import AdaptiveCurriculum
    from atropos_curriculum.strategies import strategy_of

    return AdaptiveCurriculum(context.seed, options, strategy_of(options))


@hookimpl
def atropos_curricula() -> Iterable[Provider[Curriculum]]:
    yield Provider("easy_first", "the easiest tasks that are not yet solved", f"{CONFIG}:EasyFirstOptions", build)
    yield Provider("competence", "the easiest share of the tasks, which grows", f"{CONFIG}:CompetenceOptions", build)
    yield Provider("learning_progress", "tasks whose success changes", f"{CONFIG}:LearningProgressOptions", build)
    yield Provider("prioritized", "tasks by p(1-p) of their success", f"{CONFIG}:PrioritizedOptions", build)
    yield Provider("window", "tasks neither too easy nor too hard: 0.2 < p < 0.8", f"{CONFIG}:WindowOptions", build)
