"""`kill -9` of server, trainer and producers: what was acknowledged is in the final commit log exactly once, nothing torn."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from atropos_trajectory_api.legacy.retries import SLOT_S
from tests.e2e.api_faults import PRODUCERS, Scene, filled, full_disk, killed
from tests.e2e.api_programs import GROUP
from tests.e2e.api_units import old_unit
from tests.e2e.role_kills import GROUPS, KINDS, killed_roles
from tests.old_payloads import environment, trainer

DISK_MB = 48
LONG = 20_000  # tokens of a group: more than fit into the last page of a file on a full disk
MINUTE_S = 60
REPEATED_AFTER_S = 12  # longer than any slot in which the server looks for what it stored last


@pytest.mark.slow
def test_five_kills_lose_nothing_double_nothing_and_tear_nothing(tmp_path: Path) -> None:
    kinds = ["server", "journal write", "trainer", "slot write", random.choice(PRODUCERS)]
    random.shuffle(kinds)
    found = killed(tmp_path, kinds)
    print(found)
    assert found.missed() == []


@contextmanager
def old_environment(scene: Scene) -> Iterator[tuple[Scene, httpx.Client, int]]:
    """A server to which an old environment and its trainer are registered, with a client and the environment's id."""
    try:
        scene.start_server()
        with httpx.Client(base_url=scene.url, timeout=30, trust_env=False) as client:
            client.post("/register", content=trainer(GROUP))
            client.get("/batch")
            yield scene, client, client.post("/register-env", content=environment("old", GROUP)).json()["env_id"]
    finally:
        scene.close()


def test_an_old_post_that_was_stored_and_not_answered_counts_once_however_late_it_is_repeated(tmp_path: Path) -> None:
    with old_environment(Scene(tmp_path)) as (scene, client, env_id):
        scene.kill("server")
        scene.start_dying_server(after=20, written=1.0)
        scene.wait("the server did not start", 60, scene.is_up)
        acknowledged = 0
        with pytest.raises(httpx.TransportError):
            for serial in range(1, 100):
                assert client.post("/scored_data", json=old_unit(serial, GROUP, 32, env_id)).status_code == 200
                acknowledged = serial
        scene.kill("server")
        time.sleep(REPEATED_AFTER_S)
        scene.start_server()
        for serial in (acknowledged + 1, acknowledged + 2):
            assert client.post("/scored_data", json=old_unit(serial, GROUP, 32, env_id)).status_code == 200
        came = Counter[int]()
        while (batch := client.get("/batch").json()["batch"]) is not None:
            came.update(group["tokens"][0][0] for group in batch)
        assert acknowledged > 5
        assert came == Counter(range(1, acknowledged + 3))


def test_a_piece_counts_once_though_the_journal_was_written_long_before_it(tmp_path: Path) -> None:
    with old_environment(Scene(tmp_path)) as (scene, client, env_id):
        piece = old_unit(1, 1, 32, env_id)
        assert client.post("/scored_data", json=piece).json()["buffer_size"] == 1
        scene.kill("server")
        for path in (tmp_path / "api/journal").rglob("*"):
            os.utime(path, (time.time() - MINUTE_S, time.time() - MINUTE_S))
        scene.start_server()
        assert client.post("/scored_data", json=piece).json()["buffer_size"] == 1, "its answer may have been lost"
        assert client.post("/scored_data", json=piece).json()["buffer_size"] == 2, "the next one is meant"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small tmpfs, so a full disk cannot be made")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize("sequences", [1, GROUP])
def test_what_a_full_disk_refused_first_counts_once_if_the_server_is_killed_after_it(
    sequences: int, tmp_path: Path, small_disk: Path
) -> None:
    with old_environment(Scene(tmp_path, small_disk / "api")) as (scene, client, env_id):
        body = old_unit(1, sequences, LONG // sequences, env_id)
        with filled(small_disk):
            time.sleep(SLOT_S - time.time() % SLOT_S)  # so that what is refused and what is stored share a slot
            assert [client.post("/scored_data", json=body).status_code for _ in range(3)] == [503] * 3
        answer = client.post("/scored_data", json=body)
        assert answer.status_code == 200
        scene.kill("server")
        scene.start_server()
        assert client.post("/scored_data", json=body).json() == answer.json(), "its answer may have been lost"
        assert client.get("/status").json()["queue_size"] == (1 if sequences == GROUP else 0)


@pytest.mark.slow
def test_a_server_that_is_killed_on_a_full_disk_keeps_what_it_acknowledged(tmp_path: Path, small_disk: Path) -> None:
    found = full_disk(tmp_path, small_disk)
    print(found)
    assert found.missed() == []


@pytest.mark.slow
def test_a_run_of_several_processes_trains_every_draw_once_whoever_is_killed(tmp_path: Path) -> None:
    """`atropos serve`, `train` and `env` themselves, over shared memory, against ledgers that none of them keeps."""
    kinds = [*KINDS, *random.sample(KINDS, 2)]
    random.shuffle(kinds)
    found = killed_roles(tmp_path, kinds)
    print(found)
    assert found.missed() == []
    assert found.trained == found.steps * GROUPS * 4 <= found.rollouts
