from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import ConfigError
from atropos_core.hub.records import BatchSize
from atropos_core.types import Draw, Sampling
from atropos_trajectory_api.legacy.retries import digest
from atropos_trajectory_api.legacy.routes import LegacyRoutes
from atropos_trajectory_api.legacy_groups.stored_group import as_frame
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.serving import ids_of
from atropos_trajectory_api.service.service import Service
from plugins.trajectory_api.tests.running import ENVIRONMENT, REGISTER, Running, group, running, tags
from plugins.trajectory_api.tests.sent_groups import group_of


def until(holds: Any, deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def post_aside(server: Running, body: Any, **more: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(f"{server.url}/scored_data", json=body, timeout=30, **more))

    thread = threading.Thread(target=post)
    thread.start()
    return thread, answers


def test_a_full_hub_tells_environments_to_stop_then_holds_a_group_until_there_is_room(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=8) as server:
        server.begin()
        assert server.post("/status-env", b"").status_code == 405
        for tag in range(2):
            assert server.post("/scored_data", group(tag=tag, env_id=0)).json() == {"status": "received"}
        status = server.client.get("/status-env?env_id=0").json()
        assert status["queue_size"] * 4 >= 3 * REGISTER["batch_size"], "where BaseEnv stops"
        thread, answers = post_aside(server, group(tag=2, env_id=0))
        until(lambda: server.service.hub.status().puts_waiting)
        time.sleep(0.2)
        assert not answers
        assert tags(server.client.get("/batch").json()) == [0]
        thread.join(60)
        assert answers[0].json() == {"status": "received"}
        assert [tags(server.client.get("/batch").json()) for _ in range(3)] == [[1], [2], []]


def test_a_group_that_found_no_room_in_time_is_answered_503_and_not_stored(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4, hold_s=0.3) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        late = server.post("/scored_data", group(tag=1, env_id=0))
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0 and "room" in late.json()["detail"]
        assert tags(server.client.get("/batch").json()) == [0]
        assert tags(server.client.get("/batch").json()) == []


def test_of_a_list_that_was_stored_in_part_the_rest_is_stored_when_it_is_sent_again(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=8, hold_s=0.3) as server:
        server.begin()
        body = [group(tag=tag, env_id=0) for tag in range(3)]
        assert server.post("/scored_data_list", body).status_code == 503
        assert tags(server.client.get("/batch").json()) == [0]
        assert server.post("/scored_data_list", body).json() == {"status": "received", "groups_processed": 3}
        assert [tags(server.client.get("/batch").json()) for _ in range(3)] == [[1], [2], []]
        assert server.post("/scored_data_list", body[:2]).status_code == 200, "another body is another matter"


def test_a_client_that_does_not_wait_for_room_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/scored_data", json=group(tag=1, env_id=0), timeout=1.5)
        until(lambda: not server.service.hub.status().puts_waiting)
        assert [tags(server.client.get("/batch").json()) for _ in range(2)] == [[0], []]
        assert server.post("/scored_data", group(tag=1, env_id=0)).json() == {"status": "received"}
        assert tags(server.client.get("/batch").json()) == [1]


async def test_a_group_that_was_let_in_as_its_client_gave_up_is_not_stored_again(tmp_path: Path) -> None:
    options = ServeOptions(directory=tmp_path, sync="always", hub_sequences=4, same_host=False)
    service = Service.open(options)
    door = LegacyRoutes(service, options)

    async def post(tag: int, gone: asyncio.Event) -> int | None:
        messages = [{"type": "http.request", "body": json.dumps(group(tag=tag)).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if not messages:
                listening.set()
                await gone.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/scored_data", "method": "POST", "headers": [], "query_string": b""}
        await door(scope, receive, send)
        return sent[0]["status"] if sent else None

    def settle_one() -> bool:
        entries = service.hub.open("old").try_lease(BatchSize(groups=1), 0)
        if entries and service.hub.current is not None:
            service.hub.current.commit([entries[0].id])
        return bool(entries)

    staying, gone, listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
    assert await post(0, staying) == 200
    held = asyncio.create_task(post(1, gone))
    await asyncio.wait_for(listening.wait(), 10)  # past the first try, which waits for nothing
    while not service.hub.status().puts_waiting:
        await asyncio.sleep(0.01)
    assert settle_one()
    gone.set()  # while what was let in is not on the disk yet
    assert await held is None
    assert len(service.hub) == 1
    assert await asyncio.wait_for(post(1, staying), 10) == 200, "it is there, so it waits for no room"
    assert settle_one() and not settle_one()
    await service.close()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("size", [20_000_000, 200_000], ids=["more than the kernel buffers", "sent at once"])
def test_a_batch_whose_client_goes_away_is_served_again(reset: bool, size: int, tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        server.post("/scored_data", group(tag=7, images=["x" * size]))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            assert server.client.get("/status").json() == {"current_step": int(size < 10**6), "queue_size": 0}
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: server.client.get("/status").json()["queue_size"] == 1)
        assert server.client.get("/status").json()["current_step"] == 0
        assert tags(server.client.get("/batch").json()) == [7]
        assert server.client.get("/status").json() == {"current_step": 1, "queue_size": 0}


def test_a_body_whose_answer_was_lost_is_answered_and_not_stored_twice(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        body = json.dumps(group(tag=1)).encode()
        assert server.post("/scored_data", body).status_code == 200
        intake = server.app.legacy.intake
        assert intake.latest is not None
        intake.retries.remember(digest(intake.latest), 1)
        assert server.post("/scored_data", body).json() == {"status": "received"}
        assert server.client.get("/status").json()["queue_size"] == 1
        assert server.post("/scored_data", body).json() == {"status": "received"}
        assert server.client.get("/status").json()["queue_size"] == 2, "sent a third time it is meant"


def test_ids_beyond_the_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    with running(tmp_path, vocabulary=50) as server:
        server.begin()
        bad = group(tag=0, env_id=0)
        bad["tokens"][2][1] = bad["masks"][2][1] = 50
        answer = server.post("/scored_data", bad)
        assert answer.status_code == 422
        assert "tokens[2]" in answer.text and "maths_0" in answer.text and "50" in answer.text
        bad["tokens"][2][1] = bad["masks"][2][1] = 49
        assert server.post("/scored_data", bad).status_code == 200


def test_what_environments_override_reaches_the_trainer(tmp_path: Path) -> None:
    sent = group(
        2, advantages=[[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]], distill_token_ids=[[[], [5, 6], [7]]] * 2,
        distill_logprobs=[[[], [-1.0, -2.0], [-0.5]]] * 2, overrides=[{"temperature": 0.25}, {"set_advantage_to_zero": True}],
    )  # fmt: skip
    with running(tmp_path) as server:
        assert server.post("/scored_data", sent).json() == {"status": "received"}
        frame = server.app.legacy.intake.latest
        assert frame is not None
        first, second = (episode.rollouts[0] for episode in decode(as_frame(frame)).episodes)
        assert first.logprobs is None and first.temperature == 0.25
        assert first.advantages.tolist() == [0.0, 1.0, 2.0] and second.advantages.tolist() == [0.0, 0.0, 0.0]
        assert first.teacher is not None and first.teacher.token_ids.tolist() == [5, 6, 7]
        shown = server.client.get("/latest_example").json()
        assert {key: shown[key] for key in sent} == sent


def test_pieces_outlive_the_server_and_are_one_group_once_they_are_whole(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        assert server.post("/scored_data", group(3, tag=1, env_id=0)).json() == {"status": "buffered", "buffer_size": 3}
    with running(tmp_path) as server:
        assert server.client.get("/info").json() == {"batch_size": 4, "max_token_len": 100}
        assert server.post("/scored_data", group(2, tag=2, env_id=0)).json() == {"status": "buffered", "buffer_size": 5}
        assert server.client.get("/status").json()["queue_size"] == 0
        assert server.post("/scored_data", group(1, tag=3, env_id=0)).json() == {"status": "buffered", "buffer_size": 2}
        (batch,) = server.client.get("/batch").json()["batch"]
        assert len(batch["tokens"]) == len(batch["masks"]) == len(batch["scores"]) == 4
        assert server.post("/register-env", ENVIRONMENT).json()["wandb_name"] == "maths_1"
        assert server.client.get("/reset_data").text == "Reset successful"
    with running(tmp_path) as server:
        assert server.client.get("/info").json() == {"batch_size": -1, "max_token_len": -1}


def test_pieces_that_say_nonsense_of_their_sequences_are_joined_without_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        for more in ({"overrides": [{"temperature": 0.5}], "messages": [[]]}, {"overrides": [], "images": [1]}):
            assert server.post("/scored_data", group(2, env_id=0, **more)).status_code == 200
        for overrides in (0, "", {}, False):
            assert server.post("/scored_data", group(2, env_id=0, overrides=overrides)).status_code in (200, 422)
        joined = [one["overrides"] for _ in range(2) for one in server.client.get("/batch").json()["batch"] or []]
        assert joined[0] == [{"temperature": 0.5}, {}, {}, {}]


def test_pieces_that_never_add_up_are_queued_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin(batch_size=3)
        sizes = [server.post("/scored_data", group(3, tag=tag, env_id=0)).json()["buffer_size"] for tag in range(12)]
        assert max(sizes) <= 16, "bounded"
        assert len(tags(server.client.get("/batch").json())) == 1


def test_a_piece_whose_client_gave_up_while_its_whole_waited_is_kept_once(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        assert server.post("/scored_data", group(2, tag=1, env_id=0)).json() == {"status": "buffered", "buffer_size": 2}
        body = group(2, tag=2, env_id=0)
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/scored_data", json=body, timeout=0.5)
            until(lambda: not server.service.hub.status().puts_waiting)
            assert server.app.legacy.intake.pieces.sequences(0) == 4
        assert tags(server.client.get("/batch").json()) == [0]
        assert server.post("/scored_data", body).json() == {"status": "buffered", "buffer_size": 0}
        (whole,) = server.client.get("/batch").json()["batch"]
        assert [row[1] for row in whole["tokens"]] == [3, 4, 4, 5]
        assert server.client.get("/batch").json() == {"batch": None}


def test_a_whole_that_found_the_hub_full_is_queued_once_there_is_room_without_another_piece(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4, hold_s=0.2) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        server.post("/scored_data", group(2, tag=1, env_id=0))
        assert server.post("/scored_data", group(2, tag=2, env_id=0)).json() == {"status": "buffered", "buffer_size": 4}
        assert tags(server.client.get("/batch").json()) == [0]
        until(lambda: server.service.hub.status().groups == 1)
        assert tags(server.client.get("/batch").json()) == [1]


def test_a_piece_that_completes_a_group_while_the_server_ends_is_acknowledged_and_kept_once(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        server.post("/scored_data", group(2, tag=1, env_id=0))
        thread, answers = post_aside(server, group(2, tag=2, env_id=0))
        until(lambda: server.service.hub.status().puts_waiting)
        server.app.stop()
        thread.join(60)
        assert answers[0].json() == {"status": "buffered", "buffer_size": 4}
    with running(tmp_path) as server:
        assert tags(server.client.get("/batch").json()) == [0]
        assert tags(server.client.get("/batch").json()) == [1]
        assert server.client.get("/batch").json() == {"batch": None}


def test_two_pieces_that_complete_groups_while_the_hub_is_full_make_no_sequence_twice(tmp_path: Path) -> None:
    with running(tmp_path, hub_sequences=4) as server:
        server.begin()
        server.post("/scored_data", group(tag=0, env_id=0))
        for sequences, tag in ((3, 10), (2, 20)):
            server.post("/scored_data", group(sequences, tag=tag, env_id=0))
        waiting = []
        for number, (sequences, tag) in enumerate(((1, 30), (2, 40)), 1):
            waiting.append(post_aside(server, group(sequences, tag=tag, env_id=0)))
            until(lambda number=number: server.service.hub.status().puts_waiting == number)
        seen = []
        for _ in range(3):
            seen += [row[1] for one in server.client.get("/batch").json()["batch"] or [] for row in one["tokens"]]
            until(lambda: server.service.hub.status().groups or not server.service.hub.status().puts_waiting)
        for thread, answers in waiting:
            thread.join(60)
            assert answers[0].json()["status"] == "buffered"
        assert sorted(seen[4:]) == sorted([12, 13, 14, 22, 23, 32, 42, 43])


def test_beyond_their_part_of_the_hub_the_oldest_pieces_are_queued_as_they_are(tmp_path: Path) -> None:
    with running(tmp_path, hub_mb=0.1) as server:
        server.begin(batch_size=2)
        server.post("/register-env", {**ENVIRONMENT, "group_size": 64})
        pieces = server.app.legacy.intake.pieces
        assert server.post("/scored_data", group(2, tag=9, env_id=0)).json()["buffer_size"] == 2
        for tag in range(40):
            assert server.post("/scored_data", group(1, tag=tag, length=300, env_id=1)).json()["status"] == "buffered"
            assert pieces.size_bytes <= pieces.most_bytes == 25_000
        first = server.client.get("/batch").json()["batch"]
        assert first[0]["generation_params"]["tag"] == 9, "pieces of another environment keep no one out"
        large = server.post("/scored_data", group(1, length=7000, env_id=1))
        assert large.json() == {"status": "received"}, "too large to be kept as a piece"


def test_a_group_size_that_nobody_can_keep_pieces_for_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        assert server.post("/register-env", {**ENVIRONMENT, "group_size": 65_537}).status_code == 422
        assert server.post("/register-env", {**ENVIRONMENT, "group_size": 65_536}).status_code == 200


def test_a_group_that_json_cannot_say_is_dropped_and_those_behind_it_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as server:
        server.begin(batch_size=8)
        whole = group_of(Draw(-1, "mine", "train", -1, 1))
        first = replace(whole.episodes[0], messages=({"role": "user", "content": b"an image"},))
        frame = encode_bytes(replace(whole, episodes=(first, *whole.episodes[1:])))
        body = {"groups": [{"key": "k", "worker": "", "frame": frame}], "wait_s": 1.0}
        assert server.client.post("/v1/groups", content=encode_bytes(body)).status_code == 200
        for tag in (1, 2):
            server.post("/scored_data", group(tag=tag))
        assert tags(server.client.get("/batch").json()) == [1, 2]
        assert server.client.get("/status").json() == {"current_step": 1, "queue_size": 0}
        assert server.service.counters.snapshot()["dropped"] == {"unsayable": 1}
        assert "dropped" in capsys.readouterr().err


def test_an_old_trainer_that_stops_reading_loses_its_batch_to_the_next(tmp_path: Path) -> None:
    with running(tmp_path, request_s=1.0) as server, socket.socket() as client:
        server.begin()
        server.post("/scored_data", group(tag=7, images=["x" * 20_000_000]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        until(lambda: server.client.get("/status").json()["queue_size"] == 1)
        assert tags(server.client.get("/batch").json()) == [7]


def test_a_silent_environment_loses_its_share_until_it_asks_again(tmp_path: Path) -> None:
    with running(tmp_path, silent_s=0.2) as server:
        server.begin()
        server.post("/register-env", {**ENVIRONMENT, "desired_name": "other", "min_batch_allocation": 0.5})
        until(lambda: not server.service.old.environments[1].connected)
        assert server.client.get("/status-env?env_id=0").json()["unallocated_fraction"] == 1.0
        assert server.client.get("/status-env?env_id=1").json()["unallocated_fraction"] == 0.5


def test_numbers_of_any_size_and_sign_are_refused_and_not_met_with_a_500(tmp_path: Path) -> None:
    huge = 10**400
    with running(tmp_path) as server:
        for field in ("batch_size", "max_token_len", "starting_step", "num_steps"):
            assert server.post("/register", json.dumps({**REGISTER, field: huge}).encode()).status_code == 422
        assert server.post("/register", {**REGISTER, "batch_size": -1}).status_code == 422
        server.begin()
        for wrong in ({"group_size": 0}, {"weight": 1e400}, {"max_token_length": huge}, {"min_batch_allocation": 2}):
            assert server.post("/register-env", json.dumps({**ENVIRONMENT, **wrong}).encode()).status_code == 422, wrong
        for number in (-1, huge, 2**62, "x", None, [1]):
            answer = server.client.request("GET", "/status-env", content=json.dumps({"env_id": number}).encode())
            assert answer.status_code in (404, 422), number
            assert server.post("/disconnect-env", json.dumps({"env_id": number}).encode()).status_code in (200, 422)
        assert server.client.get("/status-env?env_id=999999999999999999999999").status_code == 422
        deep = b"[" * 100_000
        assert server.post("/scored_data", deep).status_code == 422
        assert server.post("/scored_data", json.dumps(group(images=huge)).encode()).status_code == 422


def test_the_vocabulary_of_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        ids_of(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    assert ids_of(tmp_path) == 512


def test_an_old_environment_runs_for_a_trainer_of_the_native_protocol(tmp_path: Path) -> None:
    def call(server: Running, path: str, **asked: Any) -> Any:
        answer = server.client.post(f"/v1/sessions{path}", content=encode_bytes(asked))
        assert answer.status_code == 200, answer.text
        return decode(answer.content)

    with running(tmp_path) as server:
        session = call(
            server, "", holder="run-1", vocabulary=60, group_size=4, min_group=2, batch_groups=2, max_staleness=4,
            max_token_len=100, version=3, sampling=Sampling(),
        )["session"]  # fmt: skip
        assert server.client.get("/info").json() == {"batch_size": 8, "max_token_len": 100}
        made = server.post("/register-env", ENVIRONMENT).json()
        assert (made["status"], made["starting_step"]) == ("success", 3)
        assert "vocabulary" in server.post("/scored_data", group(tag=70, env_id=0)).text
        assert server.post("/scored_data", group(env_id=0)).json() == {"status": "received"}
        refused = server.client.get("/batch").json()
        assert refused["status"] == "error" and "run-1" in refused["message"] and refused["batch"] == []
        assert server.client.get("/reset_data").status_code == 409
        (entry,) = call(server, f"/{session}/lease", groups=1, version=3, wait_s=5)["entries"]
        leased = decode(entry["frame"])
        assert leased.draw.id == -1 and leased.draw.environment == "maths_0"
        assert leased.oldest_version is None, "the version that sampled it is unknown"
        call(server, f"/{session}/renew", trained=(entry["id"],))
        call(server, f"/{session}/commit", ids=(entry["id"],))
        call(server, f"/{session}/version", version=4)
        assert server.client.get("/status").json() == {"current_step": 4, "queue_size": 0}


def test_what_a_reset_lets_go_of_counts_as_dropped_not_as_trained(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.begin()
        for tag in range(5):
            server.post("/scored_data", group(8, tag=tag, env_id=0))
        assert server.client.get("/reset_data").status_code == 200
        told = server.client.get("/metrics").text
        assert 'atropos_dropped_groups_total{cause="reset"} 5\n' in told
        assert "atropos_hub_committed_groups_total 0\n" in told


def test_resetting_works_once_a_native_trainer_has_come_and_gone(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.post("/register", REGISTER)
        server.client.get("/batch")
        for _ in range(2):
            opened = server.client.post(
                "/v1/sessions",
                content=encode_bytes(
                    {"holder": "run", "vocabulary": 60, "group_size": 4, "min_group": 2, "batch_groups": 2,
                     "max_staleness": 4, "max_token_len": 100, "version": 3, "sampling": Sampling()}
                ),
            )  # fmt: skip
            number = decode(opened.content)["session"]
            assert server.client.delete(f"/v1/sessions/{number}").status_code == 200
            assert server.client.get("/reset_data").status_code == 200


def test_lists_and_bodies_of_too_many_things_are_refused(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        small = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}
        assert "1024" in server.post("/scored_data_list", [small] * 1025).text
        answer = server.client.post("/scored_data_list", content=b"[" + b"[]," * 400_000 + b"[]]")
        assert answer.status_code == 422 and "lists and objects" in answer.text
        assert server.post("/scored_data_list", [small] * 1024).json()["groups_processed"] == 1024


@pytest.mark.parametrize("route", ["/register", "/register-env", "/disconnect-env"])
def test_a_registration_that_is_deep_or_long_is_refused_before_it_is_read(tmp_path: Path, route: str) -> None:
    with running(tmp_path) as server:
        for value in (b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000, b"[" + b"1," * 100_000 + b"1]"):
            answer = server.post(route, b'{"desired_name":%b,"env_id":%b,"wandb_group":%b}' % (value, value, value))
            assert answer.status_code == 422 and "the body of this registration has" in answer.text
