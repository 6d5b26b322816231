"""Find settings that make a run fit. Each candidate is tried by planning the run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.config.run_file import FLAG, Layer, dump, load, nest, toml_value
from atropos_core.errors import AtroposError, FitError
from atropos_core.launch.memory_plan import MemoryPlan, gb, plan_memory, workloads
from atropos_core.launch.model_checks import check_components
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import load_plugins

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan
    from atropos_core.plugins.manager import Plugins

NOTICED_BYTES = 10_000_000  # what two sums must differ by to be printed differently
MOST_SETTINGS = 8  # of one combination


@dataclass(frozen=True)
class Change:
    """Settings that replace the run's own, and the plan that they lead to."""

    settings: Mapping[str, Any]
    plan: MemoryPlan

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes are missing on all devices together; 0 if the run fits."""
        needed, available = self.plan.needed(), self.plan.available
        return sum(max(size - available.get(device, size), 0) for device, size in needed.items())

    def said(self, device: str) -> str:
        """Return the flags, with what is then needed on this device and on any other that would be too small."""
        flags = " ".join(f"--set {shlex.quote(f'{path}={_typed(value)}')}" for path, value in self.settings.items())
        needed = self.plan.needed()
        others = [one for one in self.plan.too_small() if one != device]
        return f"{flags} ({', '.join([gb(needed.get(device, 0)), *(f'{gb(needed[one])} on {one}' for one in others)])})"


def check_memory(plan: Plan, directory: Path, made: MemoryPlan) -> None:
    """Raises FitError, with changes that were tried, if a device has less than `made` needs."""
    if not (short := made.too_small()):
        return
    device, model = short[0], plan.config.model
    parts = ", ".join(f"{row.component}: {row.use.what} {gb(row.use.size_bytes)}" for row in made.largest(device)[:4])
    sizes = ", ".join(f"{path} = {toml_value(value)}" for path, value in plan.sizes.changed.items())
    smallest = f", with the smallest sizes ({sizes})" if not plan.sizes.fit else ""
    raise FitError(
        f"this run needs about {gb(made.needed()[device])} on {device}{smallest}, which has {gb(made.available[device])} to give. "
        f"Largest: {parts}.",
        remedy=f"{_remedies(_Search(plan, directory, made), device)} `atropos plan --model {shlex.quote(model)}` searches for what "
        "fits, and `atropos run --dry-run` prints the plan. --set oversubscribe=true starts regardless.",
    )


def _remedies(search: _Search, device: str) -> str:
    none = Change({}, search.made)
    single = search.steps(none)
    enough = [one for one in single if not one.missing_bytes]
    said = "; ".join(one.said(device) for one in (enough or single)[:5])
    if enough:
        return f"Any of these fits, with what is then needed: {said}."
    if not single:
        return "No setting of this run makes it smaller: use a smaller model, or a machine with more memory."
    together = search.combination(none)
    if together.missing_bytes:
        return f"Even these together are not enough: {together.said(device)}. Use a smaller model, or a machine with more memory."
    return f"These together fit: {together.said(device)}. None is enough without the others: {said}."


class _Search:
    """Plans a run again with other settings."""

    def __init__(self, plan: Plan, directory: Path, made: MemoryPlan) -> None:
        self.made = made
        self._plan = plan
        self._directory = directory
        self._plugins: Plugins = load_plugins()

    def steps(self, before: Change) -> list[Change]:
        """Return one change per setting that makes `before` smaller, at the mildest value that fits or else the one that helps
        most. Changes that fit come first, then those that help most."""
        settings: dict[str, Any] = {}
        for device in before.plan.too_small():
            for row in before.plan.largest(device):
                settings |= row.use.settings
        found = [self._best(before, path, values) for path, values in settings.items() if path not in before.settings]
        return sorted((one for one in found if one is not None), key=lambda one: one.missing_bytes)

    def combination(self, change: Change) -> Change:
        """Add the setting that helps most until the run fits or nothing helps; then drop those that were not needed."""
        while change.missing_bytes and len(change.settings) < MOST_SETTINGS and (steps := self.steps(change)):
            change = steps[0]
        for path in list(change.settings):
            rest = {one: value for one, value in change.settings.items() if one != path}
            without = None if change.missing_bytes else self._planned(rest)
            change = change if without is None or without.missing_bytes else without
        return change

    def _best(self, before: Change, path: str, values: Any) -> Change | None:
        best = before
        for value in values:
            tried = self._planned({**before.settings, path: value})
            if tried is not None and not tried.missing_bytes:
                return tried
            if tried is not None and tried.missing_bytes <= best.missing_bytes - NOTICED_BYTES:
                best = tried
            elif best is not before:
                break  # a smaller one does not help further
        return None if best is before else best

    def _planned(self, settings: Mapping[str, Any]) -> Change | None:
        """Plan with these settings. None if they are refused."""
        layers = [Layer("run", dump(self._plan.config)), Layer(FLAG, nest(settings.items()))]
        try:
            plan = make_plan(load(layers).config, self._plan.model, self._plugins, rollouts=False, warns=False)
            check_components(plan, workloads(plan, self._directory, self.made.available))
            return Change(settings, plan_memory(plan, self._directory, self.made.available))
        except AtroposError:
            return None


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value).removesuffix(".0")
