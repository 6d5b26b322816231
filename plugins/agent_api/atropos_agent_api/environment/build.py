"""Build the parts of environment `agent` from its options."""

from __future__ import annotations

import sys

from atropos_agent_api.config import AgentOptions, RewardOptions
from atropos_agent_api.environment.agent import Agent
from atropos_agent_api.environment.baseline import Baseline
from atropos_agent_api.environment.program import function_of
from atropos_agent_api.grading.command import CommandGrader
from atropos_agent_api.grading.graders import EnvironmentGrader, FunctionGrader, Grader, PluginGrader
from atropos_agent_api.sandboxes.local import LocalSandbox
from atropos_agent_api.sandboxes.preloaded import PreloadedSandbox
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_agent_api.sandboxes.streams import KeptStreams
from atropos_agent_api.tokens.model_formats import ModelFormats
from atropos_core.config.component import Component, RewardComponent
from atropos_core.config.resolve import inner
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Environment, Reward, Sandbox
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.proxies import HostedReward


def build(options: AgentOptions, context: RunContext) -> Agent:
    """Raises ConfigError, UnknownComponent, PluginError or FitError for the parts that its options name."""
    if context.deterministic and (idle := options.changed("concurrency")):
        raise ConfigError(
            f"{idle[0]} has no effect with deterministic = true, because the programs of all rollouts run at once.",
            remedy="Remove it; training.groups_per_step and group_size limit them.",
        )
    if context.deterministic and options.is_external:
        raise ConfigError(
            "deterministic = true is not possible with sandbox external: programs elsewhere decide when a call comes, and how many "
            "rollouts run at once.",
            remedy="Leave deterministic out, or have the run start the programs: command, or function.",
        )
    if options.baseline is not None and context.is_trained:
        raise ConfigError(
            "a baseline cannot be trained: its answers come as text, without ids and logprobs.",
            remedy="Remove baseline from the run file, or compare with `atropos eval`.",
        )
    label = context.label or "environment.agent"
    tasks_from: Environment | None = None
    if options.tasks_from is not None:
        tasks_from = inner("environment", f"{label}.tasks_from", options.tasks_from).build(context)
    sandbox = _sandbox(options, context, label)
    return Agent(
        options,
        tasks_from=tasks_from,
        grader=_grader(options, tasks_from, sandbox, context, label),
        sandbox=sandbox,
        formats=ModelFormats(context.model, options.format, context.today),
        streams=KeptStreams(context.directory / "agents" / label.rpartition(".")[2], options.keep_streams),
        context_tokens=context_tokens(context.model),
        in_order=context.deterministic,
        baseline=None if options.baseline is None else Baseline(options.baseline),
    )


def _sandbox(options: AgentOptions, context: RunContext, label: str) -> Sandbox:
    resolved = inner("sandbox", f"{label}.sandbox", options.sandbox)
    if options.function is None or options.sandbox.use != "process" or sys.platform != "linux":
        made: Sandbox = resolved.build(context)
        return made
    log = context.directory / "logs" / f"{label}-function.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return PreloadedSandbox(*function_of(options), options.here, log)


def _grader(
    options: AgentOptions, tasks_from: Environment | None, sandbox: Sandbox, context: RunContext, label: str
) -> Grader:
    reward = options.reward
    if reward is None:
        assert options.tasks_from is not None and tasks_from is not None, "the options have a reward otherwise"
        return EnvironmentGrader(tasks_from, options.tasks_from.use)
    if reward.function is not None:
        log = context.directory / "logs" / f"{label}-grader.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return FunctionGrader(reward.function, log, reward.deadline_s)
    if reward.plugin is not None:
        return PluginGrader(_reward(reward, reward.plugin, context, label), reward.plugin.use, reward.deadline_s)
    assert reward.command is not None, "a reward is one of three"
    own: Sandbox | None = None
    if options.is_external:  # which starts nothing
        own = LocalSandbox()
    elif isinstance(sandbox, PreloadedSandbox):  # which only starts the agent's function, not a command
        own = ProcessSandbox()
    size_bytes = int(options.limits.disk_mb * 1e6)
    runs_in = sandbox if own is None else own
    return CommandGrader(reward.command, runs_in, options.here, reward.deadline_s, own, size_bytes)


def _reward(options: RewardOptions, component: Component, context: RunContext, label: str) -> Reward:
    named = RewardComponent.model_validate({"use": component.use, **component.options})
    resolved = inner("reward", f"{label}.reward.plugin", named)
    if (named.runs_in or resolved.offer.provider.runs_in) == "here":
        built: Reward = resolved.build(context)
        return built
    return HostedReward(lambda: resolved.start(context, f"{label}-reward", 1), options.deadline_s, f"reward of {label}")
