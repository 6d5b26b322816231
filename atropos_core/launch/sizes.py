"""Choose the sizes that a run file leaves open, such as the trainer's micro-batch, by the memory plan: the quickest that fit.

Engines and trainers offer values for their own options, and say how much slower a step gets by them (`ModelProvider.sizes`). Of all
combinations that fit, the one with the least sum is chosen. A reserve stays free: figures of a plan are estimates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.config.resolve import ResolvedComponent
from atropos_core.errors import AtroposError, FitError
from atropos_core.launch.machine_memory import available_bytes
from atropos_core.launch.memory_plan import PlanRow, gb, rows_of, together, workloads
from atropos_core.launch.plan import Plan, Sizes, make_plan
from atropos_core.plugins.model_provider import SizeChoice, Workload

if TYPE_CHECKING:
    from atropos_core.config.run_file import Loaded
    from atropos_core.plugins.manager import Plugins
    from atropos_core.plugins.provider import ResolvedModel

RESERVE = 0.05  # of each device: on a CPU plans are within 10 % of measured peaks, and mostly above them
KINDS = ("engine", "trainer")
Choices = Mapping[str, Mapping[str, Any]]  # kind -> option -> value


def plan_run(
    loaded: Loaded,
    model: ResolvedModel,
    plugins: Plugins,
    *,
    directory: Path = Path("runs"),
    available: Mapping[str, int] | None = None,
) -> Plan:
    """Plan a run (`make_plan`), with sizes for what was not set that fit on this machine, or with the smallest if none fit. Machines of
    a launcher are not known here: sizes are the defaults there."""
    plan = make_plan(loaded.config, model, plugins)
    if plan.config.launcher.use != "local":
        return plan
    return choose_sizes(plan, loaded.origins, directory, available)


def choose_sizes(
    plan: Plan, given: Collection[str], directory: Path, available: Mapping[str, int] | None = None
) -> Plan:
    """Return the plan with `sizes`. `given`: paths that are set, which stay as they are. A deterministic run counts on all of the
    machine's memory, not on what is free at the moment, so that a seed always has the same sizes."""
    if available is None:
        available = available_bytes(busy=not plan.config.deterministic)
    return _Search(plan, given, directory, available).best()


def fits_smallest(plan: Plan, given: Collection[str], directory: Path, available: Mapping[str, int]) -> bool:
    """Return True if the plan fits with the smallest sizes."""
    search = _Search(plan, given, directory, available)
    return search.fits(search.smallest())


