"""Which node each process is put on, and what Slurm's short forms mean."""

from __future__ import annotations

import pytest

from atropos_core.errors import FitError
from atropos_launcher_slurm.config import SlurmOptions
from atropos_launcher_slurm.launcher import each
from atropos_launcher_slurm.placing import ANY_MEMORY, Node, place

ROLES = ("engine", "engine-b", "trainer")


def options(**values: object) -> SlurmOptions:
    return SlurmOptions.model_validate(values)


def nodes(count: int, cpus: int, gpus: int = 0, memory_gb: float = ANY_MEMORY) -> list[Node]:
    return [Node(f"n{n}", cpus, gpus, memory_gb) for n in range(count)]


def test_counts_of_several_nodes_are_read() -> None:
    assert each("4(x2),1") == [4, 4, 1] and each("72") == [72]


def test_the_largest_is_placed_first_and_the_loop_keeps_its_part_of_the_first_node() -> None:
    wanted = options(loop={"cpus": 2}, roles={"trainer": {"cpus": 8}, "engine": {"cpus": 5}})
    assert place(wanted, ROLES, nodes(2, 8)) == {"trainer": "n1", "engine": "n0", "engine-b": "n0"}
    wanted = options(loop={"cpus": 2}, roles={"trainer": {"cpus": 8}, "engine": {"cpus": 6}})
    with pytest.raises(FitError, match="no node of the job has room for engine-b"):
        place(wanted, ROLES, nodes(2, 8))


def test_gpus_and_memory_are_counted() -> None:
    wanted = options(roles={role: {"gpus": 4, "memory_gb": 100} for role in ROLES})
    found = place(wanted, ROLES, nodes(2, 16, 8, 250))
    assert sorted(found.values()) == ["n0", "n0", "n1"]
    two = ROLES[:2]
    taken = options(loop={"gpus": 4, "memory_gb": 200}, roles={role: {"gpus": 4, "memory_gb": 100} for role in two})
    assert set(place(taken, two, nodes(2, 16, 8, 250)).values()) == {"n1"}, "memory of the first is the run's"
    with pytest.raises(
        FitError, match=r"trainer \(1 CPU cores, 4 GPUs, 100 GB of memory\).*n0 has .* 4 GPUs, 50 GB of memory left"
    ):
        place(wanted, ROLES, nodes(1, 16, 12, 250))


def test_a_role_that_there_is_not_and_a_loop_without_room_are_refused() -> None:
    with pytest.raises(FitError, match=r"launcher\.roles\.teacher has no effect"):
        place(options(roles={"teacher": {}}), ROLES, nodes(1, 8))
    with pytest.raises(FitError, match=r"no room for the run itself \(9 CPU cores\)"):
        place(options(loop={"cpus": 9}), ROLES, nodes(2, 8))
