"""Processes of a real run that are stopped: named within seconds, and given up at the bound of the run file."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.roles import scene as roles
from tests.e2e.runs import QUICK, RunningRun

pytestmark = pytest.mark.slow


def bounds(least_s: int) -> tuple[str, ...]:
    return ("--set", "watch.say_s=1", "--set", f"watch.least_s={least_s}", "--set", "watch.times=100")


def begin(folder: Path, *arguments: str) -> RunningRun:
    return RunningRun(folder, "run", "--dir", str(folder), *QUICK, *bounds(3), "--steps", "500", *arguments)


def says(run: RunningRun, text: str, deadline_s: float = 60) -> None:
    until = time.monotonic() + deadline_s
    while text not in run.text:
        assert time.monotonic() < until, f"never printed {text!r}:\n{run.text}"
        time.sleep(0.05)


def stop(run: RunningRun, role: str) -> psutil.Process:
    """Stop a process of this run, and see it named with what lets it go on."""
    stopped = run.children[role]
    stopped.send_signal(signal.SIGSTOP)
    says(run, f"{role} (pid {stopped.pid}) is stopped; to continue it: kill -CONT {stopped.pid}")
    return stopped


def an_engine_is_begun_again_and_a_trainer_ends_the_run(folder: Path, atropos) -> None:
    run = begin(folder, "--set", "restarts=1")
    try:
        run.wait_for_step(2)
        engine = stop(run, "engine")
        assert f"engine (pid {engine.pid}) has given no answer to " in run.text
        says(run, "starting again from the last checkpoint")
        assert "ProcessSilent" not in run.text, "nobody has seen it as an error of the run"
        until = time.monotonic() + 60
        while "trainer" not in run.children or run.children["engine"].pid == engine.pid:
            assert time.monotonic() < until, run.text
            time.sleep(0.2)
            run.wait_for_step(3)
        trainer = stop(run, "trainer")
        found = atropos("doctor", str(folder))
        assert found.code == 1
        assert f"trainer (pid {trainer.pid}) is stopped" in found.out and f"kill -CONT {trainer.pid}" in found.out
        assert run.ended_within(60) == 1
        assert f"ProcessSilent trainer (pid {trainer.pid}) gave no answer to " in run.text
    finally:
        run.process.kill()


def a_rank_ends_the_run_with_its_trainer(folder: Path, atropos) -> None:
    run = begin(folder, "--bridge", "checkpoint", "--set", 'trainer.devices=["cpu", "cpu"]')
    try:
        run.wait_for_step(2)
        trainer, rank = run.children["trainer"], stop(run, "trainer rank 1")
        assert run.ended_within(60) == 1
        assert f"ProcessSilent trainer (pid {trainer.pid}) gave no answer to " in run.text
        ended = run.text[run.text.index("ProcessSilent") :]
        assert f"trainer rank 1 (pid {rank.pid}) is stopped" in " ".join(ended.split()), ended
    finally:
        run.process.kill()


def a_teacher_ends_the_run(folder: Path, atropos) -> None:
    taught = ("--set", "teacher.big.use=distillation", "--set", "teacher.big.model=tiny-teacher")
    run = begin(folder, *taught, "--set", "trainer.distillation.alone=true")
    try:
        run.wait_for_step(2)
        teacher = stop(run, "teacher-big")
        assert run.ended_within(60) == 1
        assert f"ProcessSilent teacher-big (pid {teacher.pid}) gave no answer to top_logprobs() for " in run.text
    finally:
        run.process.kill()


def a_server_is_named_and_the_run_goes_on_with_it_and_gives_it_up_at_the_bound(folder: Path, atropos) -> None:
    folder.mkdir()
    small = ("--set", "training.groups_per_step=2", "--set", "training.group_size=2", "--set", "evaluation.problems=8")
    with roles(folder) as place:
        trainer = place.train("--env", "gsm8k", "--steps", "500", *small, *bounds(12))
        place.worker(1, "gsm8k")
        place.wait_for_step(1, trainer)
        place.server.process.send_signal(signal.SIGSTOP)
        trainer.says(rf"{place.url} has given no answer to \S+ \S+ for \d s: its process may be stopped")
        steps = len(place.metrics)
        place.server.process.send_signal(signal.SIGCONT)
        place.wait_for_step(steps, trainer)
        place.server.process.send_signal(signal.SIGSTOP)
        assert trainer.ends() == 1
        assert re.search(rf"ApiError \S+ {place.url}/v1/\S+ got no answer in time", trainer.text), trainer.text


def test_what_is_stopped_is_named_and_given_up_at_the_bound_of_the_run_file(tmp_path, atropos):
    scenes = (
        an_engine_is_begun_again_and_a_trainer_ends_the_run,
        a_rank_ends_the_run_with_its_trainer,
        a_teacher_ends_the_run,
        a_server_is_named_and_the_run_goes_on_with_it_and_gives_it_up_at_the_bound,
    )
    with ThreadPoolExecutor(len(scenes)) as side_by_side:  # each waits more than it works
        for ended in [side_by_side.submit(scene, tmp_path / scene.__name__, atropos) for scene in scenes]:
            ended.result()