class _Search:
    """Combinations of sizes. What a component holds with each of its choices is asked once."""

    def __init__(self, plan: Plan, given: Collection[str], directory: Path, available: Mapping[str, int]) -> None:
        self._plan = plan
        self._available = available
        self._kept = {device: int(size * (1 - RESERVE)) for device, size in available.items()}
        self._components = workloads(plan, directory, available)
        self._offered: dict[str, list[SizeChoice]] = {}
        for resolved, workload in self._components:
            if resolved.label in KINDS:
                fields = type(resolved.options).model_fields
                free = {name for name in fields if f"{resolved.label}.{name}" not in given}
                self._offered[resolved.label] = list(resolved.sizes(workload, free)) or [SizeChoice(0, {})]
        self._rows: dict[tuple[str, str], list[PlanRow]] = {}
        self._passed: dict[tuple[str, str], bool] = {}

    def best(self) -> Plan:
        found = next((one for one in self._combinations() if self.fits(one)), None)
        choices = self.smallest() if found is None else found
        values = {f"{kind}.{name}": value for kind, options in choices.items() for name, value in options.items()}
        reasons = {path: self._reason(path, choices) for path in values if values[path] != self._default(path)}
        return replace(with_values(self._plan, choices), sizes=Sizes(values, reasons, found is not None))

    def _combinations(self) -> Iterator[Choices]:
        """Yield all combinations, the quickest first; only that one if not even the smallest fits."""
        ordered = sorted(product(*self._offered.values()), key=lambda choices: sum(one.slower for one in choices))
        for number, choices in enumerate(ordered):
            yield {kind: one.values for kind, one in zip(self._offered, choices, strict=True)}
            if number == 0 and not self.fits(self.smallest()):
                return

    def smallest(self) -> Choices:
        return {kind: choices[-1].values for kind, choices in self._offered.items()}

    def fits(self, choices: Choices) -> bool:
        return self._short(choices) is None and all(self._passes(*one, choices) for one in self._components)

    def _short(self, choices: Choices) -> tuple[str, int] | None:
        """Return a device that would lack memory, and what it would need."""
        rows = [row for one in self._components for row in self._rows_of(*one, choices)]
        needed = together(self._plan.config, rows, self._available).needed()
        return next((one for one in needed.items() if one[1] > self._kept.get(one[0], one[1])), None)

    def _rows_of(self, resolved: ResolvedComponent, workload: Workload, choices: Choices) -> list[PlanRow]:
        changed = self._with(resolved, choices)
        key = (resolved.label, repr(changed.options))
        if key not in self._rows:
            self._rows[key] = rows_of(changed, workload)
        return self._rows[key]

    def _passes(self, resolved: ResolvedComponent, workload: Workload, choices: Choices) -> bool:
        changed = self._with(resolved, choices)
        key = (resolved.label, repr(changed.options))
        if key not in self._passed:
            try:
                changed.check(workload)
                self._passed[key] = True
            except FitError:
                self._passed[key] = False
            except AtroposError:  # no size changes that; the start will report it
                self._passed[key] = True
        return self._passed[key]

    def _with(self, resolved: ResolvedComponent, choices: Choices) -> ResolvedComponent:
        return _changed(self._plan, resolved, choices.get(resolved.label.partition(".")[0], {}))

    def _default(self, path: str) -> Any:
        kind, _, name = path.partition(".")
        return getattr((self._plan.engines[0] if kind == "engine" else self._plan.single[kind]).options, name)

    def _reason(self, path: str, choices: Choices) -> str:
        kind, _, name = path.partition(".")
        usual = self._default(path)
        before = {**choices, kind: {**choices[kind], name: usual}}
        if (short := self._short(before)) is None:
            return f"{_text(usual)} is {'less than there is room for' if self.fits(before) else 'not possible here'}"
        device, needed = short
        most, all_of_it = gb(self._kept[device]), gb(self._available[device])
        return f"with {_text(usual)} the run needs {gb(needed)} on {device}, and may plan with {most} of {all_of_it}"


def with_values(plan: Plan, choices: Choices) -> Plan:
    """Return the plan with other values of options of its engines and trainer."""
    first = {"engine": plan.engines[0], "trainer": plan.single["trainer"]}
    config = plan.config
    for kind, values in choices.items():
        if update := _different(first[kind], values):
            config = config.model_copy(update={kind: getattr(config, kind).model_copy(update=update)})
    engines = [_changed(plan, one, choices.get("engine", {})) for one in plan.engines]
    trainer = _changed(plan, first["trainer"], choices.get("trainer", {}))
    return replace(plan, config=config, engines=engines, single={**plan.single, "trainer": trainer})


def _changed(plan: Plan, resolved: ResolvedComponent, values: Mapping[str, Any]) -> ResolvedComponent:
    """Return the component with these values. A replica keeps what its own table sets."""
    own = plan.config.engine.replica.get(resolved.label.removeprefix("engine.replica."), {})
    update = {name: value for name, value in _different(resolved, values).items() if name not in own}
    if not update:
        return resolved
    return replace(
        resolved,
        options=resolved.options.model_copy(update=update),
        component=resolved.component.model_copy(update=update),
    )


def _different(resolved: ResolvedComponent, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if getattr(resolved.options, name) != value}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
