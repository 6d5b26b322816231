"""Sample a recorded step's tasks again, with the policy that the step began with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atropos_core.config.run_file import RunConfig
from atropos_core.errors import ConfigError, DataError
from atropos_core.guards.blocked_loop import blocked_loop_alarm
from atropos_core.interfaces import Environment
from atropos_core.launch.builder import build_for_evaluation
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.plugins.manager import Plugins
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward, task_count
from atropos_core.seeds import derive
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.types import Draw, ScoredGroup
from atropos_debugging.recorded_groups import RecordedGroup

OPENABLE = ("config.json", "adapter_config.json")  # a policy has one of these if an engine can open it


def resampling_plan(config: RunConfig, plugins: Plugins, before: Checkpoint | None) -> Plan:
    """Plan the environments, and an engine for the policy of this checkpoint, or for the run's model. Raises as make_plan, and
    ConfigError if no engine can open the policy."""
    if config.trainer.use == "toy" or (
        before is not None and not any((before.policy / name).is_file() for name in OPENABLE)
    ):
        raise ConfigError(
            f"the step cannot be sampled again: trainer {config.trainer.use!r} saves its policy in a form that no engine opens.",
            remedy="Leave --resample out: the recorded rollouts are then trained.",
        )
    model = config.model if before is None else str(before.policy)
    plan = make_plan(config, plugins.resolve_model(model), plugins, training=False, warns=False)
    return replace(plan, named={"environment": plan.named["environment"]})


async def sampled_again(
    plan: Plan, rewards: Sequence[WeightedReward], groups: Sequence[RecordedGroup], version: int, scratch: Path
) -> tuple[list[ScoredGroup], list[str]]:
    """Run the tasks of these groups again, and score them. Return the groups that have episodes, and a note for each that has none.
    Raises DataError if a task is not the recorded one any more."""
    (scratch / "logs").mkdir(parents=True)
    parts = await build_for_evaluation(plan, scratch)
    try:
        draws = [_draw_again(one, parts.environments, plan.config.seed) for one in groups]
        await parts.engine.open()
        async with parts.engine.paused(version):  # so that it marks its tokens with the policy's version
            pass
        runner = RolloutRunner(
            parts.environments, rewards, parts.engine, plan.tokenizer(),
            deadline_s=plan.config.training.rollout_deadline_s, deterministic=plan.config.deterministic,
        )  # fmt: skip
        size, sampling = plan.config.training.group_size, plan.config.sampling.record()
        keys = [runner.schedule_keys(draw, size) for draw in draws]
        with blocked_loop_alarm():
            made = await asyncio.gather(
                *(runner.run(draw, of, size, sampling) for draw, of in zip(draws, keys, strict=True))
            )
    finally:
        await parts.close()
    notes = [f"task {one.task.id!r} gave no rollout: {one.failed[-1].cause}" for one in made if not one.episodes]
    if len(notes) == len(made):
        raise DataError(f"no task of the step could be sampled again: {made[0].failed[-1].cause}")
    return [one for one in made if one.episodes], notes


def _draw_again(one: RecordedGroup, environments: dict[str, Environment], seed: int) -> Draw:
    """Return the draw of the recorded task with another seed."""
    draw, task = one.group.draw, one.group.task
    environment = environments.get(draw.environment)
    if environment is None:
        raise ConfigError(
            f"task {task.id!r} is of environment {draw.environment!r}, which the run file does not have: its group came from elsewhere.",
            remedy="Leave --resample out: the recorded rollouts are then trained.",
        )
    if not environment.repeats:
        raise ConfigError(
            f"the tasks of environment {draw.environment!r} cannot be run again: it is an endless stream.",
            remedy="Leave --resample out: the recorded rollouts are then trained.",
        )
    size = task_count(draw.environment, environment, draw.split)
    found = (
        environment.tasks(draw.split)[draw.index].id
        if one.lines[0].task_index is not None and draw.index < size
        else None
    )
    if found != task.id:
        raise DataError(
            f"task {draw.index} of environment {draw.environment!r} was {task.id!r}, and is {found!r} now: the environment's tasks "
            "have changed since the run.",
            remedy="Restore them, or leave --resample out: the recorded rollouts are then trained.",
        )
    return replace(draw, seed=derive(seed, "replay", draw.id))
