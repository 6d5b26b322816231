"""Names and addresses that mean this machine."""

from __future__ import annotations

from atropos_http_server.loopback import is_loopback, names_this_machine


def test_names_of_this_machine() -> None:
    assert all(
        is_loopback(name)
        for name in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "a.localhost", "LOCALHOST.")
    )
    assert not any(
        is_loopback(name) for name in ("0.0.0.0", "::", "localhost.example", "127.0.0.1.example", "", "10.0.0.1")
    )


def test_a_host_header_names_this_machine_with_or_without_a_port() -> None:
    assert all(names_this_machine(host) for host in ("localhost", "127.0.0.1:8020", "[::1]:8020", "a.localhost:1"))
    assert not any(names_this_machine(host) for host in ("10.0.0.1:8020", "localhost@example.com", "[::1", "", ":8020"))
