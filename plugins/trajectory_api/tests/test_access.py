from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from atropos_core.errors import ConfigError
from atropos_http_server.tokens import read_server_token
from atropos_trajectory_api.http.access import credential
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.serving import serve
from plugins.trajectory_api.tests.running import group, running

TOKEN = "correct-horse-battery-staple"


def test_every_route_but_health_wants_the_token(tmp_path: Path) -> None:
    with running(tmp_path, token=TOKEN.encode()) as server:
        for method, path in (
            *((method, path) for path, handlers in server.app.legacy.routes.items() for method in handlers),
            ("GET", "/v1"), ("POST", "/v1/groups"), ("GET", "/metrics"), ("GET", "/ready"), ("GET", "/openapi.json"),
            ("GET", "/docs"), ("GET", "/nowhere"),
        ):  # fmt: skip
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
                answer = server.client.request(method, path, headers=given)
                assert answer.status_code == 401 and "token" in answer.json()["error"]["message"], (method, path)
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/status", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_an_old_client_gives_the_token_as_the_password_in_its_url(tmp_path: Path) -> None:
    with running(tmp_path, token=TOKEN.encode()) as server:
        assert httpx.get(f"http://any:{TOKEN}@127.0.0.1:{server.port}/status").json()["queue_size"] == 0
        assert httpx.get(f"http://any:other@127.0.0.1:{server.port}/status").status_code == 401


def test_without_a_token_only_loopback_names_and_no_page_of_a_browser_are_heard(tmp_path: Path) -> None:
    with running(tmp_path, cors=("https://mine.example",)) as server:
        assert server.client.get("/status", headers={"host": "rebound.example"}).status_code == 403
        assert server.client.get("/status", headers={"host": "localhost:80"}).status_code == 200
        assert server.client.get("/status", headers={"host": "[::1]:80"}).status_code == 200
        assert server.client.get("/status", headers={"host": "[x"}).status_code == 400
        theirs = server.client.get("/reset_data", headers={"origin": "https://theirs.example"})
        assert theirs.status_code == 403 and "access-control-allow-origin" not in theirs.headers
        assert server.client.get("/status", headers={"origin": server.url}).status_code == 200, "its own page: /docs"
        mine = server.client.get("/status", headers={"origin": "https://mine.example"})
        assert mine.headers["access-control-allow-origin"] == "https://mine.example"


def test_a_preflight_of_a_named_origin_is_answered_without_a_token_and_no_other_is(tmp_path: Path) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with running(tmp_path, cors=("https://mine.example",), token=TOKEN.encode()) as server:
        mine = server.client.options("/scored_data", headers={"origin": "https://mine.example", **asked})
        assert mine.status_code == 200
        theirs = server.client.options("/scored_data", headers={"origin": "https://theirs.example", **asked})
        assert theirs.status_code == 403
        assert server.client.get("/status", headers={"origin": "https://mine.example"}).status_code == 401


def test_what_a_page_of_another_site_embeds_or_links_to_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, cors=("https://mine.example",)) as server:
        server.begin()
        assert server.post("/scored_data", group(env_id=0)).json() == {"status": "received"}
        for site in ("cross-site", "same-site"):
            for path in ("/reset_data", "/batch"):
                told = server.client.get(path, headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"})
                assert told.status_code == 403 and "another origin" in told.text
        assert server.client.get("/status").json()["queue_size"] == 1
        mine = {"origin": "https://mine.example", "sec-fetch-site": "cross-site"}
        assert server.client.get("/status", headers=mine).status_code == 200
        for site in ("same-origin", "none"):
            assert server.client.get("/status", headers={"sec-fetch-site": site}).status_code == 200


def test_who_shows_no_token_has_no_byte_of_a_body_read(tmp_path: Path) -> None:
    with running(tmp_path, token=TOKEN.encode(), cors=("https://mine.example",)) as server:
        asked = "Access-Control-Request-Method: POST\r\n"
        for first, more, expected in (
            ("POST /health", "", b"413"),
            ("GET /health", "Origin: https://mine.example\r\n", b"413"),
            ("OPTIONS /v1/groups", f"Origin: https://mine.example\r\n{asked}", b"413"),
            ("OPTIONS /v1/groups", f"Origin: http://127.0.0.1:{server.port}\r\n{asked}", b"401"),
            ("OPTIONS /v1/groups", "Origin: https://mine.example\r\n", b"401"),
        ):
            for size in ("Content-Length: 5000000", "Transfer-Encoding: chunked"):
                with socket.create_connection(("127.0.0.1", server.port), 10) as client:
                    head = f"{first} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{more}{size}\r\n\r\n"
                    client.sendall(head.encode())  # and never a body
                    assert client.recv(1000).split()[1] == expected, (first, more, size)
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_wants_a_token_file(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token"):
        serve(ServeOptions(directory=tmp_path / "api", host=host, port=0))
    assert not (tmp_path / "api").exists()


def test_a_token_file_that_others_can_read_or_that_is_short_is_refused_without_being_quoted(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as refused:
        read_server_token(path)
    assert TOKEN not in str(refused.value)
    path.chmod(0o600)
    assert read_server_token(path) == TOKEN.encode()
    for bad in ("short", "two words are no token here", "ünïcödé-ünïcödé-ünïcödé"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="one word") as refused:
            read_server_token(path)
        assert bad not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_server_token(tmp_path / "nothing")


def test_credentials_that_are_none() -> None:
    assert credential(b"") == credential(b"Basic !!!") == credential(b"Digest x") == b""
