"""`atropos serve` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atropos_core.codec import encode_bytes
from atropos_core.errors import ApiError, ConfigError
from atropos_trajectory_api.legacy.batches import WATCHED_BYTES
from atropos_trajectory_api.legacy.retries import SLOT_S
from atropos_trajectory_api.server.serving import bind
from atropos_trajectory_client.client import Api, SessionSpec, TrainerSession, Worker, WorkerSpec
from plugins.trajectory_api.tests.running import ENVIRONMENT, REGISTER, group, tags
from plugins.trajectory_api.tests.sent_groups import SAMPLING, drawn, group_of
from tests.disks import mounted
from tests.native_payloads import native_group, native_request, open_session, register_native
from tests.old_payloads import old_group
from tests.raw_http import Connection


class Served:
    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "atropos_core", "serve", "--dir", str(folder / "api"), *flags],
                stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def url(self) -> str:
        until = time.monotonic() + 60
        while not (found := re.search(r"listening on (\S+)", self.text)):
            assert self.process.poll() is None and time.monotonic() < until, self.text
            time.sleep(0.02)
        return found.group(1)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*flags: str) -> Served:
        started.append(Served(tmp_path, *flags))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def register(url: str) -> None:
    httpx.post(f"{url}/register", json=REGISTER)
    httpx.get(f"{url}/batch")
    httpx.post(f"{url}/register-env", json=ENVIRONMENT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_answers_who_waits(number: int, served: Callable[..., Served]) -> None:
    server = served("--port", "0", "--hub-sequences", "4")
    url = server.url
    register(url)
    httpx.post(f"{url}/scored_data", json=group(env_id=0))
    answers: list[httpx.Response] = []
    held = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/scored_data", json=group(env_id=0), timeout=30))
    )
    held.start()
    while not re.search(r"^atropos_hub_puts_waiting 1$", httpx.get(f"{url}/metrics").text, re.MULTILINE):
        time.sleep(0.05)
    server.process.send_signal(number)
    assert server.process.wait(60) == 0
    held.join(60)
    assert answers[0].status_code == 503 and "retry-after" in answers[0].headers
    assert "is in the journal" in server.text and "Traceback" not in server.text


@pytest.mark.parametrize("call", ["draws", "lease", "put"])
def test_a_signal_ends_a_long_poll_at_once(call: str, served: Callable[..., Served]) -> None:
    server = served("--port", "0", "--hub-sequences", "4")
    port = int(server.url.rsplit(":", 1)[1])
    end = Connection(port)
    worker, number = register_native(end, "words"), open_session(end, 1, 4)
    frame = encode_bytes(native_group(old_group(4, 3, 1), "words"))
    put = native_request(
        "/v1/groups", {"groups": [{"key": "", "worker": worker, "frame": frame}] * 2, "wait_s": 60.0}
    )  # there is room for one
    draws = native_request(f"/v1/workers/{worker}/draws", {"n": 1, "wait_s": 60.0})
    lease = native_request(f"/v1/sessions/{number}/lease", {"groups": 1, "version": 0, "wait_s": 60.0})
    end.send({"draws": draws, "lease": lease, "put": put}[call])
    end.until_read()
    time.sleep(0.5)
    started = time.monotonic()
    server.process.terminate()
    assert end.receive().status == {"draws": 200, "lease": 200, "put": 503}[call]
    assert server.process.wait(30) == 0
    assert time.monotonic() - started < 9, "it would wait for ten seconds for what does not end"
    assert "Traceback" not in server.text


def test_a_port_that_is_taken_is_named_and_its_owner_left_alone(served: Callable[..., Served], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        server = served("--port", str(port))
        assert server.process.wait(30) == 2
        assert f"cannot listen on port {port} of 127.0.0.1" in server.text and "Traceback" not in server.text
        assert not (tmp_path / "api").exists()
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_directory_that_another_server_has_is_refused(served: Callable[..., Served]) -> None:
    first = served("--port", "0")
    assert httpx.get(f"{first.url}/health").status_code == 200
    second = served("--port", "0")
    assert second.process.wait(30) != 0
    assert "api" in second.text and "Traceback" not in second.text, second.text
    assert httpx.get(f"{first.url}/health").status_code == 200


def test_flags_that_cannot_be_are_named(served: Callable[..., Served]) -> None:
    for flags, said in (
        (("--host", "0.0.0.0"), "--token-file"),
        (("--sync", "perhaps"), "--sync"),
        (("--hub-mb", "-1"), "--hub-mb"),
        (("--tls-cert", "x.pem"), "--tls-key"),
        (("--host", "no.such.host.invalid", "--token-file", "nothing"), "token file"),
    ):
        server = served("--port", "0", *flags)
        assert server.process.wait(30) == 2
        assert said in server.text and "Traceback" not in server.text, server.text


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that no authority signed, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("the command `openssl`, which makes a certificate, is not installed")
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_over_tls_an_old_trainer_gets_each_batch_once_short_or_long(
    served: Callable[..., Served], pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    tls = ("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    server, trusting = served(*tls), ssl.create_default_context(cafile=str(cert))
    plain = {"accept-encoding": "identity"}
    with httpx.Client(base_url=server.url, verify=trusting, headers=plain, timeout=30) as client:
        assert server.url.startswith("https://")
        client.post("/register", json=REGISTER)
        client.get("/batch")
        client.post("/register-env", json={**ENVIRONMENT, "max_token_length": 50_000})
        for tag, length in ((1, 3), (2, 40_000), (3, 3)):
            sent = client.post("/scored_data", json=group(tag=tag, length=length, env_id=0))
            assert sent.json() == {"status": "received"}
        batches = [client.get("/batch") for _ in range(3)]
        assert [tags(batch.json()) for batch in batches] == [[1], [2], [3]]
        assert len(batches[0].content) < WATCHED_BYTES < len(batches[1].content)
        assert batches[1].json()["batch"][0]["tokens"] == group(tag=2, length=40_000)["tokens"]
        until = time.monotonic() + 60
        status = {"accept": "application/json"}
        while client.get("/v1/status", headers=status).json()["hub"]["committed"] < 3:  # a moment after the answer
            assert time.monotonic() < until
            time.sleep(0.05)
    server.process.kill()
    server.process.wait()
    again = served(*tls)
    assert httpx.get(f"{again.url}/status", verify=trusting).json() == {"current_step": 3, "queue_size": 0}
    assert again.process.poll() is None and "Traceback" not in server.text + again.text


@pytest.mark.parametrize("share", [0.1, 0.95])
def test_over_tls_a_batch_whose_client_went_away_before_it_had_all_is_served_again(
    share: float, served: Callable[..., Served], pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    server = served("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=server.url, verify=trusting, timeout=30) as client:
        client.post("/register", json=REGISTER)
        client.get("/batch")
        client.post("/register-env", json={**ENVIRONMENT, "max_token_length": 50_000})
        client.post("/scored_data", json=group(tag=1, length=40_000, env_id=0))
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)  # what it does not read stays at the server
        plain.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        with trusting.wrap_socket(plain, server_hostname="127.0.0.1") as gone:
            gone.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            read = b""
            while b"\r\n\r\n" not in read or len(read) < share * int(
                read.lower().split(b"content-length: ")[1].split()[0]
            ):
                read += gone.recv(1 << 14)
        until = time.monotonic() + 60
        while not (got := client.get("/batch").json())["batch"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert tags(got) == [1]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_handshakes_that_do_not_end_make_way_for_one_that_does(
    said: bytes, served: Callable[..., Served], pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    tls = ("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    server, trusting = served(*tls, "--connections", "8"), ssl.create_default_context(cafile=str(cert))
    with contextlib.ExitStack() as stack:
        port = int(server.url.rsplit(":", 1)[1])
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(60)]
        for one in held:
            one.sendall(said)
        client = stack.enter_context(httpx.Client(base_url=server.url, verify=trusting, timeout=20))
        assert client.get("/status").status_code == 200
        ended = 0
        for one in held[:-8]:  # the oldest went first
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
            ended += 1
        assert ended == 52
        assert client.get("/status").status_code == 200  # over the connection that it has
        assert 'atropos_refused_connections_total{cause="made_way_silent"} ' in client.get("/metrics").text


def test_handshakes_that_fail_free_their_connections(served: Callable[..., Served], pem: tuple[Path, Path]) -> None:
    cert, key = pem
    server = served("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key), "--connections", "8")
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), 30) as plain:
            plain.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while plain.recv(1 << 10):  # what TLS has to say of that, to its end
                    pass
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(cert)), timeout=20) as client:
        assert client.get("/status").status_code == 200
        refused = client.get("/metrics").text
    assert 'cause="made_way' not in refused and 'cause="full"' not in refused, "there was room for each"


def test_a_handshake_that_does_not_end_is_ended_as_a_head_is(
    served: Callable[..., Served], pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    server = served("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key), "--request-s", "1")
    trusting = ssl.create_default_context(cafile=str(cert))
    with (
        socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), 20) as silent,
        contextlib.suppress(ConnectionError),
    ):
        assert silent.recv(1) == b""  # within the 20 s that it waits here, where asyncio would take 60
    with httpx.Client(base_url=server.url, verify=trusting, timeout=20) as client:
        assert 'atropos_refused_connections_total{cause="handshake"} 1' in client.get("/metrics").text
    server.process.terminate()
    assert server.process.wait(60) == 0 and "Traceback" not in server.text, server.text


async def test_over_tls_workers_and_trainers_want_the_certificate_to_be_trusted(
    served: Callable[..., Served], pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = pem
    url = served("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)).url
    doubting = Api(url)
    with pytest.raises(ApiError, match="shows a certificate that this machine does not trust") as caught:
        await doubting.about(deadline_s=60)
    assert "SSL_CERT_FILE" in str(caught.value)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    api, group = Api(url), group_of(drawn(0), 60_000)
    trainer = await TrainerSession.open(api, SessionSpec("run", 4, 1, SAMPLING, 1))
    worker = await Worker.register(api, WorkerSpec("one", "words", 1))
    await trainer.offer_draws([drawn(0)])
    assert (await worker.draws(1)).draws == (drawn(0),)
    assert await worker.put(group, deadline_s=30) == 0
    [(number, got)] = (await trainer.lease(1, 0, 10.0)).entries
    for one, other in zip(got.episodes, group.episodes, strict=True):
        assert one.rollouts[0].tokens.tolist() == other.rollouts[0].tokens.tolist()
    assert await trainer.commit([number]) == 1
    for end in (worker, trainer, api, doubting):
        await end.close()


def test_a_certificate_that_cannot_be_used_is_named_before_anything_is_begun(
    served: Callable[..., Served], pem: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = pem
    (tmp_path / "empty.pem").touch()
    for given, said in (
        ((tmp_path / "none.pem", key), "No such file or directory: '" + str(tmp_path / "none.pem")),
        ((cert, tmp_path / "none.pem"), "No such file or directory: '" + str(tmp_path / "none.pem")),
        ((tmp_path / "empty.pem", key), "PEM"),
        ((cert, cert), "PEM"),
    ):
        server = served("--port", "0", "--tls-cert", str(given[0]), "--tls-key", str(given[1]))
        assert server.process.wait(30) == 2, server.text
        for words in (f"--tls-cert {given[0]}", f"--tls-key {given[1]}", said):
            assert words in " ".join(server.text.split()), server.text
        assert "Traceback" not in server.text and "listening" not in server.text
        assert not (tmp_path / "api").exists()


def test_after_a_kill_what_was_acknowledged_is_there_and_a_repeated_body_counts_once(
    served: Callable[..., Served],
) -> None:
    server = served("--port", "0")
    url = server.url
    register(url)
    first, last = (json.dumps(group(tag=tag, env_id=0)).encode() for tag in (1, 2))
    for body in (first, last):
        assert httpx.post(f"{url}/scored_data", content=body).status_code == 200
    server.process.kill()
    server.process.wait()
    time.sleep(2 * SLOT_S)  # a server may be back late
    again = served("--port", "0")
    url = again.url
    assert "2 groups wait" in again.text
    assert httpx.post(f"{url}/scored_data", content=last).json() == {"status": "received"}
    assert httpx.get(f"{url}/status").json() == {"current_step": 0, "queue_size": 2}
    assert [tags(httpx.get(f"{url}/batch").json()) for _ in range(3)] == [[1], [2], []]
    again.process.kill()
    again.process.wait()
    third = served("--port", "0")
    assert httpx.get(f"{third.url}/status").json() == {"current_step": 2, "queue_size": 0}, (
        "a batch is settled for good"
    )
    assert httpx.get(f"{third.url}/status-env?env_id=0").json()["env_weight"] == 1.0


def test_the_token_is_in_no_line_that_it_prints(served: Callable[..., Served], tmp_path: Path) -> None:
    token = "a-token-of-this-test-0123456789"
    path = tmp_path / "token"
    path.write_text(token)
    path.chmod(0o600)
    server = served("--port", "0", "--token-file", str(path))
    url = server.url
    assert httpx.get(f"{url}/status").status_code == 401
    assert httpx.get(f"{url}/status", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert httpx.get(f"{url}/status?token={token}", headers={"authorization": "Bearer wrong"}).status_code == 401
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert token not in server.text


def test_a_connection_that_idles_for_a_while_is_there_when_its_client_sends_again(
    served: Callable[..., Served],
) -> None:
    server = served("--port", "0")
    with httpx.Client(base_url=server.url, limits=httpx.Limits(keepalive_expiry=60)) as client:
        first = client.get("/health").extensions["network_stream"]
        time.sleep(6)
        assert client.get("/health").extensions["network_stream"] is first


def test_where_every_request_is_being_answered_newcomers_get_503_with_retry_after(
    served: Callable[..., Served],
) -> None:
    server = served("--port", "0", "--connections", "2")
    port = int(server.url.rsplit(":", 1)[1])
    waiting = [Connection(port) for _ in range(2)]
    for end in waiting:
        worker = register_native(end, "one")
        end.send(native_request(f"/v1/workers/{worker}/draws", {"n": 1, "playing": [], "wait_s": 60.0}))
        end.until_read()
    for path, key in (("/status", "detail"), ("/v1/status", "error")):
        answer = httpx.get(server.url + path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert key in answer.json() and "Try again in a moment." in answer.text
    for end in waiting:
        end.close()
    until = time.monotonic() + 60
    while httpx.get(f"{server.url}/status").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert server.text.count("--connections`)") == 1


def test_the_oldest_silent_connections_make_way_for_new_ones(served: Callable[..., Served]) -> None:
    server = served("--port", "0", "--connections", "3")
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    silent = [socket.create_connection(address, 10) for _ in range(10)]
    try:
        for one in silent[:7]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        for one in silent[7:]:
            one.settimeout(0.05)
            with pytest.raises(TimeoutError):
                one.recv(1)
        assert httpx.get(f"{server.url}/status").status_code == 200
    finally:
        for one in silent:
            one.close()
    assert server.text.count("made way") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "api", "2m") as where:
        yield where


def test_a_full_disk_is_reported_once_and_when_it_is_over(small_disk: Path, served: Callable[..., Served]) -> None:
    server = served("--port", "0")
    url = server.url
    register(url)
    assert httpx.get(f"{url}/ready").status_code == 200
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(4_000_000))
    body = group(length=3000, env_id=0)
    for _ in range(3):
        assert httpx.post(f"{url}/scored_data", json=body).status_code == 503
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 503
    assert "No space left on device" in ready.json()["why"]
    assert server.text.count("from now on groups are refused") == 1
    (small_disk / "ballast").unlink()
    until = time.monotonic() + 60
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert server.text.count("has space again: groups are accepted") == 1
    assert httpx.post(f"{url}/scored_data", json=body).json() == {"status": "received"}
    server.process.terminate()
    assert server.process.wait(60) == 0


def test_a_server_that_ends_answers_who_waits_for_room_or_for_the_rest_of_a_body(served: Callable[..., Served]) -> None:
    """Without a traceback for each, and not after the time it grants to answers."""
    server = served("--port", "0", "--in-flight-mb", "1", "--hold-s", "60", "--request-s", "60")
    port = int(server.url.rsplit(":", 1)[1])
    size = 2_000_000
    head = f"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n".encode()
    ends = [Connection(port, 30) for _ in range(6)]
    for end in ends[:5]:  # the first goes beyond the bound and never ends, the others find no room
        end.socket.settimeout(1)
        with contextlib.suppress(TimeoutError):
            end.send(head + b" " * (size - 1))
        end.socket.settimeout(30)
    ends[5].send(head[:-2] + b"x: y\r\n\r\n" + b" ")
    ends[5].until_read()
    time.sleep(1.0)
    began = time.monotonic()
    server.process.terminate()
    for end in ends:
        answer = end.receive()
        assert (
            answer.status == 503
            and b"Send it again: it may be back in a moment." in answer.body
            and b"\r\nretry-after: 5" in answer.head
        )
    assert server.process.wait(60) == 0 and time.monotonic() - began < 8
    assert "Traceback" not in server.text and "Exception" not in server.text, server.text
    assert len(server.text.splitlines()) < 10, server.text


def test_an_address_of_another_machine_is_refused_with_the_option_that_sets_it():
    with pytest.raises(ConfigError, match=r"cannot listen on port 0 of 192\.0\.2\.1(.|\n)*of this machine with --host"):
        bind("192.0.2.1", 0)
