"""Whole runs of the tiny policy as jobs of a real Slurm, whose nodes are machines with addresses of their own."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.e2e.runs import finish, weights
from tests.slurm.jobs import QUICK, SMALL, Job, atropos, node_of

pytestmark = pytest.mark.timeout(600)


def test_the_same_run_here_and_as_a_job_gives_the_same_weights(slurm, tmp_path):
    job = Job(slurm, tmp_path / "there", *QUICK, *SMALL)
    assert f"nothing was started. To start it: sbatch {tmp_path}/there/job/run.sbatch" in job.said
    job.wait_for_step(1)
    processes = job.processes()
    assert {role: node_of(process) for role, process in processes.items()} == {
        "loop": "node1",
        "engine": "node1",
        "trainer": "node2",
    }
    secret = processes["engine"].environ()["SLURM_JOB_ID"] and [
        value for process in processes.values() for value in process.cmdline() if re.fullmatch("[0-9a-f]{64}", value)
    ]
    assert secret == [], "anyone may read a command line"
    here = finish(tmp_path / "here", "run", "--bridge", "checkpoint", *QUICK, "--dir", str(tmp_path / "here"))
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text
    assert weights(job.folder, 9) == weights(here.folder, 9)
    job.nothing_is_left()
    assert (job.folder / "logs/trainer.log").exists() and "accuracy" in job.text


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_a_role_that_is_killed_ends_the_attempt_by_name_and_a_restart_goes_on(role, slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL, "--set", "restarts=1")
    job.wait_for_step(4)
    job.processes()[role].send_signal(signal.SIGKILL)
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text
    node = {"engine": "node1", "trainer": "node2"}[role]
    assert re.search(rf"{role} \(step {job.number}\.\d+ on {node}\) was killed by SIGKILL", job.text), job.text
    assert job.steps() == list(range(10)), "none twice, none left out"
    job.nothing_is_left()


def test_a_signal_ahead_of_the_time_limit_saves_and_queues_again(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL, "--set", "checkpoint.every=100")
    job.wait_for_step(2)
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)  # as `--signal=B:USR1@300` does
    job.wait("PENDING", "COMPLETED", "FAILED", within_s=180)
    # Slurm itself waits two minutes; its nodes refuse a job that starts again in the second in which it was ended.
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now+5seconds")
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", "-o", job.number)
    assert "resumes" in job.text and job.steps() == list(range(10)), job.text


def test_what_is_preempted_goes_on_from_its_last_checkpoint(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL, "--set", "checkpoint.every=1")
    job.wait_for_step(3)
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    )
    job.wait("PENDING", "REQUEUED", within_s=180)
    job.nothing_is_left()
    slurm.run("scontrol", "release", job.number, check=False)
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now", check=False)
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text + urgent
    assert job.steps() == list(range(10))


@pytest.mark.parametrize("how", ["scancel", "kill"])
def test_nothing_is_left_when_the_job_is_ended_and_it_can_be_submitted_again(how, slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL)
    job.wait_for_step(4)
    if how == "scancel":
        slurm.run("scancel", job.number)
    else:
        job.processes()["loop"].send_signal(signal.SIGKILL)
    job.wait("CANCELLED", "FAILED", "COMPLETED", within_s=180)
    job.nothing_is_left()
    job.submit()
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text
    assert job.steps() == list(range(10))


def test_a_node_that_is_lost_ends_the_turn_and_the_next_one_goes_on(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL, "--set", "checkpoint.every=1")
    job.wait_for_step(3)
    slurm.network["node2"].lose()
    slurm.daemons["node2"].wait(10)
    slurm.network.add("node2")
    slurm.start("node2")
    job.wait("PENDING", "FAILED", "NODE_FAIL", "COMPLETED", within_s=180)
    job.nothing_is_left()
    slurm.run("scontrol", "update", "NodeName=node2", "State=RESUME", check=False)
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now", check=False)
    if job.state() in ("FAILED", "NODE_FAIL"):
        job.submit()
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.text
    assert job.steps() == list(range(10))


def test_a_run_directory_that_a_node_has_not_is_refused_before_a_process_is_started(slurm, tmp_path):
    hidden = tmp_path / "of-node1"
    hidden.mkdir()
    slurm.network["node2"].hide(hidden)
    try:
        job = Job(slurm, hidden / "run", *QUICK, *SMALL)
        job.wait("FAILED")
    finally:
        slurm.network["node2"].run("umount", str(hidden))
    assert f"the run directory {hidden}/run is not on node2, of this job" in " ".join(job.text.split())
    assert not (job.folder / "logs/engine.log").exists()


def test_submit_submits_the_files(slurm, tmp_path):
    said = atropos(
        slurm, "run", "--launcher", "slurm", "--bridge", "checkpoint", *QUICK, *SMALL, "--set", "launcher.submit=true", "--set",
        "launcher.sbatch=['--hold']", "--dir", str(tmp_path / "run"),
    )  # fmt: skip
    number = re.search(r"Submitted batch job (\d+)", said)
    assert number, said
    slurm.run("scancel", number.group(1))


def test_what_sbatch_refuses_is_said_in_its_words(slurm, tmp_path):
    said = atropos(
        slurm, "run", "--launcher", "slurm", "--bridge", "checkpoint", *QUICK, *SMALL, "--set", "launcher.submit=true", "--set",
        "launcher.partition='none'", "--dir", str(tmp_path / "run"), code=2,
    )  # fmt: skip
    assert "did not start the run: sbatch: error: invalid partition specified: none" in said


def test_the_contract_of_a_launcher_holds_in_a_job(slurm, tmp_path):
    script = tmp_path / "check.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=3\n"
        f"cd {tmp_path}\nexec {sys.executable} -m atropos_core check --kind launcher slurm\n"
    )
    number = slurm.run("sbatch", "--parsable", "--wait", f"--output={tmp_path}/out", str(script), check=False).split()[
        0
    ]
    text = (tmp_path / "out").read_text()
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", "-o", number), text
    for stage in ("starts", "logs", "at once", "ends", "kills", "closes what runs"):
        assert re.search(rf"{stage}", text), text


def test_an_address_that_is_no_address_of_the_node_is_refused(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *QUICK, *SMALL, "--set", "launcher.host='198.51.100.7'")
    job.wait("FAILED", within_s=180)
    assert "cannot listen at 198.51.100.7" in job.text and "Set launcher.host to an address of this node" in job.text


def test_what_finds_no_room_in_time_is_named_inside_a_job_that_is_there(slurm, tmp_path):
    """Another step has the CPUs of the second node, which srun would wait for."""
    arguments = " ".join(f"'{one}'" for one in (*QUICK, *SMALL, "--set", "launcher.room_deadline_s=2"))
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=2\n"
        "srun --nodes=1 --ntasks=1 --exact --cpus-per-task=2 --mem=0 --nodelist=node2 sleep 300 &\nsleep 3\n"
        f"{sys.executable} -m atropos_core run --launcher slurm --bridge checkpoint {arguments} --dir {tmp_path}/run\n"
    )
    slurm.run("sbatch", "--wait", f"--output={tmp_path}/out", str(script), check=False)
    text = " ".join((tmp_path / "out").read_text().split())
    assert re.search(r"trainer \(a step of job \d+ on node2\) ended with exit code 1", text), text
    assert "temporarily disabled" in text or "busy" in text or "Unable to create step" in text, text
