"""The report at the end of `atropos run`: accuracy or reward before and after, times, and the files of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atropos_core import console
from atropos_core.health.check import when
from atropos_core.health.watch import still_ill
from atropos_core.launch import picture
from atropos_core.launch.supervisor import Summary
from atropos_core.observe.profile import ProfileRow
from atropos_core.rollouts.evaluation_text import held_out_change

LEAST_SHARE = 0.005  # of a run's time: smaller rows are left out of the table


def report(summary: Summary) -> None:
    """Print a finished run: accuracy or reward before and after, times, and the files that it wrote."""
    console.say()
    for line in held_out_change(summary.before, summary.after):
        console.say(line)
    console.say(f"where the time went, {sum(summary.seconds.values()):.0f} s in all:")
    _times_table(summary.times)
    spent, steps = summary.seconds, max(summary.steps, 1)
    once = sum(spent.get(name, 0.0) for name in ("start-up", "evaluation", "checkpoint"))
    step_s = (sum(spent.values()) - once) / steps
    console.facts(
        [
            (
                "a step",
                f"{step_s:.2f} s on average, {spent.get('waiting', 0.0) / steps:.2f} s of it waiting for rollouts",
            ),
            ("idle", ", ".join(f"{role} {share:.0%}" for role, share in summary.idle.items()) + " of the time"),
            ("weights", _published(summary)),
            ("memory", f"{summary.peak_bytes / 1e9:.2f} GB at most, over all processes"),
            ("on disk", f"{summary.checkpoint_bytes / 1e6:.1f} MB a checkpoint"),
        ]
    )
    directory = summary.directory
    for rollback in summary.rollbacks:
        console.warn(f"{rollback}")
    for change in still_ill(directory):
        console.warn(
            f"at the end health.{change.check} was ill, {when(change.since)}: {change.says}.\n  {change.remedy}"
        )
    written = (
        ("policy", f"checkpoints/step-{summary.steps:06d}/policy"),
        ("metrics", "metrics.jsonl"),
        ("rollouts", "rollouts/"),
    )
    console.facts(
        [
            *((name, f"{directory}/{path}") for name, path in written if _is_written(directory / path)),
            ("plot", picture.where(directory)),
        ]
    )
    if (directory / picture.NAME).is_file():
        picture.show(directory / picture.NAME)


def _is_written(path: Path) -> bool:
    """True for a file, and for a directory that is not empty: a run may have no sink that writes it."""
    return path.is_file() or any(path.glob("*"))


def _published(summary: Summary) -> str:
    mean_ms = 1000 * summary.sync_s / max(summary.syncs, 1)
    disk = f", {summary.published_bytes / 1e6:.1f} MB on disk each" if summary.published_bytes else ""
    return f"published {summary.syncs} time{'s' * (summary.syncs != 1)}, {summary.sync_s:.2f} s in all, {mean_ms:.1f} ms each{disk}"


def _times_table(rows: Sequence[ProfileRow]) -> None:
    """Print the times of stages, which do not overlap, then of calls, which do."""
    shown = [
        (
            row.name if row.kind == "stage" else f"  {row.name}",
            f"{row.seconds:.1f}",
            f"{row.share:.0%}",
            row.calls or "",
            " / ".join(_ms(at) for at in (row.p50_s, row.p95_s, row.p99_s)) if row.calls else "",
            "" if row.items_per_s is None else f"{row.items_per_s:,.1f}",
        )
        for row in rows
        if row.share >= LEAST_SHARE
    ]
    console.table(("stage or call", "s", "share", "times", "p50 / p95 / p99 ms", "items/s"), shown)
    if less := len(rows) - len(shown):
        console.say(f"  {less} more under {LEAST_SHARE:.1%} each: summary.json has all")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"
