"""These tests need Slurm's own daemons, and the right to make namespaces: `make test-slurm` sees to both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.left_out import NONE_OF_THEM, stand_in
from tests.machines.network import Network, why_not
from tests.slurm.cluster import Slurm

os.environ["PATH"] += ":/usr/sbin"  # of daemons
MISSING = (
    ""
    if all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) and not why_not()
    else "slurmctld, slurmd, munged and root"
)

if MISSING:
    collect_ignore_glob = NONE_OF_THEM

pytest_collect_file = stand_in(__file__, MISSING, "make test-slurm")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes of three CPUs each, the first two with two GPUs that are none. Partition `urgent` preempts `main`."""
    folder = tmp_path_factory.mktemp("slurm")
    names = ("node1", "node2", "node3")
    made = Slurm(
        folder,
        Network(["head", *names]),
        {name: f"CPUs=3 RealMemory=6000{' Gres=gpu:2' if name != 'node3' else ''}" for name in names},
        [
            "main Nodes=node1,node2 Default=YES PriorityTier=1",
            "urgent Nodes=node1,node2 PriorityTier=2",
            "cpu Nodes=node3",
        ],
    )
    yield made
    made.close()
