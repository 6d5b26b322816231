"""Do the rollback that a run has recorded: remove later checkpoints, and lower the weight of the reward that was gamed."""

from __future__ import annotations

from dataclasses import replace

from atropos_core import console
from atropos_core.config.run_file import RunConfig, to_toml
from atropos_core.errors import ConfigError
from atropos_core.health.rollback import write_rollbacks
from atropos_core.launch.plan import Plan
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.storage.run_records import rollbacks


def refuse_hopeless_rollback(config: RunConfig) -> None:
    """Raises ConfigError if a new run is to roll back and trains on only one reward. (After a rollback that is as it should be.)"""
    trained = [name for name, weight in config.reward_weights().items() if weight]
    if config.health.rolls_back and len(trained) < 2:
        raise ConfigError(
            'health.reward_hacking.action = "rollback" needs two rewards with a weight above 0, so that one is left once the other '
            f"is no longer trained on; this run has {len(trained)}.",
            remedy="Add a reward, raise a weight, or use pause.",
        )


def finish_rollback(plan: Plan, run: RunDirectory) -> Plan:
    """If a rollback was recorded and is not done, do it, and return the plan with the new weight. Every part of it can be done twice,
    so a process may be killed at any point. Call it while holding the run directory's lock."""
    rows = rollbacks(run.path)
    if not rows or rows[-1].done:
        return plan
    last = rows[-1]
    run.checkpoints.set_aside_after(last.to, len(rows))
    plan = with_weight(plan, last.reward, last.weight)
    run.write("config.toml", to_toml(plan.resolved()))
    write_rollbacks(run.path, [*rows[:-1], replace(last, done=True)])
    console.warn(f"{last}")
    return plan


def with_weight(plan: Plan, reward: str, weight: float) -> Plan:
    """Return a plan in which a reward has another weight."""
    if reward not in plan.config.reward:  # left out by a flag of `atropos resume`
        return plan
    changed = {"weight": weight}
    rewards = plan.config.reward | {reward: plan.config.reward[reward].model_copy(update=changed)}
    resolved = plan.named["reward"][reward]
    named = {**plan.named["reward"], reward: replace(resolved, component=rewards[reward])}
    return replace(
        plan, config=plan.config.model_copy(update={"reward": rewards}), named={**plan.named, "reward": named}
    )
