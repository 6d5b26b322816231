"""Place each process on a node of the job before anything starts, so that a process without room is refused instead of waiting for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atropos_core.errors import FitError
from atropos_launcher_slurm.config import Resources, SlurmOptions

ANY_MEMORY = float("inf")  # of a node whose memory is not known


class Node:
    """The resources left on one node."""

    def __init__(self, name: str, cpus: float, gpus: float, memory_gb: float) -> None:
        self.name = name
        self.cpus = cpus
        self.gpus = gpus
        self.memory_gb = memory_gb

    def holds(self, wanted: Resources) -> bool:
        return self.cpus >= wanted.cpus and self.gpus >= wanted.gpus and self.memory_gb >= wanted.memory_gb

    def take(self, wanted: Resources) -> None:
        self.cpus, self.gpus = self.cpus - wanted.cpus, self.gpus - wanted.gpus
        self.memory_gb -= wanted.memory_gb

    def says(self) -> str:
        memory = f", {self.memory_gb:g} GB of memory" if self.memory_gb != ANY_MEMORY else ""
        return f"{self.name} has {self.cpus:g} CPU cores, {self.gpus:g} GPUs{memory} left"


def place(options: SlurmOptions, roles: Sequence[str], nodes: Sequence[Node]) -> Mapping[str, str]:
    """The name of a node for each role, largest first, each on the first node with room. The loop's part of the first node is taken
    first. Raises FitError with the name of a role that has no room."""
    if unknown := sorted(set(options.roles) - set(roles)):
        raise FitError(
            f"launcher.roles.{unknown[0]} has no effect: there is no such role.",
            remedy=f"Choose one of: {', '.join(roles)}.",
        )
    if not nodes[0].holds(options.loop):
        raise FitError(
            f"the first node has no room for the run itself ({options.loop.says()}): {nodes[0].says()}.",
            remedy="Lower launcher.loop, or raise launcher.node.",
        )
    nodes[0].take(options.loop)
    wanted = {role: options.roles.get(role, Resources()) for role in roles}
    found = {}
    for role in sorted(roles, key=lambda one: (-wanted[one].gpus, -wanted[one].cpus, -wanted[one].memory_gb)):
        node = next((one for one in nodes if one.holds(wanted[role])), None)
        if node is None:
            raise FitError(
                f"no node of the job has room for {role} ({wanted[role].says()}) next to the others: "
                f"{'; '.join(one.says() for one in nodes)}.",
                remedy=f"Lower launcher.roles.{role}, or raise launcher.nodes or launcher.node.",
            )
        node.take(wanted[role])
        found[role] = node.name
    return found
