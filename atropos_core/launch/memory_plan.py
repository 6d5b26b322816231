"""The memory plan: what each part of a run will hold, by device, before anything is loaded.

Components estimate it themselves (`ModelProvider.holds`, in their `memory.py`), only from their options and the model's files. A
copy that two share counts once. Memory that is held only in a phase counts if that phase is the component's largest. In an
on-policy run, what only sampling needs and what only the update needs do not add up: the larger one counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_core.errors import AtroposError, PluginError
from atropos_core.launch.machine_memory import available_bytes
from atropos_core.plugins.model_provider import PROMPT_TOKENS, SAMPLING, UPDATE, MemoryUse, Workload, halves

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent
    from atropos_core.config.run_file import RunConfig
    from atropos_core.launch.plan import Plan

SUPERVISOR_BYTES = 120_000_000  # of an interpreter with our own modules, and the rollouts of a step as Python objects


@dataclass(frozen=True)
class PlanRow:
    """A use of memory, its component, and whether it is in the largest phase."""

    component: str
    use: MemoryUse
    counts: bool


@dataclass(frozen=True)
class MemoryPlan:
    rows: tuple[PlanRow, ...]
    available: Mapping[str, int]  # by device, where known

    def needed(self) -> dict[str, int]:
        """Return the most bytes that are needed, by device."""
        total: dict[str, int] = defaultdict(int)
        copies: dict[tuple[str, str], int] = {}
        for row in self.rows:
            one = row.use
            if not row.counts:
                continue
            if one.shared:
                before = copies.get((one.device, one.shared), 0)
                copies[one.device, one.shared] = max(before, one.size_bytes)
                total[one.device] += copies[one.device, one.shared] - before
            else:
                total[one.device] += one.size_bytes
        return dict(total)

    def too_small(self) -> list[str]:
        """Return the devices that are known to have less than is needed."""
        return [device for device, needed in self.needed().items() if needed > self.available.get(device, needed)]

    def largest(self, device: str) -> list[PlanRow]:
        """Return the rows that count on a device, the largest first."""
        return sorted(
            (row for row in self.rows if row.counts and row.use.device == device),
            key=lambda row: -row.use.size_bytes,
        )


def plan_memory(plan: Plan, directory: Path, available: Mapping[str, int] | None = None) -> MemoryPlan:
    """Plan the memory of `plan` from its components' estimates. A component without one is left out. `available`: bytes by
    device, instead of this machine's own."""
    available = available_bytes() if available is None else available
    rows = [row for resolved, workload in workloads(plan, directory, available) for row in rows_of(resolved, workload)]
    return together(plan.config, rows, available)


def rows_of(resolved: ResolvedComponent, workload: Workload) -> list[PlanRow]:
    """Return the rows of one component. Raises PluginError if it cannot say what it takes."""
    try:
        said = list(resolved.holds(workload))
    except AtroposError:
        raise
    except Exception as error:  # the plugin boundary
        raise PluginError(
            f"{resolved.label}: {resolved.component.use!r} of {resolved.offer.distribution} could not say what memory it will take: "
            f"{type(error).__name__}: {error}",
            remedy="--set oversubscribe=true starts without asking.",
        ) from error
    kept = peak(said)
    return [PlanRow(resolved.label, one, one in kept) for one in said]


def together(config: RunConfig, rows: Sequence[PlanRow], available: Mapping[str, int]) -> MemoryPlan:
    """Return the plan of components' rows, with the supervisor's own."""
    own = [PlanRow("supervisor", MemoryUse("interpreter, rollouts", SUPERVISOR_BYTES), True)]
    if config.api is None:
        hub = {"hub.size_mb": halves(config.hub.size_mb, 32)}
        own.append(PlanRow("supervisor", MemoryUse("hub", int(config.hub.size_mb * 1e6), settings=hub), True))
    every = [*own, *rows]
    return MemoryPlan(tuple(in_turn(every) if takes_turns(config) else every), available)


