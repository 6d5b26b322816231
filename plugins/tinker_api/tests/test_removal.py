"""The server removes snapshots that are over, and checkpoints after their time to live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_tinker_api.state.sessions import Sessions
from plugins.tinker_api.tests.requests import Client
from tests.tinker.server import TinkerServer, tinker_server
from tests.waiting import wait_until

LONG_AGO = 1e6  # in seconds since 1970


def snapshot(client: Client, seq: int) -> str:
    """Return the id of a sampling session with the weights of now."""
    body = {"model_id": client.model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "snapshot"}
    id: str = client.done(client.server.call("POST", "save_weights_for_sampler", body))["sampling_session_id"]
    return id


def sample(client: Client, sampler: str, seq: int) -> tuple[int, Any]:
    body = {
        "sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1},
    }  # fmt: skip
    status, answer = client.server.call("POST", "asample", body)
    return client.result(answer["request_id"]) if status == 200 else (status, answer)


def weights(server: TinkerServer, sampler: str) -> Path:
    return server.directory / "server/samplers" / sampler.replace(":", "-") / "adapter/adapter_model.safetensors"


def save(client: Client, seq: int, name: str, **more: object) -> Path:
    """Return the description of a new checkpoint."""
    body = {"model_id": client.model, "seq_id": seq, "path": name, **more}
    return (
        client.server.adapter(client.done(client.server.call("POST", "save_weights", body))["path"]) / "checkpoint.json"
    )


def end_its_time(about: Path) -> None:
    about.write_text(json.dumps({**json.loads(about.read_text()), "expires": LONG_AGO}))


def test_the_snapshots_of_a_session_are_bounded_and_the_used_ones_stay(tmp_path: Path, tiny: str) -> None:
    with tinker_server(tmp_path, tiny, "--snapshots", "2") as server:
        client, other = Client(server), Client(server)
        its_own = snapshot(other, 1)
        made = [snapshot(client, 1), snapshot(client, 2)]
        assert sample(client, made[0], 1)[0] == 200  # now the second one was used longest ago
        made.append(snapshot(client, 3))
        assert [weights(server, one).exists() for one in (*made, its_own)] == [True, False, True, True]
        status, answer = sample(client, made[1], 1)
        assert status == 404 and "--snapshots" in answer["error"]
        server.kill()
        server.start()
        assert sample(client, made[0], 2)[0] == 200
        made.append(snapshot(client, 4))
        assert [weights(server, one).exists() for one in (*made, its_own)] == [True, False, False, True, True]
        assert sample(client, made[3], 1)[0] == 200


def test_a_finished_session_leaves_no_snapshot(server: TinkerServer) -> None:
    client, other = Client(server), Client(server)
    mine, its_own = snapshot(client, 1), snapshot(other, 1)
    assert weights(server, mine).exists()
    body = {"reason": {"type": "completed"}}
    assert server.call("POST", f"sessions/{client.session}/finish", body)[0] == 200
    assert not weights(server, mine).parent.parent.exists() and weights(server, its_own).exists()
    assert sample(client, mine, 1)[0] == 404 and sample(other, its_own, 1)[0] == 200


def test_a_silent_session_loses_its_snapshots_and_nothing_else(tmp_path: Path, tiny: str) -> None:
    with tinker_server(tmp_path, tiny, "--snapshot-hours", "0.001") as server:
        client = Client(server)
        mine, about = snapshot(client, 1), save(client, 2, "kept")
        wait_until(lambda: not weights(server, mine).exists(), "the snapshot is removed")
        assert about.exists() and sample(client, mine, 1)[0] == 404
        assert weights(server, snapshot(client, 3)).parent.parent.parent.exists()  # it may continue


def test_a_checkpoint_is_removed_after_its_time_to_live_though_nothing_asks_for_it(tmp_path: Path, tiny: str) -> None:
    with tinker_server(tmp_path, tiny, "--snapshot-hours", "0.001") as server:
        client = Client(server)
        kept, long = save(client, 1, "kept"), save(client, 2, "long", ttl_seconds=7200)
        short = save(client, 3, "short", ttl_seconds=3600)
        assert 3500 < json.loads(short.read_text())["expires"] - time.time() < 3700
        end_its_time(short)
        wait_until(lambda: not short.parent.exists(), "the checkpoint is removed")
        assert kept.exists() and long.exists()


def test_a_checkpoint_after_its_time_to_live_is_not_found_and_its_name_is_free(server: TinkerServer) -> None:
    client = Client(server)
    about = save(client, 1, "short", ttl_seconds=3600)
    path = f"training_runs/{client.model}/checkpoints"
    assert len(server.call("GET", path)[1]["checkpoints"]) == 1
    end_its_time(about)
    assert server.call("GET", path)[1]["checkpoints"] == [] and not about.parent.exists()
    assert save(client, 2, "short").exists()
    for seq, wrong in enumerate((0, 3599, 10**12), 3):
        body = {"model_id": client.model, "seq_id": seq, "path": "wrong", "ttl_seconds": wrong}
        assert "ttl_seconds" in client.done(server.call("POST", "save_weights", body))["error"]


def test_a_session_is_over_when_it_is_finished_or_has_sent_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sessions = Sessions(tmp_path)
    alive, silent, finished = (sessions.create((), None, None).id for _ in range(3))
    now += 60
    sessions.open(alive)
    sessions.finish(finished, {"reason": "completed"})
    now += 30
    assert sessions.over(60) == {silent, finished}
    assert Sessions(tmp_path).over(60) == {finished}  # a restart tells nothing of clients
