"""The plan of a recorded run with some of its sections changed: by a run file, by --reward and by --set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_core.cli.options import Uses, read_run_file, short_name
from atropos_core.config.component import Component, RunReward
from atropos_core.config.resolve import resolve_component
from atropos_core.config.run_file import FLAG, Layer, RunConfig, anchored, load, nest, parse_flag, read_file
from atropos_core.errors import AtroposError, ConfigError
from atropos_core.interfaces import Transport
from atropos_core.launch import fit
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import ResolvedModel

SCORING = ("reward", "transform", "environment")  # sections that decide what a rollout's reward and advantage are


def changed_config(
    run: Path | None,
    plugins: Plugins,
    uses: Uses,
    rewards: Sequence[str],
    file: Path | None,
    changes: Sequence[str],
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the configuration of the run (`run` None: the default one) after these changes. Each overrides the one before: the
    sections of SCORING that `file` names replace the run's; `rewards`, if given, replace all others; `changes` are
    PATH=VALUE, and `flags` values by path. Raises ConfigError."""
    saved = Layer("default", {}) if run is None else replace(read_file(run / "config.toml"), whole=True)
    config = load([saved]).config
    if file is not None:
        config = config.model_copy(update=_sections_of(file, plugins))
    if rewards:
        config = config.model_copy(update={"reward": _selected_rewards(rewards, config.reward)})
    changed = [parse_flag(change) for change in changes]
    given_twice = [path for path, _ in changed if path in (flags or {})]
    if given_twice:
        raise ConfigError(
            f"{given_twice[0]} is given twice: by its own flag and by --set.", remedy="Leave one of them out."
        )
    for path, _ in changed:
        if not uses.has(path):
            raise ConfigError(
                f"--set {path} has no effect on `{uses.command}`, which uses {', '.join(uses.paths)}.",
                remedy="Leave it out.",
            )
    changed += (flags or {}).items()
    if not changed:
        return config
    tables = {section: _tables(getattr(config, section)) for section in SCORING}
    given = anchored(nest(changed), Path())
    return load([replace(saved, values={**saved.values, **tables}), Layer(FLAG, given)]).config


def scoring_plan(config: RunConfig, plugins: Plugins, *, environments: bool) -> Plan:
    """Plan only rewards and transforms, and environments if they are wanted. The model may be missing: no part of the plan runs
    it. Raises as make_plan."""
    kinds = SCORING if environments else SCORING[:2]
    named = {
        kind: {
            name: resolve_component(plugins.registry, kind, f"{kind}.{name}", component)
            for name, component in getattr(config, kind).items()
        }
        for kind in kinds
    }
    if not named["reward"]:
        raise ConfigError(
            "the rollouts cannot be scored: the configuration has no reward.",
            remedy="Name one: --reward NAME, or a run file with a [reward.NAME] section.",
        )
    fit.refuse_second_advantages(named["transform"])
    return Plan(config, _model(config, plugins), [], {}, named, ())


def trainer_plan(config: RunConfig, plugins: Plugins) -> Plan:
    """Plan the run's trainer on this machine, with its own weights and with everything that it would learn of the run's other
    components. Raises as make_plan."""
    on_this = config.model_copy(update={"trainer": config.trainer.model_copy(update={"machines": 1})})
    plan = make_plan(on_this, plugins.resolve_model(config.model), plugins, warns=False)
    adapter: tuple[Transport, ...] = ("adapter",) if set(plan.transports) == {"adapter"} else ()
    single = {kind: one for kind, one in plan.single.items() if kind != "launcher"}
    return replace(plan, single=single, transports=adapter)


def _model(config: RunConfig, plugins: Plugins) -> ResolvedModel:
    """Return the run's model if it is on this machine, else one without files: only a reward that reads them would miss it."""
    try:
        return plugins.resolve_model(config.model, download=False, weights=False)
    except AtroposError:
        return ResolvedModel(Path(config.model), "not on this machine")


def _sections_of(file: Path, plugins: Plugins) -> dict[str, Any]:
    layer = read_run_file(file, plugins)
    found = [section for section in SCORING if section in layer.values]
    if not found:
        raise ConfigError(
            f"{file} has none of the sections that score a rollout.",
            remedy=f"Write at least one of them: {', '.join(f'[{section}.NAME]' for section in SCORING)}.",
        )
    config = load([layer]).config
    return {section: getattr(config, section) for section in found}


def _selected_rewards(rewards: Sequence[str], known: Mapping[str, RunReward]) -> dict[str, RunReward]:
    """Return the rewards of this name with their options, and others by their default options. The run's gold reward is an ordinary one
    here: what would it have trained?"""
    names = [short_name(reward) for reward in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two of {', '.join(rewards)} have the same short name.", remedy="Name them apart in a run file: --config."
        )
    return {
        name: known[reward].model_copy(update={"gold": None})
        if reward in known
        else RunReward.model_validate(_anchored(reward))
        for name, reward in zip(names, rewards, strict=True)
    }


def _anchored(reward: str) -> dict[str, Any]:
    return anchored({"use": reward}, Path())


def _tables(components: Mapping[str, Component]) -> dict[str, dict[str, Any]]:
    return {name: _without_none(component) for name, component in components.items()}


def _without_none(component: Component) -> dict[str, Any]:
    values: Iterable[tuple[str, Any]] = [*component, *component.options.items()]
    return {name: value for name, value in values if value is not None}