def takes_turns(config: RunConfig) -> bool:
    """Return True if nothing is sampled during an update: the run is on-policy, and no workers elsewhere sample when they like."""
    return config.training.max_staleness == 0 and config.api is None


def in_turn(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Drop rows that are never held together: if nothing is sampled during an update, only what sampling needs or what the
    update needs counts on each device, whichever is more."""
    sizes: dict[tuple[str, bool], int] = defaultdict(int)
    for row in rows:
        if row.counts and row.use.phase in (*SAMPLING, UPDATE):
            sizes[row.use.device, row.use.phase == UPDATE] += row.use.size_bytes
    return [
        replace(row, counts=False)
        if row.use.phase in (*SAMPLING, UPDATE)
        and sizes[row.use.device, row.use.phase == UPDATE] < sizes[row.use.device, row.use.phase != UPDATE]
        else row
        for row in rows
    ]


def workloads(
    plan: Plan, directory: Path, available: Mapping[str, int] | None = None
) -> list[tuple[ResolvedComponent, Workload]]:
    """Return engines, trainer, bridge, curriculum and teachers, each with its Workload."""
    from atropos_core.launch.builder import contexts
    from atropos_core.rollouts.evaluation import IN_FLIGHT

    config, training = plan.config, plan.config.training
    evaluated = min(config.evaluation.problems * config.evaluation.samples, IN_FLIGHT)
    supervised = 0 if config.warmup is None else (config.warmup.max_tokens or 0) - PROMPT_TOKENS
    concurrent_rollouts = training.groups_per_step * training.group_size * (1 + training.max_staleness)
    found = contexts(plan, directory)
    used = Counter(device for _, context in found for device in context.devices)
    return [
        (
            resolved,
            Workload(
                context=context,
                groups=training.groups_per_step,
                group_size=training.group_size,
                max_tokens=max(config.sampling.max_tokens, config.evaluation.max_tokens or 0, supervised),
                concurrent_rollouts=max(concurrent_rollouts, evaluated),
                device_bytes=available or {},
                temperature=max(config.sampling.temperature, config.evaluation.temperature),
                truncated=config.sampling.record().truncated,
                min_p=max(config.sampling.min_p, config.evaluation.min_p),
                takes_turns=takes_turns(config),
                shares_devices=any(used[device] > 1 for device in context.devices),
            ),
        )
        for resolved, context in found
    ]


def peak(uses: Sequence[MemoryUse]) -> list[MemoryUse]:
    """Return what one component holds at most: everything permanent, and its largest phase on each device."""
    phases: dict[tuple[str, str], int] = defaultdict(int)
    for one in uses:
        if one.phase:
            phases[one.device, one.phase] += one.size_bytes
    largest = {
        device: max((size, phase) for (at, phase), size in phases.items() if at == device)[1] for device, _ in phases
    }
    return [one for one in uses if not one.phase or one.phase == largest[one.device]]


def table(made: MemoryPlan) -> tuple[list[tuple[str, ...]], list[tuple[str, str]]]:
    """Return rows of component, what, device, size and when, and a line for each device."""
    rows: list[tuple[str, ...]] = []
    seen: set[tuple[str, str]] = set()
    for row in made.rows:
        one = row.use
        again = bool(one.shared) and (one.device, one.shared) in seen
        seen.add((one.device, one.shared))
        when = "the same copy" if again else "" if not one.phase else one.phase if row.counts else f"{one.phase}, less"
        rows.append((row.component, one.what, one.device, gb(one.size_bytes), when))
    totals = [
        (device, f"{gb(needed)} at most" + (f", of {gb(made.available[device])}" if device in made.available else ""))
        for device, needed in made.needed().items()
    ]
    return rows, totals


def scaled(uses: Sequence[MemoryUse], devices: Sequence[str]) -> list[MemoryUse]:
    """Return the same uses on each of several devices."""
    return [replace(one, device=device) for device in devices for one in uses]


def gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e11 else f"{size / 1e9:.0f} GB"
