"""Unmodified environments and trainers of atroposlib, on our server, from registration to the end."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS
from tests.atroposlib.processes import TINY, OurServer, Process, client
from tests.atroposlib.scripted import ScriptedServer

pytestmark = pytest.mark.slow


def environment(folder: Path, kind: str, url: str, model: ScriptedServer, steps: int) -> Process:
    return client(
        folder / f"{kind}.log",
        "environment_program.py",
        kind,
        url,
        model.url,
        str(TINY),
        str(steps),
        str(folder / f"evals-{kind}"),
    )


def printed(process: Process, word: str) -> list:
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", process.text, re.MULTILINE)]


def test_an_environment_registers_sends_evaluates_and_ends_while_a_trainer_gets_every_batch(
    our_server: Callable[..., OurServer], model: ScriptedServer, tmp_path: Path
) -> None:
    server = our_server("--model", str(TINY))
    log = (
        tmp_path / "right.log"
    )  # atroposlib evaluates where it sees steps 1 and then 2, which a quick trainer would hide from it
    trainer = client(tmp_path / "trainer.log", "trainer_program.py", server.url, "8", "5", "100", str(log))
    worker = environment(
        tmp_path, "right", server.url, model, steps=7
    )  # it ends early by what is queued: up to four batches
    assert worker.log == log
    assert worker.ended_within(100) == 0, worker.text
    assert trainer.ended_within(120) == 0, trainer.text
    assert "ENDED 0" in worker.text
    assert "EVALUATED" in worker.text and list((tmp_path / "evals-right").glob("metrics.json"))
    batches, sent = printed(trainer, "BATCH"), printed(worker, "SENDING")
    assert len(batches) == 5
    assert all(sum(size for _, size, _ in batch) == 8 for batch in batches)
    assert all(keys == sorted(KEYS) for batch in batches for *_, keys in batch)
    tags = [tag for batch in batches for tag, *_ in batch]
    assert len(set(tags)) == len(tags), "no group is served twice"
    left = httpx.get(f"{server.url}/status").json()["queue_size"]
    assert set(tags) <= {tag for tag, _ in sent}
    assert len(sent) - 2 <= len(tags) + left <= len(sent), (
        "at its end an environment breaks off what its two workers send"
    )
    assert not re.search(r"Traceback|Failed to send", worker.text), worker.text


def test_pieces_become_whole_groups_and_groups_above_the_size_stay_whole(
    our_server: Callable[..., OurServer], model: ScriptedServer, tmp_path: Path
) -> None:
    server = our_server()
    trainer = client(tmp_path / "trainer.log", "trainer_program.py", server.url, "12", "4", "120")
    trainer.wait_for("WAITING")  # environments are let in once a batch was asked for
    trainer.process.send_signal(signal.SIGSTOP)  # until there are groups of both: one may start seconds after the other
    worker = [environment(tmp_path, kind, server.url, model, steps=3) for kind in ("mixed", "above")]
    for one in worker:
        one.wait_for(r"(?s)SENDING.*SENDING.*SENDING.*SENDING", 90)
    trainer.process.send_signal(signal.SIGCONT)
    for one in worker:
        assert one.ended_within(120) == 0, one.text
    assert trainer.ended_within(120) == 0, trainer.text
    groups = [group for batch in printed(trainer, "BATCH") for group in batch]
    assert {size for tag, size, _ in groups if tag.startswith("mixed")} <= {4}, "never in pieces"
    assert {size for tag, size, _ in groups if tag.startswith("above")} <= {4, 6}
    assert {tag.split("-")[0] for tag, *_ in groups} == {"mixed", "above"}, "neither is starved"
    assert "above-3" not in [tag for tag, *_ in groups]
    assert all(sum(size for _, size, _ in batch) <= 12 for batch in printed(trainer, "BATCH"))


def test_a_server_that_is_killed_and_started_again_is_the_same_to_both(
    our_server: Callable[..., OurServer], model: ScriptedServer, tmp_path: Path
) -> None:
    server = our_server()
    port = httpx.URL(server.url).port
    assert port is not None
    trainer = client(tmp_path / "trainer.log", "trainer_program.py", server.url, "8", "8", "150")
    worker = environment(tmp_path, "right", server.url, model, steps=7)
    trainer.wait_for(r"(?s)BATCH.*BATCH", 90)
    for one in (trainer, worker):  # three tries within seconds are all that they have, and a start may take longer
        one.process.send_signal(signal.SIGSTOP)
    httpx.get(
        f"{server.url}/status"
    )  # answered after their last requests: a batch whose answer is lost is the trainer's loss
    server.process.kill()
    server.process.wait()
    again = our_server(port=port)
    for one in (trainer, worker):
        one.process.send_signal(signal.SIGCONT)
    assert worker.ended_within(120) == 0, worker.text
    assert trainer.ended_within(120) == 0, trainer.text
    tags = [tag for batch in printed(trainer, "BATCH") for tag, *_ in batch]
    assert len(tags) == 16 and len(set(tags)) == 16
    assert httpx.get(f"{again.url}/status").json()["current_step"] == 8
