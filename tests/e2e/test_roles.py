"""A run spread over processes: server, trainer and workers, on the toy policy; kills, drains and resumes of each."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_trajectory_client.remote_engine import RemoteEngine
from tests.conftest import metrics_of
from tests.e2e.roles import Scene, scene

pytestmark = pytest.mark.slow

QUICK = ("--model", "toy", "--set", "training.groups_per_step=8")
EVALUATED = ("--set", "evaluation.problems=4")  # where an environment is named
SLOW = (*QUICK, "--set", "engine.latency_s=0.02", "--set", "checkpoint.every=4")


@pytest.fixture
def place(tmp_path, sevens):
    """A folder with an environment in it; `api` is a server there."""
    with scene(tmp_path, "--silent-s", "5") as made:
        yield made


SEVENS = "./sevens.py:Sevens"


def like_sevens(place: Scene, name: str, rollout: str) -> str:
    """A reference to the environment with another `rollout`, whose body this is."""
    source = (place.folder / "sevens.py").read_text().replace("class Sevens", f"class {name}")
    rollout = f"\n    async def rollout(self, task, policy, *, seed):\n        {rollout}\n"
    (place.folder / f"{name.lower()}.py").write_text(f"import asyncio\n{source}{rollout}")
    return f"./{name.lower()}.py:{name}"


def drawn(run: Path) -> Counter[int]:
    """How often each draw is in the rollouts of the run's steps."""
    steps = [
        {json.loads(line)["draw"] for line in path.read_text().splitlines()}
        for path in sorted(run.glob("rollouts/step-*.jsonl"))
    ]
    return Counter(draw for step in steps for draw in step)


def status(place: Scene) -> dict[str, Any]:
    from atropos_core.codec import decode

    found: dict[str, Any] = decode(httpx.get(f"{place.url}/v1/status").content)
    return found


def test_four_processes_train_as_one_run_does(place):
    workers = [place.worker(number, SEVENS) for number in (1, 2)]
    for worker in workers:  # or the first might run all before the second has started
        worker.says("waiting for a trainer")
    trainer = place.train(*QUICK, *EVALUATED, "--env", SEVENS, "--steps", "40", "--set", "trainer.learning_rate=20.0")
    assert trainer.ends(120) == 0, place.all_text
    lines = place.metrics
    assert [line["step"] for line in lines] == list(range(41))
    assert lines[-1]["reward/mean"] > lines[1]["reward/mean"] + 0.3
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"]
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
    assert drawn(place.folder / "run") == Counter(range(40 * 8)), "every draw once, none lost"
    sent = []
    for worker in workers:
        assert worker.terminate() == 0, worker.text
        sent.append(int(worker.says(r"(\d+) groups sent")))
    assert sum(sent) == 320
    assert min(sent) > 0, "both had their part"
    assert place.server.terminate() == 0, place.server.text


def test_a_curriculum_beside_the_trainer_learns_from_what_two_workers_ran(place):
    steps = ("--steps", "20", "--set", "trainer.learning_rate=20.0")
    adaptive = ("--set", "curriculum.use=prioritized", "--set", "checkpoint.every=20")
    trainer = place.train(*QUICK, *EVALUATED, "--env", SEVENS, *steps, *adaptive)
    workers = [place.worker(number, SEVENS) for number in (1, 2)]
    assert trainer.ends(120) == 0, place.all_text
    assert drawn(place.folder / "run") == Counter(range(20 * 8)), "every draw once, none lost"
    first, *_, last = place.metrics[1:]
    assert last["curriculum/tried"] > first["curriculum/tried"] > 0
    assert last["curriculum/settled_success"] > first["curriculum/settled_success"] + 0.2
    manifest = json.loads((place.folder / "run/checkpoints/step-000020/manifest.json").read_text())
    assert manifest["state"]["parts"]["curriculum"]["settled"] == 20 * 8
    for worker in workers:
        assert worker.terminate() == 0, worker.text


def test_the_trainer_waits_for_workers_aloud_and_not_for_ever(place):
    trainer = place.train(*QUICK, "--steps", "2", "--set", "api.wait_s=2")
    trainer.says(f"waiting for a worker of any environment at {place.url}")
    assert trainer.ends() == 1
    assert "waited 2 s for a worker of any environment" in trainer.text


def test_a_worker_waits_for_a_trainer_aloud_and_not_for_ever(place):
    worker = place.worker(1, SEVENS, "--wait-s", "2")
    worker.says(f"waiting for a trainer at {place.url}")
    assert worker.ends() == 1
    assert f"no trainer came to {place.url} within 2 s" in worker.text


