"""The evaluations of a run: when one is due, its file, and whether a resumed run can compare it with the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.config.run_file import RunConfig
from atropos_core.interfaces import Environment
from atropos_core.rollouts.evaluation import Evaluation, evaluate, evaluated_tasks
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.storage.atomic import unwritable
from atropos_core.storage.reading import numbered
from atropos_core.training.alignment_check import check_one_version

AFFECTS_EVALUATION = frozenset(
    {
        *(
            f"evaluation.{name}"
            for name in ("problems", "samples", "temperature", "top_p", "top_k", "min_p", "max_tokens")
        )
    }
    | {"sampling.max_tokens", "sampling.stop"}
)


class Evaluations:
    """`runner` runs them. Their files go to `directory`, which is the run's own."""

    def __init__(
        self, config: RunConfig, environments: Mapping[str, Environment], runner: RolloutRunner, directory: Path
    ) -> None:
        # True if there is something to evaluate: environments may only exist at remote workers.
        self.enabled = bool(config.evaluation.problems and environments)
        self._config = config
        self._environments = environments
        self._runner = runner
        self._directory = directory
        self._sampling = config.sampling.record()
        self._tasks: Mapping[str, str] | None = None

    def is_due(self, step: int) -> bool:
        """A warm start is evaluated only at its end, and does not count in `evaluation.every`."""
        config, trained = self._config, step - self._config.warmup_steps
        every = trained > 0 and bool(config.evaluation.every) and trained % config.evaluation.every == 0
        return self.enabled and (step == config.all_steps or (trained == 0 and step > 0) or every)

    async def run(self, step: int, version: int) -> Evaluation:
        """Evaluate, and write the file of this step. Raises Misaligned if the engines sample from another version."""
        section, seed = self._config.evaluation, self._config.seed
        evaluation = await evaluate(self._runner, self._environments, section, self._sampling, seed=seed)
        check_one_version(step, evaluation.groups, version)
        evaluation.write(self._directory / "rollouts" / f"eval-{step:06d}.jsonl")
        return evaluation

    async def tasks(self) -> Mapping[str, str]:
        """Return digests of the tasks that are evaluated."""
        if self._tasks is None:
            given = self._environments if self.enabled else {}
            self._tasks = await evaluated_tasks(given, self._config.evaluation)
        return self._tasks

    async def changes(self, state: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Say why accuracies of this run are not comparable with those before `state` was saved; "" if they are."""
        had = state.get("settings") or {}
        for path in sorted(had.keys() | settings.keys()) if had and settings else ():
            was, is_ = had.get(path), settings.get(path)
            is_new = not (path in had and path in settings)  # with another version of a component
            same = was == is_ or (_is_path(was) and _is_path(is_)) or (is_new and not path.endswith(".use"))
            if _affects_evaluation(path) and not same:
                return f"{path} has changed"
        known = state.get("evaluated", {})
        for name, digest in (await self.tasks()).items():
            if digest and known.get(name, digest) != digest:
                return f"the held-out tasks of environment {name!r} have changed"
        return ""

    def forget_after(self, step: int) -> None:
        """Remove what a run that died wrote after its last checkpoint. Raises RunDirectoryError."""
        for evaluated, path in numbered(self._directory / "rollouts", "eval-", ".jsonl"):
            if evaluated > step:
                try:
                    path.unlink()
                except OSError as error:
                    raise unwritable(path, error) from error


def _affects_evaluation(path: str) -> bool:
    """Return True if a setting of a run changes what its evaluations measure."""
    section, _, name = path.partition(".")
    if section in ("environment", "reward"):
        return not name.endswith(".weight") or section == "reward"
    return path in AFFECTS_EVALUATION


def _is_path(value: Any) -> bool:
    """True for a path: files may be moved, and changes of their contents are found by the digests of the tasks."""
    return isinstance(value, str) and value.startswith("/") and ":" not in value
