"""A run whose trainer spans two machines with addresses of their own, beside the same run on one."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.e2e.runs import finish, weights
from tests.machines.runs import RUN, WITHIN_S, Run, address_of, nothing_is_left, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_two_machines_train_as_two_ranks_of_one_machine_do(network, tmp_path):
    over = Run(network, tmp_path / "over")
    over.wait_for_step(0)
    seen = {role: address_of(pid) for role, pid in processes(over.folder).items()}
    assert seen == {"engine": "10.77.0.1", "trainer": "10.77.0.1", "trainer-2": "10.77.0.2"}
    over.finish()
    nothing_is_left(over.folder)
    both = ("--set", "trainer.devices=['cpu','cpu']")
    here = finish(tmp_path / "here", "run", *RUN, *both, "--dir", str(tmp_path / "here"), deadline_s=WITHIN_S)
    assert weights(over.folder, 9) == weights(here.folder, 9)
    alone = ("--steps", "1", "--dir", str(tmp_path / "alone"))
    alone = finish(
        tmp_path / "alone", "run", *(one for one in RUN if one not in ("--steps", "9")), *alone, deadline_s=WITHIN_S
    )
    expected = json.loads((alone.folder / "metrics.jsonl").read_text().splitlines()[1])
    for key in ("loss", "grad_norm"):
        assert over.steps()[1][key] == pytest.approx(expected[key], abs=1e-6), "as one process has it"
    policy = over.folder / "checkpoints/step-000009/policy"
    assert len(list((policy / "trainer_state").glob("*.distcp"))) == 2, "each machine wrote its part"
    back = ("--steps", "11", "--set", "trainer.machines=1", "--set", "launcher.use=local")
    finish(over.folder, "resume", str(over.folder), *back, deadline_s=WITHIN_S)
    assert [row["step"] for row in over.steps()] == list(range(12)), "one process goes on from there"


@pytest.mark.parametrize("role", ["trainer-2", pytest.param("trainer", marks=pytest.mark.long)])
def test_a_machine_of_the_trainer_that_is_killed_is_named_and_a_restart_goes_on(network, tmp_path, role):
    killed = Run(network, tmp_path / "run", "--set", "restarts=1")
    killed.wait_for_step(4)
    os.kill(processes(killed.folder)[role], 9)
    killed.finish()
    assert re.search(rf"{role} \(pid \d+ where {role} belongs\) was killed by SIGKILL", killed.text), killed.text
    assert [row["step"] for row in killed.steps()] == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)


def test_a_machine_without_the_run_directory_is_named_before_a_model_is_loaded(network, tmp_path):
    hidden = tmp_path / "of-the-first"
    hidden.mkdir()
    network[0]["second"].hide(hidden)
    try:
        run = Run(network, hidden / "run")
        assert run.process.wait(WITHIN_S) != 0, run.text
    finally:
        network[0]["second"].run("umount", str(hidden))
    assert f"RunDirectoryError the run directory {hidden}/run is not on second" in " ".join(run.text.split())
