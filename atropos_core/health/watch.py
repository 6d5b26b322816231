"""Health of a run: called once per step by the loop; warns, writes health.jsonl, and decides when the run must end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.health_options import HealthSection
from atropos_core.errors import Interrupted, RunDirectoryError, RunIll, RunPaused, RunRolledBack
from atropos_core.health.check import LEVELS, Change, Settings
from atropos_core.health.checks import BEFORE_TRAINING, EXPLAINS_EQUAL_REWARDS, Silence, checks, judge
from atropos_core.health.gold_reward import GoldComparison
from atropos_core.health.measure import causes, measure
from atropos_core.health.replies import Reply, example, measure_replies, replies
from atropos_core.health.reward_rescoring import Rescoring
from atropos_core.health.rollback import RollbackPlanner
from atropos_core.storage.atomic import append_lines, unwritable, write_whole
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.storage.run_records import HEALTH, HealthChange, Rollback, RunRecords, health_rows
from atropos_core.types import Metrics, ScoredGroup

BY_FORCE = (
    "pause",
    "rollback",
    "stop",
)  # of the actions that end a run, a later one wins if several are due after a step
# Numbers of the evaluation before step 1 that are recorded for its checks.
OF_EVALUATION = (
    "rollouts/count", "rollouts/cut_off", "rollouts/cut_off_lowest", "reward/mean", "reward/std", "accuracy", "replies/empty",
    "replies/other_turn", "replies/looping", "replies/needed_tokens", "replies/prompt_tokens", "replies/answered",
    "replies/right_unscored",
)  # fmt: skip


class Health:
    """Call `look` after each step, and `act` once the step is complete. `directory` is the run's own."""

    def __init__(
        self,
        section: HealthSection,
        directory: Path,
        rescoring: Rescoring | None = None,
        run: Settings | None = None,
        formats: Mapping[str, str] | None = None,
        gold: GoldComparison | None = None,
        rollback: RollbackPlanner | None = None,
    ) -> None:
        """`formats`: how an answer is to be written, by environment (`Environment.answer_format`). `rollback` is needed if the action
        of a check is "rollback"."""
        self._section = section
        self._directory = directory
        self._formats = formats or {}
        self._checks = checks(section, run)
        self._silence = next((one for one in self._checks if isinstance(one, Silence)), None)
        self._rescoring = rescoring
        self._gold = gold
        self._rollback = rollback
        self._due: Change | None = None  # whose action ends the run

    async def look(
        self,
        step: int,
        metrics: Metrics,
        raw: Sequence[ScoredGroup],
        trained: Sequence[ScoredGroup],
        failed: Sequence[ScoredGroup],
    ) -> Metrics:
        """Return the metrics to add to the step: measured numbers, and `health/NAME` of every check."""
        if not self._checks:
            return {}
        found = measure(raw, trained, failed)
        if self._rescoring is not None:
            found |= await self._rescoring.look(step, raw)
        if self._gold is not None:
            found |= self._gold.look(step, raw)
        seen = {**metrics, **found}
        self._look_at(step, seen, [*failed, *raw])
        return found | {f"health/{check.name}": LEVELS[check.state] for check in self._checks}

    def look_before_training(self, evaluation: Metrics, groups: Sequence[ScoredGroup]) -> None:
        """Look at the evaluation before step 1, whose metrics are those of `before_training`."""
        self._look_at(0, before_training(evaluation), groups)

    def _look_at(self, step: int, seen: Metrics, groups: Sequence[ScoredGroup]) -> None:
        if not (changes := judge(self._checks, step, seen)):
            return
        if self._gold is not None:
            changes = [self._gold.with_rollouts(change) for change in changes]
        for shown in explained(changes, groups, self._formats):
            check = next(one for one in self._checks if one.name == shown.check)
            check.says, check.remedy_now = shown.says, shown.remedy
            self._notify(shown)

    def act(self) -> None:
        """Raises RunPaused, RunRolledBack or RunIll if a check that became ill since the last call has that action."""
        due, self._due = self._due, None
        if due is None:
            return
        says = f"health.{due.check}: {due.when}, {due.says}."
        action = self._section.action_of(due.check)
        if action == "rollback":
            assert self._rollback is not None, "the loop gives one if a check has this action"
            planned = self._rollback.plan(due)
            if isinstance(planned, Rollback):
                self._rollback.record(planned)
                raise RunRolledBack(f"{says} The run continues from the checkpoint of step {planned.to}.")
            says = f"{says} The run cannot roll back: {planned}."
        if action in ("pause", "rollback"):
            raise RunPaused(f"{says} The run is saved and paused at step {due.step}.",
                            remedy=f"{due.remedy} Then: atropos resume {console.quoted(self._directory)}")  # fmt: skip
        raise RunIll(
            f"{says} The run was stopped at step {due.step}; steps after its last checkpoint are not kept.",
            remedy=f"{due.remedy} Then: atropos resume {console.quoted(self._directory)}",
        )

    def blamed(self) -> Change | None:
        """Return a check's explanation for equal rewards, if there is one."""
        for check in self._checks:
            if check.name in EXPLAINS_EQUAL_REWARDS and check.state != "ok":
                return Change(
                    check.since, check.name, check.state, check.since, check.says, check.remedy_now or check.remedy
                )
        return None

    @contextmanager
    def waiting(self, step: int, ended: Callable[[], int]) -> Iterator[None]:
        """Report a silence while the run waits for the groups of a step, before any deadline. `ended` returns how many rollouts,
        replies and rewards have ended so far."""
        silence = self._silence
        if silence is None:
            yield
            return
        watching = asyncio.ensure_future(self._watch(step, silence, ended))
        try:
            yield
        finally:
            watching.cancel()

    def state(self) -> Mapping[str, Any]:
        saved: dict[str, Any] = {"checks": {check.name: check.save() for check in self._checks}}
        if self._rescoring is not None:
            saved["rescoring"] = self._rescoring.state()
        return saved | ({"gold": self._gold.state()} if self._gold is not None else {})

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Resume at `step`: remove what was written after it."""
        for check in self._checks:
            if check.name in state["checks"]:
                check.load(state["checks"][check.name])
        if self._rescoring is not None and "rescoring" in state:
            self._rescoring.load(state["rescoring"])
        if self._gold is not None and "gold" in state:
            self._gold.load(state["gold"])
        forget_after(step, self._directory)

    async def _watch(self, step: int, silence: Silence, ended: Callable[[], int]) -> None:
        patience, before = silence.patience_s(), -1
        while before != (before := ended()):  # noqa: ASYNC110 # calls end in many places
            await asyncio.sleep(patience)
        if (change := silence.look(step, {"silence/silent_s": patience + 1e-3})) is not None:
            self._notify(change)

    def _notify(self, change: Change) -> None:
        write(self._directory, change.row())
        if change.state != "ill":
            return
        console.warn(f"health.{change.check}: {change.when}, {change.says}.\n  {change.remedy}")
        if (action := self._section.action_of(change.check)) in BY_FORCE:
            due = "pause" if self._due is None else self._section.action_of(self._due.check)
            keeps = BY_FORCE.index(due) >= max(BY_FORCE.index(action), 1)  # of two pauses the last is named
            self._due = self._due if keeps else change


def measured_before_training(groups: Sequence[ScoredGroup], metrics: Metrics) -> Metrics:
    """Return numbers of the evaluation before step 1 for its checks, under names that begin with eval/. `metrics` are numbers of its
    groups as of a step."""
    found = metrics | measure_replies(groups)
    return {f"eval/{name}": value for name, value in found.items() if name in OF_EVALUATION}


def before_training(evaluation: Mapping[str, float]) -> Metrics:
    """Return the numbers that the checks look at, from the metrics of the evaluation before step 1."""
    found = {name: evaluation[f"eval/{name}"] for name in OF_EVALUATION if f"eval/{name}" in evaluation}
    return found | {BEFORE_TRAINING: 1.0}


def findings(
    evaluation: Mapping[str, float],
    groups: Sequence[ScoredGroup],
    section: HealthSection,
    run: Settings,
    formats: Mapping[str, str],
) -> list[Change]:
    """Return what is wrong with the replies of an evaluation outside a run. `evaluation` is as `measured_before_training` returns it."""
    return explained(judge(checks(section, run), 0, before_training(evaluation)), groups, formats)


def explained(changes: Sequence[Change], groups: Sequence[ScoredGroup], formats: Mapping[str, str]) -> list[Change]:
    """Add causes and examples from the groups to changes."""
    why, found = causes(groups), replies(groups)
    return [with_example(_with(change, why.get(change.check)), found, formats) for change in changes]


def with_example(change: Change, found: Sequence[Reply], formats: Mapping[str, str]) -> Change:
    """Add the end of a reply to a finding about replies, and to its remedy what is known from that reply."""
    if change.state == "ok":
        return change
    says, header, stated = change.says, "", ""
    if (shown := example(change.check, found)) is not None:
        says, header = f"{says}. One reply ends: {shown.end}", shown.header
        stated = formats.get(shown.environment, "").replace("{name}", shown.environment)
    remedy = change.remedy.replace("HEADER", json.dumps("\n" + (header or "User:"))).replace("FORMAT", stated)
    return replace(change, says=says, remedy=" ".join(remedy.split()))


def write(directory: Path, row: Mapping[str, Any]) -> None:
    """Append one line to health.jsonl. Raises RunDirectoryError."""
    try:
        append_lines(directory / HEALTH, [json.dumps(row)])
    except OSError as error:
        raise unwritable(directory / HEALTH, error) from error


def still_ill(directory: Path) -> list[HealthChange]:
    """Return the checks that were ill at the end of a run, from health.jsonl. Empty if the directory is not found: `directory` may be
    relative, and a component may have changed the current directory."""
    if not RunDirectory(directory).holds_run():
        return []
    last = {change.check: change for change in RunRecords(directory).health()}
    return [change for change in last.values() if change.state == "ill" and change.check != "run"]


@contextmanager
def end_recorded(directory: Path) -> Iterator[None]:
    """Write an error that ends the run as the last line of health.jsonl, under the name "run", for `atropos doctor`."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        step = max((int(row["step"]) for row in health_rows(directory)), default=0)
        says, *rest = Exception.__str__(error).splitlines() or [""]
        remedy = getattr(error, "remedy", None) or " ".join(rest)
        says = f"{type(error).__name__}: {says}"
        with suppress(RunDirectoryError):  # the error that is on its way says more
            write(directory, {"step": step, "check": "run", "state": "ill", "since": step, "says": says, "do": remedy})
        raise


def forget_after(step: int, directory: Path) -> None:
    """Remove records of steps that will be run again after the run died. Raises RunDirectoryError."""
    path = directory / HEALTH
    if not path.exists():
        return
    kept = [row for row in health_rows(directory) if row["step"] <= step and row["check"] != "run"]
    try:
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
    except OSError as error:
        raise unwritable(path, error) from error


def _with(change: Change, cause: str | None) -> Change:
    if cause is None or change.state == "ok":
        return change
    return replace(change, says=f"{change.says}: {cause}")
