"""`atropos doctor RUN`: diagnose a run directory. The run may be running, finished or dead.

The run's checks, with its thresholds, are applied to metrics.jsonl, so they also work for a run whose own checks were off. The
reasons for failed rollouts are in rollouts/, and the error that ended a run is in health.jsonl.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from atropos_core import console
from atropos_core.config.health_options import Check, HealthSection
from atropos_core.errors import CheckpointError, RunDirectoryError
from atropos_core.guards.patience import look_at
from atropos_core.health import check as health_check
from atropos_core.health.check import Change, Settings, when
from atropos_core.health.checks import Silence, checks, judge
from atropos_core.health.replies import recorded_replies
from atropos_core.health.watch import before_training, with_example
from atropos_core.interfaces import Finding
from atropos_core.models.model_size import context_tokens
from atropos_core.storage.checkpoint import Checkpoints
from atropos_core.storage.reading import open_file
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.storage.run_records import ROLLOUTS, RunRecords, is_step, json_rows, metric_rows

LOG_CHARACTERS = 300  # of a log's last line
TAIL_BYTES = 16_384  # of a log, in which its last line is looked for


def diagnose(directory: Path) -> list[Finding]:
    """Return findings; `ok` is False for problems, None for information. Raises RunDirectoryError if there is no run."""
    records = RunRecords(directory)
    try:
        section = HealthSection.model_validate(records.config.get("health", {}))
    except ValidationError as error:
        raise RunDirectoryError(f"{directory}/config.toml cannot be read: {error}") from error
    wanted = 0
    for part in ("warmup", "training"):
        if not is_step(steps_of := records.config.get(part, {}).get("steps", 0)):
            raise RunDirectoryError(f"{directory}/config.toml cannot be read: {part}.steps is not a number of steps.")
        wanted += steps_of
    steps, broken = metric_rows(records.directory)
    found = _ended(records, wanted, steps, section)
    if broken:
        found.append(
            Finding(
                "metrics",
                None,
                f"metrics.jsonl has {broken} lines that are not whole",
                "A crash or a full disk cuts lines off; the steps on them are not looked at.",
            )
        )
    found += [Finding("paths", None, f"{label} {text}") for label, text in records.paths.items()]
    found += [Finding("rollback", None, f"{one}. {one.says}") for one in records.rollbacks()]
    return found + _checked(records, section, steps) + _checkpoints(records.run.checkpoints)


def _ended(records: RunRecords, wanted: int, steps: list[dict[str, float]], section: HealthSection) -> list[Finding]:
    """Report the state of the run."""
    directory = records.directory
    last = int(steps[-1]["step"]) if steps else max(records.run.checkpoints.steps(), default=0)
    if records.run.is_locked():
        return [_living(directory, last, wanted, steps, section), *_stopped(records.run)]
    errors = [change for change in records.health() if change.check == "run"]
    if errors:
        return [Finding("run", False, f"ended at step {last} of {wanted}: {errors[-1].says}", errors[-1].remedy)]
    if records.finished_steps >= wanted:
        return [Finding("run", True, f"finished: all {wanted} steps")]
    if (directory / "checkpoints" / f"step-{last:06d}").is_dir() and last:
        how = "was stopped and saved at" if steps else "has ended, and was saved last at"
        return [Finding("run", None, f"{how} step {last} of {wanted}", f"atropos resume {console.quoted(directory)}")]
    tails = "".join(f"\n{name} ends with: {line}" for name, line in _logs(directory))
    return [
        Finding(
            "run",
            False,
            f"died at step {last + 1} of {wanted} without a word: it was killed, or the machine went away{tails}",
            f"atropos resume {console.quoted(directory)}",
        )
    ]


def _stopped(run: RunDirectory) -> list[Finding]:
    """Report processes of a running run that a signal or a debugger has stopped."""
    pid = run.process_id()
    seen = None if pid is None else look_at(pid)
    return [
        Finding("process", False, f"{name} (pid {pid}) is stopped", f"To continue it: kill -CONT {pid}")
        for pid, name in (seen.stopped if seen else ())
    ]


def _living(directory: Path, last: int, wanted: int, steps: list[dict[str, float]], section: HealthSection) -> Finding:
    silence = Silence(section.silence)
    for seen in steps:
        silence.look(int(seen["step"]), {"time/waiting_s": seen.get("time/step_s", 0.0)})
    written = (directory / "config.toml", directory / "metrics.jsonl")  # the first when a run starts or resumes
    # Files are dated by the clock of the wall, which may have been set back since.
    quiet_s = max(time.time() - max(path.stat().st_mtime for path in written if path.exists()), 0.0)
    if quiet_s > silence.patience_s():  # what hangs at the groups of a step says so itself: the check `silence`
        return Finding("run", None, f"is at step {last} of {wanted}, and recorded nothing for {quiet_s:.0f} s: it starts up, "
                       "evaluates, saves a checkpoint, or hangs", "logs/ has the output of its processes.")  # fmt: skip
    return Finding("run", True, f"is going on: step {last} of {wanted}, {quiet_s:.0f} s ago")


def _checked(records: RunRecords, section: HealthSection, steps: list[dict[str, float]]) -> list[Finding]:
    """Report every check at the last step, and what was wrong before."""
    on = {name: one.model_copy(update={"action": "warn"}) for name, one in section if isinstance(one, Check)}
    judging = checks(HealthSection().model_copy(update=on), _settings(records))
    changes: dict[str, list[Change]] = {}
    for row in steps:
        step = int(row["step"])
        seen = row if step else before_training(row)  # step 0: the evaluation before training
        for change in judge([check for check in judging if check.name != Silence.name], step, seen):
            changes.setdefault(change.check, []).append(change)
    recorded = records.health()
    noted = {(change.check, change.state, change.since): change for change in recorded}
    found, well, blind = [], 0, 0
    for check in judging:
        ill = [change for change in changes.get(check.name, ()) if change.state == "ill"]
        said = noted.get((check.name, check.state, check.since))
        if said is not None:
            says, remedy = said.says, said.remedy
        elif check.state != "ok":
            says, remedy = _with_example(records, check, check.remedy_now or check.remedy)
        if check.state == "ill":
            off = getattr(section, check.name).action == "off"  # by its own name: the run is meant to be so
            since = f"{when(check.since)}{', and the run has this check off' if off else ''}"
            found.append(Finding(check.name, None if off else False, f"{since}: {says}", remedy))
        elif check.state == "suspect":
            found.append(Finding(check.name, None, f"suspect {when(check.since)}: {says}", remedy))
        elif ill:
            until = f"from step {ill[-1].since} to {check.since - 1}" if ill[-1].since else when(0)
            detail = f"was ill {until}, and is as it should be: {ill[-1].says}"
            found.append(Finding(check.name, None, detail, ill[-1].remedy))
        elif check.looked or check.name == Silence.name:
            well += 1
        else:
            blind += 1
    silent = [change for change in recorded if change.check == Silence.name]
    if silent and silent[-1].state == "ill":
        found.append(Finding(Silence.name, False, f"at step {silent[-1].step}: {silent[-1].says}", Silence.remedy))
        well -= 1
    if not steps:
        detail = "metrics.jsonl has no step: there is nothing to check"
        return [
            *found,
            Finding("checks", None, detail, "A run writes it if it has a [sink.jsonl], which is the default."),
        ]
    unseen = f"; {blind} had nothing to look at" if blind else ""
    return [*found, Finding("checks", True, f"{well} of {len(judging)} found nothing{unseen}")]


def _settings(records: RunRecords) -> Settings:
    """Return the options that findings name."""
    limits = [records.config.get(section, {}) for section in ("sampling", "evaluation")]
    run, evaluation = (one.get("max_tokens") or 0 if isinstance(one, dict) else 0 for one in limits)
    context = context_tokens(Path(str(records.config.get("model", ""))))
    return Settings(run if is_step(run) else 0, evaluation if is_step(evaluation) else 0, context)


def _with_example(records: RunRecords, check: health_check.Check[Check], remedy: str) -> tuple[str, str]:
    """Return the finding and the remedy of a check that the run itself did not make, with an example from rollouts/."""
    path = records.rollouts_path(check.since) if check.since else records.directory / ROLLOUTS / "eval-000000.jsonl"
    says = check.says + _cause(records, check.name, check.since)
    change = Change(check.since, check.name, check.state, check.since, says, remedy)
    shown = with_example(change, recorded_replies(json_rows(path)), {})
    return shown.says, shown.remedy


def _cause(records: RunRecords, check: str, step: int) -> str:
    """Return the first error in rollouts/ that explains a failure in this step."""
    if not check.startswith(("failed_", "partial_")):
        return ""
    for row in json_rows(records.rollouts_path(step)):
        if "failed" in row and (
            check == "partial_groups" or (row.get("where") == "reward") == (check == "failed_rewards")
        ):
            return f": {row['failed']}"
    return ""


def _checkpoints(checkpoints: Checkpoints) -> list[Finding]:
    broken: list[str] = []
    try:
        latest = checkpoints.latest(broken.append)
    except CheckpointError as error:
        return [Finding("checkpoint", False, text, "Nothing can be resumed from it.") for text in (*broken, str(error))]
    found = [
        Finding("checkpoint", False, text, "`atropos resume` continues from the newest complete one.")
        for text in broken
    ]
    if latest is not None:
        found.append(Finding("checkpoint", True, f"the latest complete one is from step {latest.step}"))
    return found


def _logs(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the last line of each process's log that has one."""
    for path in sorted((directory / "logs").glob("*")):
        with suppress(OSError):  # it is not a log
            if line := _last_line(path):
                yield f"logs/{path.name}", line


def _last_line(path: Path) -> str:
    """Return the end of the last line that is not blank. Reads only the end of the file. Raises OSError."""
    with open_file(path) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = file.read(TAIL_BYTES).decode(errors="replace").strip().splitlines()
    return lines[-1][-LOG_CHARACTERS:] if lines else ""
