"""Which components fit together: how weights travel from the trainer to each engine, and which choices are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import get_args

from atropos_core import console
from atropos_core.config.resolve import WITH_EVERY_ENGINE, ResolvedComponent
from atropos_core.errors import ConfigError, FitError, TokenizerMismatch
from atropos_core.interfaces import ModelInfo, Transport
from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TrainerProvider
from atropos_core.plugins.offers import Offer
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.registry import Registry
from atropos_core.plugins.requirements import check_core_api, check_requires
from atropos_core.rollouts.tokenizer import ChatTokenizer

ONE_MACHINE: frozenset[Transport] = frozenset({"in_process", "posix_shm", "cuda_ipc", "copy"})
RAW_REWARDS = "--set transform.drop_flat.use=none --set transform.group_advantage.baseline=none"
ONE_ENGINE: frozenset[Transport] = frozenset({"posix_shm", "cuda_ipc"})  # the first engine owns what the trainer maps


def choose_transports(
    engines: Sequence[ResolvedComponent], single: Mapping[str, ResolvedComponent], registry: Registry
) -> tuple[Transport, ...]:
    """Return how weights travel to each engine. Only the first one can share memory. Raises FitError if the bridge joins an
    engine and the trainer in no way."""
    first, *others = engines
    spans = single["launcher"].has_machines
    allowed = frozenset(get_args(Transport)) - (ONE_MACHINE if spans else frozenset())
    return (
        _transport_to(first, single, registry, allowed),
        *(_transport_to(engine, single, registry, allowed - ONE_ENGINE) for engine in others),
    )


def _transport_to(
    engine: ResolvedComponent,
    single: Mapping[str, ResolvedComponent],
    registry: Registry,
    allowed: frozenset[Transport],
) -> Transport:
    bridge, trainer, launcher = single["bridge"], single["trainer"], single["launcher"]
    possible = {transport for transport in allowed if _carries(transport, engine.devices, trainer.devices)}
    on_one_gpu = allowed >= ONE_MACHINE - ONE_ENGINE and _share_gpu(engine.devices, trainer.devices)
    possible -= {"broadcast"} if on_one_gpu else set()
    shared = bridge.transports & engine.transports & trainer.transports & possible
    if shared:
        return next(transport for transport in get_args(Transport) if transport in shared)
    fitting = _bridges_for(engine.transports & trainer.transports & possible, registry)
    advice = (
        f"Use {' or '.join(f'--bridge {name}' for name in fitting)}."
        if fitting
        else f"No installed bridge joins engine {engine.component.use!r} and trainer {trainer.component.use!r}: "
        + _other_engines(trainer.transports & possible, registry)
    )
    raise FitError(
        f"bridge {bridge.component.use!r} does not fit: it carries {_list(bridge.transports)}; engine {engine.component.use!r} takes "
        f"{_list(engine.transports - WITH_EVERY_ENGINE)} and trainer {trainer.component.use!r} gives {_list(trainer.transports)} "
        f"({engine.label}.devices = {', '.join(engine.devices)}; trainer.devices = {', '.join(trainer.devices)})."
        + _why_not(allowed, launcher.component.use)
        + (
            " Each process of a broadcast needs its own GPU." if on_one_gpu and "broadcast" in bridge.transports else ""
        ),
        remedy=advice,
    )


def _bridges_for(transports: frozenset[Transport] | set[Transport], registry: Registry) -> list[str]:
    return [offer.provider.name for offer in registry.offers("bridge") if transports & _transports_by_default(offer)]


def _other_engines(transports: frozenset[Transport] | set[Transport], registry: Registry) -> str:
    """Say which installed engines a bridge joins with a trainer of these transports."""
    pairs = [
        f"--engine {engine.provider.name} --bridge {bridge}"
        for engine in registry.offers("engine")
        for bridge in _bridges_for(transports & _transports_by_default(engine), registry)[:1]
    ]
    return f"use {' or '.join(pairs)}." if pairs else "choose another engine or trainer."


def _why_not(allowed: frozenset[Transport], launcher: str) -> str:
    if not allowed & ONE_MACHINE:
        return f" Launcher {launcher!r} puts them on machines that share no memory."
    return "" if allowed >= ONE_ENGINE else " Memory can be shared with the first engine only."


def _carries(transport: Transport, engine: tuple[str, ...], trainer: tuple[str, ...]) -> bool:
    """True if these devices allow the transport. An exported CUDA allocation is mapped on its own device. Weights that a trainer
    divides over several devices are first gathered into a file."""
    whole = len(trainer) == 1
    on_gpu = whole and engine == trainer and engine[0].startswith("cuda")
    return {"posix_shm": engine == trainer == ("cpu",), "cuda_ipc": on_gpu, "copy": whole}.get(transport, True)


def _share_gpu(engine: tuple[str, ...], trainer: tuple[str, ...]) -> bool:
    """True if the trainer's first process, which broadcasts, is on a GPU of the engine's. NCCL joins no two processes on one GPU."""
    return trainer[0].startswith("cuda") and trainer[0] in engine


def _transports_by_default(offer: Offer) -> frozenset[Transport]:
    try:
        check_core_api(offer)
        check_requires(offer)
        return (
            offer.provider.transports(offer.provider.options())
            if isinstance(offer.provider, BridgeProvider | EngineProvider)
            else frozenset()
        )
    except Exception:  # noqa: BLE001 - the plugin boundary: it needs options, another core or machine, or is broken
        return frozenset()


def _list(transports: frozenset[Transport]) -> str:
    return ", ".join(sorted(transports)) or "nothing"


def refuse_idle_launcher(components: Sequence[ResolvedComponent], launcher: ResolvedComponent) -> None:
    """Raises ConfigError for a launcher that would have nothing to start."""
    if launcher.component.use != "local" and all(one.offer.provider.runs_in == "here" for one in components):
        names = ", ".join(f"{one.offer.kind} {one.component.use!r}" for one in components) or "what is run"
        raise ConfigError(
            f"launcher {launcher.component.use!r} has nothing to start: {names} has no process of its own.",
            remedy="Leave the launcher out.",
        )


def refuse_other_machines(trainer: ResolvedComponent, launcher: ResolvedComponent) -> None:
    """Raises FitError for a trainer on several machines if the launcher has only this one."""
    if len(trainer.roles) > 1 and not launcher.has_machines:
        raise FitError(
            f"trainer.machines = {len(trainer.roles)}, but launcher {launcher.component.use!r} has only this machine.",
            remedy="Name a launcher that has several, as --launcher ray; or leave trainer.machines out: trainer.devices names several "
            "devices of one machine.",
        )


def refuse_groups_of_one(transforms: Mapping[str, ResolvedComponent], by_workers: bool) -> None:
    """Raises ConfigError if no group of one can be trained. Warns if its advantage is 0, or if workers may send larger groups."""
    advantages = {
        name: one.announced["advantages"] for name, one in transforms.items() if "advantages" in one.announced
    }
    compares = next((name for name, one in advantages.items() if one["baseline"] in ("group", "others")), None)
    drops = next((name for name, one in transforms.items() if one.announced.get("flat_groups") == "left out"), None)
    facts, changes = [], []
    if compares is not None:
        facts.append(f"transform.{compares} compares a reward with the group's, so that each advantage is 0")
        changes += _without_comparison(compares, transforms[compares])
    if drops is not None:
        facts.append(f"transform.{drops} leaves out groups whose rewards are all equal, and a group of one is such")
        changes.append(f"--set transform.{drops}.use=none")
    if not facts:
        return
    fact = f"training.group_size is 1: {' and '.join(facts)}"
    remedy = f"Set training.group_size to 2 or more; or, to train only by rewards: {' '.join(changes)}"
    if drops is None or by_workers:
        console.warn(f"{fact}. {remedy}")
    else:
        raise ConfigError(f"{fact}.", remedy=remedy)


def _without_comparison(name: str, transform: ResolvedComponent) -> list[str]:
    if "baseline" in type(transform.options).model_fields:
        return [f"--set transform.{name}.baseline=none"]
    default = "transform.group_advantage"
    return [
        f"--set transform.{name}.use=none",
        f"--set {default}.use=group_advantage",
        f"--set {default}.baseline=none",
    ]


def refuse_flat_before_turns(transforms: Mapping[str, ResolvedComponent]) -> None:
    """Raise ConfigError for a transform that leaves out groups with equal totals before one that compares their turns."""
    names = list(transforms)
    by_turn = next((name for name in names if transforms[name].announced.get("advantages", {}).get("by_turn")), None)
    before = names[: names.index(by_turn)] if by_turn is not None else []
    for name in before:
        if transforms[name].announced.get("flat_groups") == "left out":
            raise ConfigError(
                f"transform.{name} comes before transform.{by_turn} and would leave out groups whose totals are equal, although their "
                "turns may have earned different rewards.",
                remedy=f"List [transform.{by_turn}] before [transform.{name}], or leave it out: --set transform.{name}.use=none.",
            )


def refuse_second_advantages(transforms: Mapping[str, ResolvedComponent]) -> None:
    """Raise ConfigError for two transforms that compute advantages: groups keep those of the first."""
    makers = [name for name, one in transforms.items() if "advantages" in one.announced]
    if len(makers) < 2:
        return
    unwanted = "group_advantage" if "group_advantage" in makers else makers[1]
    raise ConfigError(
        f"transform.{makers[1]} has no effect: groups keep the advantages that transform.{makers[0]}, which is before it, has given them.",
        remedy=f'Leave one out, as by [transform.{unwanted}] use = "none", or --set transform.{unwanted}.use=none.',
    )


def refuse_changed_rewards(trainer: str, unit: str, context: RunContext) -> None:
    """Raises ConfigError unless each batch has the rewards of one `unit` of the trainer, such as a prompt, as they were given. For a
    trainer that compares rewards between batches."""
    if context.max_staleness:
        raise ConfigError(
            f"trainer {trainer!r} must know which {unit} was sampled, but with training.max_staleness = {context.max_staleness} a batch "
            "may be of several.",
            remedy="--set training.max_staleness=0",
        )
    advantages = context.announced.get("advantages")
    if advantages is None or advantages["baseline"] != "none":
        raise ConfigError(
            f"trainer {trainer!r} compares rewards between batches, and a baseline within each group removes what it compares.",
            remedy=f"{RAW_REWARDS}, and no other transform.",
        )
    if context.announced.get("flat_groups"):
        raise ConfigError(
            f"trainer {trainer!r} needs every reward, but transform 'drop_flat' leaves out groups that were not rewarded: a {unit} without "
            "any reward would be sampled again and again.",
            remedy=RAW_REWARDS,
        )


def refuse_second_writers(sinks: Mapping[str, ResolvedComponent]) -> None:
    """Raise ConfigError if two sinks would write one file."""
    writers: dict[str, tuple[str, str]] = {}
    for name, one in sinks.items():
        if (place := one.announced.get("writes")) is None:
            continue
        place, option = os.path.normpath(place), str(one.announced.get("named_by", ""))
        first, option_of_first = writers.setdefault(place, (name, option))
        if first == name:
            continue
        chosen, by = (name, option) if option else (first, option_of_first)
        remedy = f"Set sink.{chosen}.{by} to another name, or leave one out" if by else "Leave one out"
        unwanted = first if name == one.component.use else name  # what a run has without being told, stays
        raise ConfigError(
            f"[sink.{first}] and [sink.{name}] would both write {place}, and each would undo what the other has written.",
            remedy=f"{remedy}: --set sink.{unwanted}.use=none.",
        )


def check_models(tokenizer: ChatTokenizer, trainer: ModelInfo, engine: ModelInfo) -> None:
    """Raises TokenizerMismatch or FitError if engine and trainer did not open the policy's model."""
    for role, info in (("engine", engine), ("trainer", trainer)):
        if info.tokenizer != tokenizer.fingerprint:
            raise TokenizerMismatch(
                f"the {role}'s tokenizer ({info.tokenizer}) is not the policy's ({tokenizer.fingerprint}): its ids mean other text.",
                remedy="Serve and train one model directory.",
            )
        if tokenizer.vocabulary > info.vocabulary:
            raise TokenizerMismatch(
                f"the tokenizer has {tokenizer.vocabulary} ids, and the {role}'s model only {info.vocabulary} embeddings."
            )
    if engine.architecture != trainer.architecture or (
        None not in (engine.parameters, trainer.parameters) and engine.parameters != trainer.parameters
    ):
        raise FitError(
            f"the engine opened {engine.architecture} with {engine.parameters or 0:,} parameters, "
            f"the trainer {trainer.architecture} with {trainer.parameters or 0:,}."
        )


def supervised_rate(trainer: ResolvedComponent, transports: Sequence[Transport]) -> float:
    """Return the trainer's own learning rate for supervised steps. Raises FitError if it takes none, and ConfigError for options that
    do not go with them."""
    provider = trainer.offer.provider
    rate = provider.supervised_rate if isinstance(provider, TrainerProvider) else None
    if rate is None:
        raise FitError(
            f"[warmup] needs a trainer that takes supervised steps, and {trainer.component.use!r} does not.",
            remedy="Use --trainer grpo, or leave [warmup] out.",
        )
    return rate(trainer.options, transports)