def test_an_environment_that_is_not_installed_here_is_trained_and_not_evaluated(place):
    (place.folder / "run.toml").write_text('[environment.sevens]\nuse = "of_the_workers"\n')
    trainer = place.train("run.toml", *QUICK, *EVALUATED, "--steps", "3")
    trainer.says("environment 'sevens' is not installed here")
    place.worker(1, SEVENS)
    assert trainer.ends() == 0, place.all_text
    assert len(place.metrics) == 3, "no evaluation, and so no step 0"


def test_a_worker_with_another_tokenizer_is_refused(place):
    trainer = place.train(*QUICK, "--steps", "3")
    trainer.says("waiting for a worker")
    worker = place.worker(1, SEVENS, "--model", "tiny")
    assert worker.ends() == 1
    assert "TokenizerMismatch" in worker.text


def test_a_worker_that_is_killed_leaves_its_draws_to_another(place):
    trainer = place.train(*SLOW, "--steps", "12")
    first = place.worker(1, SEVENS, "--concurrency", "4")
    place.wait_for_step(2, trainer)
    [directory] = Path(tempfile.gettempdir()).glob(f"atropos-env-*-{first.process.pid}-*")
    first.kill()
    place.worker(2, SEVENS)  # which takes it away, unless another test's worker has
    assert trainer.ends(120) == 0, place.all_text
    assert not directory.exists()
    assert drawn(place.folder / "run") == Counter(range(12 * 8))
    assert "has been silent for 5 s: it is dropped" in place.server.text


def test_a_worker_that_is_stopped_finishes_its_rollouts(place):
    slowly = like_sevens(
        place,
        "Slowly",
        "Path('playing').touch(); await asyncio.sleep(1); return await super().rollout(task, policy, seed=seed)",
    )
    trainer = place.train(*QUICK, "--steps", "6")
    first = place.worker(1, slowly)
    place.wait_for_step(2, trainer)
    (place.folder / "playing").unlink()
    until = time.monotonic() + 60
    while not (place.folder / "playing").exists():
        assert time.monotonic() < until, place.all_text
        time.sleep(0.01)
    assert first.terminate() == 0, first.text
    assert re.search(r"finishing \d+ groups", first.text)
    assert "draws are left to other workers" not in first.text
    assert status(place)["workers"] == []
    place.worker(2, slowly)
    assert trainer.ends(120) == 0, place.all_text
    assert drawn(place.folder / "run") == Counter(range(6 * 8))
    assert "silent" not in place.server.text


def test_a_trainer_that_is_killed_resumes_with_the_same_workers_and_no_group_counts_twice(place):
    trainer = place.train(*SLOW, "--steps", "16")
    worker = place.worker(1, SEVENS)
    place.wait_for_step(6, trainer)
    trainer.kill()
    resumed = place.start("resume", "resume", "run")
    assert resumed.ends(120) == 0, place.all_text
    assert [line["step"] for line in place.metrics] == list(range(1, 17))
    assert drawn(place.folder / "run") == Counter(range(16 * 8))
    assert worker.terminate() == 0


def test_ctrl_c_on_the_trainer_saves_and_resume_goes_on(place):
    trainer = place.train(*SLOW, "--steps", "12")
    place.worker(1, SEVENS)
    place.wait_for_step(3, trainer)
    assert trainer.terminate() == 130, trainer.text
    assert "atropos resume run" in trainer.text
    resumed = place.start("resume", "resume", "run")
    assert resumed.ends(120) == 0, place.all_text
    assert drawn(place.folder / "run") == Counter(range(12 * 8))


def test_a_server_that_is_killed_and_comes_back_costs_nothing(place):
    trainer = place.train(*SLOW, "--steps", "16")
    place.worker(1, SEVENS)
    place.wait_for_step(3, trainer)
    place.server.kill()
    place.serve("--port", place.url.rpartition(":")[2])
    assert trainer.ends(180) == 0, place.all_text
    assert drawn(place.folder / "run") == Counter(range(16 * 8))


def test_another_run_does_not_train_what_was_drawn_for_the_one_before(place):
    first = place.train(*SLOW, "--steps", "200", "--set", "training.max_staleness=1")
    place.worker(1, SEVENS)
    place.wait_for_step(3, first)
    first.kill()
    second = place.start("second", "train", "--api", place.url, "--dir", "other", *SLOW, "--seed", "7", "--steps", "4")
    assert second.ends(120) == 0, place.all_text
    assert drawn(place.folder / "other") == Counter(range(4 * 8))


