"""`atropos process`."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from atropos_core.launch.assemble import Plan
    from atropos_core.types import Split
    from atropos_trajectory_api.roles.processing import Lines


USES = Uses(
    "atropos process",
    (*ROLLOUT_SECTIONS, *(f"training.{name}" for name in ("group_size", "groups_per_step", "rollout_deadline_s"))),
)


def add(app: typer.Typer) -> None:
    app.command("process")(process)


def process(
    out: Annotated[Path, typer.Option("--out", help="Write one JSON line a group into this new file.")],
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
        bool, typer.Option("--old-schema", help="The fourteen keys of the old Atropos protocol, masks with -100.")
    ] = False,
    seed: SeedOption = None,
    changes: SetOption = None,
) -> None:
    """Run tasks without training and keep the rollouts: one scored group a line.

    [bold]Examples[/]

      atropos process --env gsm8k --model tiny --out rollouts.jsonl

      atropos process --env ./mine.py:Mine --groups 100 --old-schema --out old.jsonl
    """
    import asyncio

    from atropos_core import console
    from atropos_core.launch.assemble import make_plan
    from atropos_trajectory_api.roles.processing import Lines

    loaded, resolved, plugins = configure(
        file, env=env, model=model, engine=engine, reward=reward, seed=seed, changes=changes,
        flags={"training.group_size": group_size}, uses=USES,
    )  # fmt: skip
    plan = make_plan(loaded.config, resolved, plugins, training=False)
    lines = Lines(out)
    try:
        left_out = asyncio.run(_process(plan, lines, groups, "test" if test else "train", old_schema))
    finally:
        lines.close()
        if not lines.count:
            out.unlink(missing_ok=True)
    if left_out:
        console.warn(
            f"{left_out} groups are left out: none of their rollouts ended, and the old schema has no place for that"
        )
    console.say(f"{lines.count} groups: {out}")


async def _process(plan: Plan, lines: Lines, groups: int, split: Split, old_schema: bool) -> int:
    import asyncio
    from contextlib import aclosing
    from time import perf_counter

    from atropos_core.console import LINE_EVERY_S, say
    from atropos_core.errors import Interrupted
    from atropos_core.launch.assemble import build_for_evaluation
    from atropos_core.launch.signals import blocked_loop_alarm, own_process, requests_to_end
    from atropos_core.rollouts.runner import RolloutRunner
    from atropos_core.rollouts.tokenizer import ChatTokenizer
    from atropos_core.storage.tempdirs import owned_directory
    from atropos_core.types import ScoredGroup
    from atropos_trajectory_api.legacy import outgoing_groups as wire
    from atropos_trajectory_api.roles.processing import draws, native_line, scored_groups, write

    config, task = plan.config, asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    started = shown_at = perf_counter()
    tokens = 0

    def shown(group: ScoredGroup, left_out: int) -> None:
        nonlocal shown_at, tokens
        tokens += sum(int(one.sampled.sum()) for episode in group.episodes for one in episode.rollouts)
        if (now := perf_counter()) - shown_at >= LINE_EVERY_S:
            shown_at = now
            say(f"{lines.count + left_out}/{groups} groups  {tokens / (now - started):,.0f} tokens/s")

    with requests_to_end(lambda: task.cancel()), owned_directory("process") as directory:
        (directory / "logs").mkdir()
        try:
            parts = await build_for_evaluation(plan, directory)
            try:
                await asyncio.gather(parts.engine.open(), *(one.open() for one in parts.environments.values()))
                runner = RolloutRunner(
                    parts.environments,
                    parts.rewards,
                    parts.engine,
                    ChatTokenizer(plan.model.directory),
                    deadline_s=config.training.rollout_deadline_s,
                    deterministic=config.deterministic,
                )
                drawn = draws(parts.environments, groups, split, config.seed)
                size, at_once = config.training.group_size, config.training.groups_per_step
                with blocked_loop_alarm(), own_process():
                    async with aclosing(
                        scored_groups(runner, drawn, size, config.sampling.record(), at_once=at_once)
                    ) as scored:
                        line = wire.line if old_schema else native_line
                        return await write(scored, lines, line, whole=old_schema, shown=shown)
            finally:
                await parts.close()
        except asyncio.CancelledError:
            raise Interrupted(f"stopped: {lines.path} has the {lines.count} groups that were ready") from None
