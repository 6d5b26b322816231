"""`atropos export`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atropos_core.scripting.results import Exported, ExportedPolicy
    from atropos_records.rollout_records import RolloutRecords


class Form(StrEnum):
    sft = "sft"
    dpo = "dpo"
    parquet = "parquet"
    hf = "hf"


MinRewardOption = Annotated[float | None, typer.Option(help="sft: only episodes of at least this reward.")]
OnlyCorrectOption = Annotated[
    bool, typer.Option("--only-correct", help="sft: only episodes that the environment marks as correct.")
]
BestPerGroupOption = Annotated[
    int | None, typer.Option(min=1, help="sft: at most this many per group, the best first. \\[default: all]")
]
MinMarginOption = Annotated[
    float | None,
    typer.Option(min=0, help="dpo: smallest difference of the rewards of a pair. \\[default: any]"),
]
KeepCutOffOption = Annotated[
    bool, typer.Option("--keep-cut-off", help="sft, dpo: include episodes that ended at the token limit.")
]


def add(app: typer.Typer) -> None:
    app.command("export", rich_help_panel="Connect")(export)


def export(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still be running.", show_default=False)],
    form: Annotated[
        Form,
        typer.Option(
            "--as",
            help="sft: conversations. dpo: pairs of replies. parquet: everything that is recorded. hf: the trained policy.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A new file, NAME.jsonl or NAME.parquet; hf: a new directory.")],
    step: Annotated[
        list[int] | None,
        typer.Option(
            help="Only the rollouts of this step; may be repeated. hf: the checkpoint of this step. "
            "\\[default: all recorded; the newest checkpoint]"
        ),
    ] = None,
    min_reward: MinRewardOption = None,
    only_correct: OnlyCorrectOption = False,
    best_per_group: BestPerGroupOption = None,
    min_margin: MinMarginOption = None,
    keep_cut_off: KeepCutOffOption = False,
    merged: Annotated[bool, typer.Option("--merged", help="hf: merge a trained adapter into a whole model.")] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Then upload it to a new, private repository of the Hugging Face hub."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository of --push public.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Write a run's rollouts as a data set, or its policy as a model, that other libraries read.

    [bold]Examples[/]

      atropos export runs/gsm8k-20260131-120000 --as sft --out sft.jsonl --only-correct --best-per-group 1

      atropos export runs/gsm8k-20260131-120000 --as dpo --out pairs.parquet --min-margin 0.2

      atropos export runs/gsm8k-20260131-120000 --as hf --out my-model
    """
    made = pushed(
        run, form.value, out, steps=step or (), min_reward=min_reward, only_correct=only_correct, best_per_group=best_per_group,
        min_margin=min_margin, keep_cut_off=keep_cut_off, merged=merged, push=push,
        public=public,
    )  # fmt: skip
    show(made, as_json=as_json)


def pushed(
    run: Path, form: str, out: Path, *, push: str | None = None, public: bool = False, **options: Any
) -> Exported | ExportedPolicy:
    """Export a run, and with `push` upload the result. For `options` see `exported`. Raises AtroposError."""
    from dataclasses import replace

    from atropos_core.errors import ConfigError
    from atropos_records.rollout_records import RolloutRecords

    if push is None:
        if public:
            raise ConfigError("--public has no effect without --push.")
        return exported(run, form, out, **options)
    from atropos_records.hugging_face import Hub

    records, hub = RolloutRecords(run), Hub(push, public=public)
    made = exported(run, form, out, **options)
    return replace(made, url=hub.push(made, records))


def exported(
    run: Path,
    form: str,
    out: Path,
    *,
    steps: Sequence[int] = (),
    min_reward: float | None = None,
    only_correct: bool = False,
    best_per_group: int | None = None,
    min_margin: float | None = None,
    keep_cut_off: bool = False,
    merged: bool = False,
) -> Exported | ExportedPolicy:
    """Export a run as `atropos export` does, without printing. Raises AtroposError."""
    from atropos_core.errors import ConfigError
    from atropos_records.dataset import DatasetExport, selection_of
    from atropos_records.groups import recorded_groups
    from atropos_records.rollout_records import RolloutRecords

    selection = selection_of(
        form, min_reward=min_reward, only_correct=only_correct, best_per_group=best_per_group, min_margin=min_margin,
        keep_cut_off=keep_cut_off,
    )  # fmt: skip
    records = RolloutRecords(run)
    if form == "hf":
        return _policy(records, out, steps, merged=merged)
    if merged:
        raise ConfigError(f"--merged has no effect with --as {form}: it is for hf.")
    groups = recorded_groups(records, steps)
    export = DatasetExport(form, out, selection)
    try:
        for group in groups:
            export.add(group)
        return export.finish()
    finally:
        export.discard()


def _policy(records: RolloutRecords, out: Path, steps: Sequence[int], *, merged: bool) -> ExportedPolicy:
    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.plugins.model_provider import TrainerProvider
    from atropos_records.policy import checkpoint_of, export_policy

    if len(steps) > 1:
        raise ConfigError("a policy is of one step.", remedy="Give --step once with --as hf.")
    checkpoint = checkpoint_of(records, steps[0] if steps else None, console.warn)
    merge = None
    if merged:
        trainer = str(records.config.get("trainer", {}).get("use"))
        provider = load_plugins().registry.find("trainer", trainer).provider
        merge = provider.merge if isinstance(provider, TrainerProvider) else None
        if merge is None:
            raise ConfigError(
                f"trainer {trainer!r} saves no adapters that could be merged.", remedy="Leave --merged out."
            )
    return export_policy(records, checkpoint, out, merge)


def show(made: Exported | ExportedPolicy, *, as_json: bool = False) -> None:
    from dataclasses import asdict

    from atropos_core import console
    from atropos_core.scripting.results import ExportedPolicy

    if as_json:
        console.document({**asdict(made), "path": str(made.path)})
        return
    if isinstance(made, ExportedPolicy):
        console.say(f"the {made.kind} of step {made.step}, {made.size_bytes / 1e6:.1f} MB: {made.path}")
    else:
        console.say(f"{made.written:,} rows: {made.path}")
        if made.left_out:
            console.table(("left out", "why"), [(f"{count:,}", reason) for reason, count in made.left_out.items()])
        for reason, count in made.without_tokens.items():
            console.say(f"{count:,} episodes have no tokens in it: {reason}")
    if made.url:
        console.say(f"pushed: {made.url}")