def test_a_second_trainer_takes_over_and_the_first_ends(place):
    first = place.train(*SLOW, "--steps", "200")
    worker = place.worker(1, SEVENS)
    place.wait_for_step(3, first)
    second = place.start("second", "train", "--api", place.url, "--dir", "other", *SLOW, "--seed", "7", "--steps", "4")
    assert first.ends(120) == 1, place.all_text
    assert "LeaseLost" in first.text
    assert second.ends(120) == 0, place.all_text
    assert drawn(place.folder / "other") == Counter(range(4 * 8)), "and none that were drawn for the first"
    assert worker.terminate() == 0, worker.text


def test_where_every_rollout_fails_the_run_ends_with_the_cause(place):
    broken = like_sevens(place, "Broken", "raise ValueError('the judge is out')")
    trainer = place.train(*QUICK, "--steps", "3")
    worker = place.worker(1, broken)
    assert trainer.ends(120) == 1, place.all_text
    message = " ".join(trainer.text.split())
    assert "NoProgress" in message
    assert "groups all failed; the last of them in rollout: ValueError: the judge is out" in message
    worker.says("no trainer is there: waiting for one")
    assert worker.terminate() == 0, worker.text


def test_two_environments_share_the_batches_and_one_that_goes_leaves_them_to_the_other(place):
    (place.folder / "eights.py").write_text(
        (place.folder / "sevens.py").read_text().replace("class Sevens", "class Eights")
    )
    (place.folder / "run.toml").write_text("[environment.sevens]\nweight = 3\n[environment.eights]\n")
    trainer = place.train("run.toml", *SLOW, "--steps", "20")
    place.worker(1, SEVENS)
    second = place.worker(2, "./eights.py:Eights")
    place.wait_for_step(8, trainer)
    second.kill()
    assert trainer.ends(120) == 0, place.all_text
    rows = [
        json.loads(line)
        for path in sorted((place.folder / "run/rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert {row["environment"] for row in rows} == {"sevens", "eights"}
    assert "environment 'eights' has no worker any more" in trainer.text


OLD = {
    "tokens": [[3, 4, 5], [3, 4, 6]],
    "masks": [[-100, 4, 5], [-100, 4, 6]],
    "inference_logprobs": [[1.0, -1.0, -2.0], [1.0, -1.0, -2.0]],
    "scores": [1.0, 0.0],
}


OLD_RUN = (
    *QUICK, "--set", "training.group_size=2", "--set", "training.max_logprob_diff=inf",
    "--set", "training.max_staleness=9",  # an old group is as old as the policy was when it came
)  # fmt: skip


def send_old_groups(place: Scene, n: int) -> None:
    wanted = {"max_token_length": 32, "desired_name": "old", "weight": 1.0, "group_size": 2}
    number = httpx.post(f"{place.url}/register-env", json=wanted).json()["env_id"]
    for _ in range(n):
        assert httpx.post(f"{place.url}/scored_data", json={**OLD, "env_id": number}).status_code == 200


def test_the_groups_of_old_environments_train_without_any_worker(place):
    trainer = place.train(*OLD_RUN, "--steps", "3")
    trainer.says("waiting for a worker of any environment")
    send_old_groups(place, 3 * 8)
    assert trainer.ends() == 0, place.all_text
    assert [line["groups/trained"] for line in place.metrics if line["step"]] == [8, 8, 8]
    assert len(drawn(place.folder / "run")) == 24, "each its own"


def test_old_environments_and_workers_share_the_batches(place):
    trainer = place.train(*OLD_RUN, "--steps", "4")
    trainer.says("waiting for a worker of any environment")
    send_old_groups(place, 12)  # a batch and a half: the other half is the worker's
    place.worker(1, SEVENS)
    assert trainer.ends() == 0, place.all_text
    counts = drawn(place.folder / "run")
    assert set(counts.values()) == {1}
    assert sum(draw < 0 for draw in counts) == 12
    assert sum(draw >= 0 for draw in counts) == 4 * 8 - 12


def test_a_hub_that_fills_with_what_no_checkpoint_holds_makes_the_trainer_save_one(tmp_path, sevens):
    with scene(tmp_path, "--hub-mb", "0.5") as place:
        trainer = place.train(*QUICK, "--steps", "20", "--set", "checkpoint.every=0")
        place.worker(1, SEVENS)
        place.wait_for_step(15, trainer)
        assert list((tmp_path / "run/checkpoints").glob("step-*"))
        assert trainer.ends() == 0, place.all_text
        assert drawn(tmp_path / "run") == Counter(range(20 * 8))


def test_a_worker_that_waits_for_a_trainer_ends_on_a_signal(place):
    worker = place.worker(1, SEVENS)
    worker.says("waiting for a trainer")
    assert worker.terminate() == 0, worker.text


@pytest.mark.parametrize("bridge", [pytest.param("checkpoint", marks=pytest.mark.long), "lora"])
def test_an_engine_alone_serves_one_run_after_the_other_each_from_its_own_start(place, tmp_path, bridge):
    (tmp_path / "engine.toml").write_text(f'model = "tiny"\n[bridge]\nuse = "{bridge}"\n')
    engine = place.start("engine", "engine", "engine.toml", "--port", "0")
    url = engine.says(r"(http://[\w.:]+)")

    def run(name: str) -> list[dict[str, float]]:
        role = place.start(
            name, "run", "--env", "gsm8k", "--dir", name, "--steps", "2", "--engine", "remote",
            "--set", f"engine.url={url}", "--bridge", bridge, "--set", "evaluation.problems=8",
            "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "trainer.learning_rate=3e-3",
        )  # fmt: skip
        assert role.ends(180) == 0, place.all_text
        return metrics_of(tmp_path / name)

    async def leave_paused() -> None:
        remote = RemoteEngine(url)
        await remote.pause()
        await remote.close()

    first = run("first")
    assert max(line["bridge/bytes_copied"] for line in first) > 0
    asyncio.run(leave_paused())  # as a run that was killed while it sent weights
    second = run("second")
    for line in (*first, *second):
        assert line["alignment/max_abs_logprob_diff"] <= 1e-4
        assert line["step"] == 0 or "correction/fraction" in line, "in what precision it samples is not known"
    start, end, again = (
        (tmp_path / name / f"rollouts/eval-{step:06d}.jsonl").read_bytes()
        for name, step in (("first", 0), ("first", 2), ("second", 0))
    )
    assert again == start != end, "the same replies at step 0, and others once it was trained"
    resumed = place.start("resumed", "resume", "first", "--set", "training.steps=3")
    assert resumed.ends(180) == 0, place.all_text
    assert metrics_of(tmp_path / "first")[-1]["step"] == 3
    assert metrics_of(tmp_path / "first")[-1]["alignment/max_abs_logprob_diff"] <= 1e-4
    assert engine.terminate() == 0


def test_an_engine_alone_refuses_what_it_was_not_started_for_and_says_what_to_type(place):
    for bridge in ("ipc", "local"):  # which carry nothing to another machine
        refused = place.start(bridge, "engine", "--model", "tiny", "--port", "0", "--bridge", bridge)
        assert refused.ends() == 2
        assert f"bridge '{bridge}' carries" in refused.text
        assert "Use --bridge checkpoint, --bridge delta or --bridge lora" in refused.text
        assert "Traceback" not in refused.text
    engine = place.start("engine", "engine", "--model", "tiny", "--port", "0")
    url = engine.says(r"(http://[\w.:]+)")
    run = place.start(
        "run", "run", "--env", "gsm8k", "--dir", "run", "--engine", "remote", "--set", f"engine.url={url}",
        "--bridge", "lora",
    )  # fmt: skip
    assert run.ends() == 2
    message = " ".join(run.text.split())
    assert "FitError" in message
    assert (
        "started for whole models (--bridge checkpoint), but the run would send it adapters (--bridge lora)" in message
    )
    assert "Give `atropos engine` the --bridge of the run" in message
    assert "Traceback" not in message


def test_a_server_with_a_token_refuses_who_has_none_or_another(tmp_path, sevens):
    for name, word in (("token", "a-word-of-many-letters"), ("other", "some-other-word-instead")):
        (tmp_path / name).write_text(word)
        (tmp_path / name).chmod(0o600)
    with scene(tmp_path, "--token-file", "token") as place:
        for number, given in enumerate(((), ("--token-file", "other"))):
            worker = place.worker(number, SEVENS, *given)
            assert worker.ends() == 1
            assert "AccessRefused" in worker.text
        trainer = place.train(*QUICK, "--steps", "3", "--token-file", "other")
        assert trainer.ends() == 1
        assert "AccessRefused" in trainer.text
        (tmp_path / "run").rename(tmp_path / "refused")
        trainer = place.train(*QUICK, "--steps", "3", "--token-file", "token")
        place.worker(3, SEVENS, "--token-file", "token")
        assert trainer.ends() == 0, place.all_text
        assert not any("a-word-of-many-letters" in role.text for role in place.roles)
