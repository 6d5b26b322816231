"""`atropos tinker`: what it refuses before anything is loaded, and its key."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_tinker_api.serving import ServeOptions, key_of
from atropos_tinker_api.state.directory import ServerDirectory
from plugins.tinker_api.tests.requests import Client
from tests.raw_http import Connection, request
from tests.tinker.server import TinkerServer, tinker_server
from tests.waiting import has_ended, wait_until

Made = Callable[..., ServeOptions]


def options(**more: object) -> ServeOptions:
    plain = {
        "names": (), "directory": Path("x"), "host": "127.0.0.1", "port": 0, "token_file": None, "adapters": 1,
        "body_bytes": 1, "queue_bytes": 1, "request_s": 1.0, "connections": 1, "snapshots": 1, "snapshot_hours": 1.0,
    }  # fmt: skip
    return ServeOptions(**{**plain, **more})


def word(path: Path, text: str) -> Path:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
    return path


def test_a_host_for_others_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host 0.0.0.0 can be reached from elsewhere"):
        key_of(options(host="0.0.0.0"))
    assert key_of(options()) is None


def test_a_key_that_no_client_would_send_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not begin with tml-"):
        key_of(options(token_file=word(tmp_path / "key", "some-long-word-of-a-key")))
    assert key_of(options(token_file=word(tmp_path / "good", "tml-some-long-word"))) == b"tml-some-long-word"


def test_one_server_at_a_time_uses_a_directory_and_for_one_model(tmp_path: Path) -> None:
    first = ServerDirectory(tmp_path / "d", Path("/models/one"))
    with pytest.raises(RunDirectoryError, match="another server uses"):
        ServerDirectory(tmp_path / "d", Path("/models/one"))
    first.close()
    with pytest.raises(ConfigError, match=r"has adapters of the model /models/one, and --model is /models/two"):
        ServerDirectory(tmp_path / "d", Path("/models/two"))
    ServerDirectory(tmp_path / "d", Path("/models/one")).close()


def test_a_port_that_is_taken_is_named(tmp_path: Path, tiny: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = TinkerServer(tmp_path, tiny, port=taken.getsockname()[1])
        server.start(wait=False)
        assert server.process is not None and server.process.wait(120) == 2
    assert "another process has that port" in server.said() and "--port" in server.said()


def test_a_port_that_is_taken_while_the_model_loads_is_named_and_no_process_is_left(tmp_path: Path, tiny: str) -> None:
    server = TinkerServer(tmp_path, tiny)
    server.start(wait=False)
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    wait_until(lambda: len(process.children()) >= 2, "trainer and engine are started", 120)
    children = process.children(recursive=True)
    for one in children:
        one.suspend()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.port))
        taken.listen()
        for one in children:
            one.resume()
        assert server.process.wait(120) == 2
    assert server.said().count("another process has that port") == 1 and "Traceback" not in server.said()
    assert all(has_ended(one.pid) for one in children)


def test_a_directory_of_another_server_is_refused_before_anything_is_started(server: TinkerServer, tiny: str) -> None:
    second = TinkerServer(server.directory, tiny)
    second.start(wait=False)
    assert second.process is not None and second.process.wait(120) == 1
    assert server.said().count("another server uses") == 1 and "Traceback" not in server.said()
    assert server.call("GET", "healthz")[0] == 200


def test_with_a_key_only_its_callers_are_served_under_each_name_of_the_model(tmp_path: Path, tiny: str) -> None:
    key = word(tmp_path / "key", "tml-some-long-word-of-a-key")
    with tinker_server(
        tmp_path, tiny, "--token-file", str(key), "--name", "Qwen/Qwen3-8B", "--queue-mb", "0.02",
        "--request-s", "2", "--adapters", "1", "--host", "127.0.0.1", "--set", "trainer.lora.rank=3",
        key="tml-some-long-word-of-a-key",
    ) as server:  # fmt: skip
        for headers in (
            {"x-api-key": "tml-another"},
            {"x-api-key": ""},
            {"x-api-key": "", "authorization": "Bearer x"},
        ):
            status, answer = server.call("POST", "create_session", {}, **headers)
            assert status == 401 and "TINKER_API_KEY" in answer["error"]
        models = server.call("GET", "get_server_capabilities")[1]["supported_models"]
        assert [one["model_name"] for one in models] == ["Qwen/Qwen3-8B", tiny]
        one, other = Client(server, base_model="Qwen/Qwen3-8B"), Client(server)
        first = one.forward(1)
        assert other.forward(1) == first  # --adapters 1: it took the place of the first, which comes back
        assert one.forward(2) == first
        # requests that wait for one that does not come fill the queue; the one that is missing has room
        statuses = [one.send(seq)[0] for seq in range(4, 400)]
        assert statuses[0] == 200 and statuses[-1] == 429
        one.done(one.send(3))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--trainer", "toy", "--engine", "toy"), "trainer 'toy' cannot train adapters call by call"),
     (("--engine", "toy"), "engine 'toy' cannot sample from named adapters")],
)  # fmt: skip
def test_components_without_adapters_are_refused_by_name(
    tmp_path: Path, tiny: str, arguments: tuple[str, ...], text: str
) -> None:
    server = TinkerServer(tmp_path, tiny, arguments)
    server.start(wait=False)
    assert server.process is not None and server.process.wait(120) == 2
    assert text in server.said()


def test_few_connections_and_slow_requests_are_turned_away(tmp_path: Path, tiny: str) -> None:
    with tinker_server(tmp_path, tiny, "--connections", "8", "--request-s", "1") as server:
        slow = Connection(server.port, 60)
        slow.send(request("POST", "/api/v1/telemetry", b"x" * 100)[:-50])
        assert slow.receive().status == 408
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        assert server.call("GET", "healthz")[0] == 200  # the oldest made way
        assert "--connections" in server.said()
        for one in (slow, *silent):
            one.close()
