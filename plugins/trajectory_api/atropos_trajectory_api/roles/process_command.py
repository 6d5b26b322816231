"""`atropos process`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.options import (
    ROLLOUT_SECTIONS,
    EngineOption,
    EnvOption,
    FileArgument,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    Uses,
    configure,
)
from atropos_records.export_command import (
    BestPerGroupOption,
    KeepCutOffOption,
    MinMarginOption,
    MinRewardOption,
    OnlyCorrectOption,
)

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan
    from atropos_core.rollouts.tool_sets import Tools
    from atropos_core.types import ScoredGroup, Split
    from atropos_records.selection import Selection


USES = Uses(
    "atropos process",
    (*ROLLOUT_SECTIONS, *(f"training.{name}" for name in ("group_size", "groups_per_step", "rollout_deadline_s"))),
)


class Form(StrEnum):
    sft = "sft"
    dpo = "dpo"
    parquet = "parquet"


def add(app: typer.Typer) -> None:
    app.command("process", rich_help_panel="Train")(process)


def process(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="A new file, with one JSON line per group; or NAME.jsonl or NAME.parquet with --as."
        ),
    ],
    file: FileArgument = None,
    env: EnvOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    reward: RewardOption = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks to run; environments take turns.")] = 16,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Rollouts of each task. \\[default: training.group_size, 8]")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Run the held-out tasks.")] = False,
    old_schema: Annotated[
        bool, typer.Option("--old-schema", help="Write the fourteen keys of the old Atropos protocol, masks with -100.")
    ] = False,
    form: Annotated[
        Form | None,
        typer.Option(
            "--as",
            help="Write a data set instead, as `atropos export` does. sft: conversations. dpo: pairs of replies. parquet: everything.",
        ),
    ] = None,
    min_reward: MinRewardOption = None,
    only_correct: OnlyCorrectOption = False,
    best_per_group: BestPerGroupOption = None,
    min_margin: MinMarginOption = None,
    keep_cut_off: KeepCutOffOption = False,
    seed: SeedOption = None,
    changes: SetOption = None,
) -> None:
    """Run tasks without training and keep the rollouts: one scored group per line, or a data set.

    [bold]Examples[/]

      atropos process --env gsm8k --model tiny --out rollouts.jsonl

      atropos process --env ./mine.py:Mine --groups 100 --old-schema --out old.jsonl

      atropos process --env gsm8k --groups 100 --as sft --only-correct --best-per-group 1 --out sft.jsonl
    """
    from atropos_core.errors import ConfigError
    from atropos_core.launch.plan import make_plan
    from atropos_records.dataset import selection_of

    kind = form.value if isinstance(form, Form) else form
    selection = selection_of(
        kind, min_reward=min_reward, only_correct=only_correct, best_per_group=best_per_group,
        min_margin=min_margin, keep_cut_off=keep_cut_off,
    )  # fmt: skip
    if kind and old_schema:
        raise ConfigError("--old-schema has no effect with --as.", remedy="Give one of the two.")
    loaded, resolved, plugins = configure(
        file, env=env, model=model, engine=engine, reward=reward, seed=seed, changes=changes,
        flags={"training.group_size": group_size}, uses=USES,
    )  # fmt: skip
    plan = make_plan(loaded.config, resolved, plugins, training=False)
    split: Split = "test" if test else "train"
    if kind:
        _as_dataset(plan, groups, split, kind, out, selection)
    else:
        _as_lines(plan, groups, split, out, old_schema=old_schema)


def _as_lines(plan: Plan, groups: int, split: Split, out: Path, *, old_schema: bool) -> None:
    import asyncio

    from atropos_core import console
    from atropos_core.errors import Interrupted
    from atropos_trajectory_api.legacy_groups import outgoing_groups as wire
    from atropos_trajectory_api.roles.processing import Lines, native_line

    lines = Lines(out)
    line = wire.line if old_schema else native_line
    try:
        left_out = asyncio.run(
            _process(plan, groups, split, lambda group, _: lines.write(line(group)), whole_groups=old_schema)
        )
    except asyncio.CancelledError:
        raise Interrupted(f"stopped: {out} has the {lines.count} groups that were ready") from None
    finally:
        lines.close()
        if not lines.count:
            out.unlink(missing_ok=True)
    if left_out:
        console.warn(
            f"{left_out} groups are left out: none of their rollouts ended, which the old schema cannot express"
        )
    console.say(f"{lines.count} groups: {out}")


def _as_dataset(plan: Plan, groups: int, split: Split, form: str, out: Path, selection: Selection) -> None:
    import asyncio

    from atropos_core.errors import Interrupted
    from atropos_records.dataset import DatasetExport
    from atropos_records.export_command import show
    from atropos_records.groups import live_group

    export = DatasetExport(form, out, selection)
    try:
        asyncio.run(_process(plan, groups, split, lambda group, tools: export.add(live_group(group, tools))))
        show(export.finish())
    except asyncio.CancelledError:
        if not export.written:
            raise Interrupted("stopped: no row was ready, so no file was written") from None
        made = export.finish()
        raise Interrupted(f"stopped: {out} has the {made.written} rows that were ready") from None
    finally:
        export.discard()


async def _process(
    plan: Plan, groups: int, split: Split, put: Callable[[ScoredGroup, Tools], None], *, whole_groups: bool = False
) -> int:
    """Returns how many groups were left out because `whole_groups` are wanted. Raises CancelledError if it was stopped."""
    from contextlib import aclosing
    from time import perf_counter

    from atropos_core.builtin.progress import LINE_EVERY_S
    from atropos_core.console import say
    from atropos_core.guards.blocked_loop import blocked_loop_alarm
    from atropos_core.guards.exits import own_process
    from atropos_core.launch.builder import build_for_evaluation
    from atropos_core.launch.signals import cancelled_by_signals
    from atropos_core.rollouts.runner import RolloutRunner
    from atropos_core.storage.tempdirs import owned_directory
    from atropos_trajectory_api.roles.processing import draws, scored_groups, write

    config = plan.config
    started = shown_at = perf_counter()
    tokens = done = 0

    def shown(group: ScoredGroup) -> None:
        nonlocal shown_at, tokens, done
        done += 1
        tokens += sum(int(one.sampled.sum()) for episode in group.episodes for one in episode.rollouts)
        if (now := perf_counter()) - shown_at >= LINE_EVERY_S:
            shown_at = now
            say(f"{done}/{groups} groups  {tokens / (now - started):,.0f} tokens/s")

    with cancelled_by_signals(), owned_directory("process") as directory:
        (directory / "logs").mkdir()
        parts = await build_for_evaluation(plan, directory)
        try:
            await parts.engine.open()
            runner = RolloutRunner(
                parts.environments,
                parts.rewards,
                parts.engine,
                plan.tokenizer(),
                deadline_s=config.training.rollout_deadline_s,
                deterministic=config.deterministic,
            )
            drawn = draws(parts.environments, groups, split, config.seed)
            size, at_once = config.training.group_size, config.training.groups_per_step
            with blocked_loop_alarm(), own_process():
                async with aclosing(
                    scored_groups(runner, drawn, size, config.sampling.record(), at_once=at_once)
                ) as scored:
                    return await write(
                        scored, lambda group: put(group, runner.tools_of(group)), whole=whole_groups, shown=shown
                    )
        finally:
            await parts.close()
