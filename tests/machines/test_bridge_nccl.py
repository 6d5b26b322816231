"""Weights that are broadcast from one machine's trainer to an engine on another, each with an address of its own."""

from __future__ import annotations

import os
import re

import pytest

from tests.e2e.runs import finish, weights
from tests.machines.runs import RUN, WITHIN_S, Run, address_of, nothing_is_left, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

APART = {"engine": "first", "trainer": "second", "trainer-2": "first"}
BROADCAST = ("--bridge", "nccl", *RUN[2:])


def test_an_engine_on_another_machine_gets_the_weights_that_it_gets_on_this_one(network, tmp_path):
    over = Run(network, tmp_path / "over", "--bridge", "nccl", roles=APART)
    over.wait_for_step(0)
    seen = {role: address_of(pid) for role, pid in processes(over.folder).items()}
    assert seen == {"engine": "10.77.0.1", "trainer": "10.77.0.2", "trainer-2": "10.77.0.1"}
    over.finish()
    nothing_is_left(over.folder)
    aligned = [row["alignment/max_abs_logprob_diff"] for row in over.steps() if "alignment/max_abs_logprob_diff" in row]
    assert aligned and max(aligned) <= 1e-4
    both = ("--set", "trainer.devices=['cpu','cpu']")
    here = finish(tmp_path / "here", "run", *BROADCAST, *both, "--dir", str(tmp_path / "here"), deadline_s=WITHIN_S)
    assert weights(over.folder, 9) == weights(here.folder, 9)


def test_an_engine_that_is_killed_on_another_machine_is_named_and_a_restart_goes_on(network, tmp_path):
    killed = Run(network, tmp_path / "run", "--bridge", "nccl", "--set", "restarts=1", roles=APART)
    killed.wait_for_step(4)
    os.kill(processes(killed.folder)["engine"], 9)
    killed.finish()
    assert re.search(r"engine \(pid \d+ where engine belongs\) was killed by SIGKILL", killed.text), killed.text
    assert [row["step"] for row in killed.steps()] == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)
