"""The first lines of a run: model, data, bridge and devices, with the reason for each choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from atropos_core.config.component import Component, ComponentOnDevices, GoldOptions
from atropos_core.config.run_file import RunConfig, toml_value
from atropos_core.interfaces import ModelInfo, Transport
from atropos_core.launch.memory_plan import workloads
from atropos_core.launch.plan import Plan
from atropos_core.plugins.model_provider import DeviceProvider, EngineProvider
from atropos_core.plugins.requirements import cuda_devices
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.training.parts import Parts
from atropos_core.training.warm_start import WarmStart
from atropos_core.types import Split

# For these, the text depends on devices. Any other transport has one bridge, whose summary describes it.
SHARED: dict[Transport, str] = {
    "posix_shm": "one copy of the weights, in shared memory, since both ends are on the CPU",
    "cuda_ipc": "one copy of the weights, by CUDA IPC, since both ends are on a GPU",
    "copy": "weights are copied at each update",
    "in_process": "one process, one copy of the weights",
}


def banner(
    plan: Plan,
    parts: Parts,
    sizes: Mapping[str, Mapping[Split, int]],
    model: ModelInfo,
    directory: Path,
    checkpoint: Checkpoint | None,
) -> list[tuple[str, str]]:
    """Return name and text of each line. `sizes`: number of tasks of each environment, by split."""
    config, training = plan.config, plan.config.training
    data = []
    for name, environment in parts.environments.items():
        source = f" ({environment.source()})" if environment.source() else ""
        held_out = f", {sizes[name]['test']:,} held out" if "test" in sizes[name] else ""
        data.append(f"{name}: {sizes[name]['train']:,} training tasks{held_out}{source}")
    if config.api is not None:
        data = [f"by workers at {config.api.url}", *(f"evaluated here: {one}" for one in data)]
    summary = plan.single["bridge"].offer.provider.summary
    carried = [SHARED.get(how, summary) for how in plan.transports]
    kept = kept_by_engines(plan, directory)
    rows = [
        ("model", f"{plan.model.summary}: {model.architecture}, {model.parameters or 0:,} parameters, {model.dtype}"),
        *by_rule(plan),
        *([("data", "; ".join(data))] if data else []),
        *(
            (
                engine.label.replace(".replica.", " "),
                f"{engine.component.use} {_where(engine.component, model.threads)}{kept.get(engine.label, '')}",
            )
            for engine in plan.engines
        ),
        ("trainer", f"{config.trainer.use} {_where(config.trainer, model.threads)}"),
        *of_paths(paths(plan, directory)),
        *plan.notes(),
        *(
            ("size", f"{path} = {toml_value(value)}: {plan.sizes.reasons[path]}")
            for path, value in plan.sizes.changed.items()
        ),
        ("bridge", f"{config.bridge.use}: {'; '.join(dict.fromkeys(carried))}"),
        *(
            [("launcher", f"{config.launcher.use}: memory of other machines is not planned")]
            if plan.spans_machines
            else []
        ),
        *_other_than_defaults(config),
        *((("gold", f"{gold[0]}: {of_gold(gold[1])}"),) if (gold := config.gold) else ()),
        *(("teacher", f"{name}: {one.component.use}") for name, one in plan.named["teacher"].items()),
        *([] if parts.warmup is None else [("warm start", of_warmup(parts.warmup))]),
        (
            "steps",
            f"{training.steps}, each of {training.groups_per_step} tasks x {training.group_size} rollouts; "
            f"seed {config.seed}{', deterministic' if config.deterministic else ''}",
        ),
        ("directory", str(directory)),
    ]
    if checkpoint is not None:
        rows.append(("resumes", f"after step {checkpoint.step}"))
    return rows


def kept_by_engines(plan: Plan, directory: Path) -> dict[str, str]:
    """Return what engines keep in addition to the weights, by label."""
    found = {}
    for resolved, workload in workloads(plan, directory):
        provider = resolved.offer.provider
        if isinstance(provider, EngineProvider) and (text := provider.keeps(resolved.options, workload)):
            found[resolved.label] = f"; keeps {text}"
    return found


def paths(plan: Plan, directory: Path) -> dict[str, str]:
    """Return which way of computing the model each engine and trainer takes, and why, by label."""
    found = {}
    for resolved, workload in workloads(plan, directory):
        provider = resolved.offer.provider
        if isinstance(provider, DeviceProvider) and (text := provider.path(resolved.options, workload)):
            found[resolved.label] = text
    return found


def of_paths(paths: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield one line about the ways of computing the model, if components have several."""
    if paths:
        yield "paths", "; ".join(f"{label} {text}" for label, text in paths.items())


def of_gold(options: GoldOptions) -> str:
    """Return one line about the tasks of the gold reward."""
    trained = "which are not trained" if options.hold_back else "which the other rewards train"
    return f"measured on {options.share:.3g} of the tasks, {trained}; health.reward_hacking compares it with what is trained"


def by_rule(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the values that follow from the size of the model."""
    if values := [f"{path} = {value:g}" for path, value in plan.model.rules.items()]:
        yield "its size", f"{', '.join(values)}, which you did not set"


def of_warmup(warmup: WarmStart) -> str:
    """Return one line about a warm start."""
    rows = warmup.rows
    return f"{rows.steps} supervised steps first, learning rate {warmup.learning_rate:g}; {rows.summary}"


def _other_than_defaults(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the rewards, transforms and sinks that are not defaults, and the defaults that were left out."""
    defaults = RunConfig()
    for section in ("reward", "transform", "sink"):
        named, usual = getattr(config, section), getattr(defaults, section)
        if list(named) != list(usual):
            absent = [name for name in usual if name not in named]
            lost = "; no metrics.jsonl, no rollouts" if section == "sink" and "jsonl" not in _uses(named) else ""
            without = f"; left out: {', '.join(absent)}{lost}" if absent else ""
            yield f"{section}s", f"{', '.join(named) or 'none'}{without}"


def _uses(named: Mapping[str, Component]) -> set[str]:
    return {one.use for one in named.values()}


def _where(component: Component, threads: int) -> str:
    if not isinstance(component, ComponentOnDevices):
        return ""
    devices = ", ".join(component.devices)
    if component.devices != ("cpu",):
        return f"on {devices}"
    reason = "though there is a CUDA device" if cuda_devices() else "there is no CUDA device"
    return f"on the CPU ({reason}), {threads} thread{'s' * (threads != 1)}"
