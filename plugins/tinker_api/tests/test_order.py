"""Requests to one model: carried out in the order of their ids, once each, also over a kill."""

from __future__ import annotations

from pathlib import Path

from plugins.tinker_api.tests.requests import PLAIN, Client, datum
from tests.tinker.server import TinkerServer, tinker_server

OTHER = datum([9, 8], target_tokens=[8, 7], weights=[2.0, -1.0])


def trained(client: Client, steps: int = 1) -> bytes:
    """Train the plain way, and return the logprobs afterwards."""
    for step in range(steps):
        client.done(client.send(2 * step + 1))
        client.done(client.step(2 * step + 2))
    return client.forward(2 * steps + 1)


def test_requests_that_arrive_in_any_order_are_carried_out_in_theirs(server: TinkerServer) -> None:
    expected = trained(Client(server), 2)
    client = Client(server)
    promises = [client.send(5, forward_only=True), client.step(4), client.send(3), client.step(2), client.send(1)]
    answers = [client.done(one) for one in promises]
    assert answers[0] == expected


def test_a_request_that_is_sent_again_is_carried_out_once(server: TinkerServer) -> None:
    expected = trained(Client(server))
    client = Client(server)
    first, again = client.send(1), client.send(1)
    assert first == again
    client.done(first)
    assert client.send(1) == first  # its result is kept
    steps = [client.step(2) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]
    client.done(steps[0])
    client.step(2)
    assert client.forward(3) == expected


def test_a_step_is_applied_once_if_the_server_was_killed_before_the_answer(tmp_path: Path, tiny: str) -> None:
    with tinker_server(tmp_path, tiny) as server:
        expected = trained(Client(server), 2)
        client = Client(server)
        client.done(client.send(1))
        accepted = client.step(2)
        server.kill()
        server.start()
        assert client.step(2) == accepted and client.send(1)[0] == 200
        client.done(accepted)
        client.send(3)
        server.kill()
        server.start()
        client.done(client.send(3))
        client.done(client.step(4))
        assert client.forward(5) == expected  # it is carried out after the state of step 4 was saved
        server.kill()
        server.start()
        assert client.forward(6) == expected


def test_the_gradient_is_there_again_after_a_kill(tmp_path: Path, tiny: str) -> None:
    """Two calls are added up, with a kill between them."""
    with tinker_server(tmp_path, tiny) as server:
        expected = b""
        for kills in (False, True):
            client = Client(server)
            client.done(client.send(1))
            if kills:
                server.kill()
                server.start()
            client.done(client.send(2, OTHER))
            client.done(client.step(3))
            expected = expected or client.forward(4)
        assert client.forward(4) == expected


def test_an_id_of_another_request_is_refused(server: TinkerServer) -> None:
    client = Client(server)
    client.done(client.send(1))
    for status, answer in (client.send(1, PLAIN, OTHER), client.step(1)):
        assert status == 400 and "that of another request" in answer["error"]


def test_ids_that_cannot_be_are_refused(server: TinkerServer) -> None:
    client = Client(server)
    for seq in (0, -1, -(1 << 31)):
        assert client.send(seq)[0] == 400
        assert client.step(seq)[0] == 400
    status, answer = client.step(10_000_000)
    assert status == 400 and "too far ahead" in answer["error"]
    assert client.step(1 << 70)[0] == 400
    assert client.done(client.send(1))


def test_a_result_that_is_not_ready_is_held_and_then_asked_for_again(tmp_path: Path, server: TinkerServer) -> None:
    """The first request is missing, so the second waits."""
    client = Client(server)
    _, promise = client.step(2)
    status, answer = server.call("POST", "retrieve_future", {"request_id": promise["request_id"]})
    assert (status, answer["type"], answer["queue_state"]) == (408, "try_again", "active")
    client.send(1)
    assert client.result(promise["request_id"])[0] == 200


def test_a_failed_forward_backward_makes_the_next_step_fail_and_the_one_after_it_not(server: TinkerServer) -> None:
    client, plain = Client(server), Client(server)
    expected = trained(plain)
    failed = client.done(client.send(1, loss="nothing_like_this"))
    assert "nothing_like_this" in failed["error"] and failed["category"] == "user"
    client.done(client.send(2))
    assert "gradient is not whole" in client.done(client.step(3))["error"]
    client.done(client.send(4))
    client.done(client.step(5))
    assert client.forward(6) == expected


def test_a_failed_forward_leaves_the_gradient_whole(server: TinkerServer) -> None:
    client, plain = Client(server), Client(server)
    expected = trained(plain)
    client.done(client.send(1))
    assert "error" in client.done(client.send(2, loss="nothing_like_this", forward_only=True))
    assert "error" not in client.done(client.step(3))
    assert client.forward(4) == expected
