"""The guard and the engine's part of it, with a server that cannot start: it gets a flag that vLLM does not know.

If vLLM is not installed, it fails before it reads the flag."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from atropos_engine_vllm import guard
from atropos_engine_vllm.entry import enter
from atropos_engine_vllm.managed_server import ManagedServer
from atropos_engine_vllm.orphan import GUARD_VARIABLE


async def test_a_server_that_ends_takes_everything_along_and_its_log_says_why(
    options: Any, context: Any, tmp_path: Path
) -> None:
    server = ManagedServer.start(options(extra_args=["--no-such-flag"]), context(), "float32")
    scratch = server._scratch
    assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
    try:
        await asyncio.wait_for(server.ended.wait(), 100)
        assert not guard.members(server.pid)
        error = str(server.explain())
        assert "the server" in error or "vLLM's server" in error
        assert "ended with exit code" in error and str(server.log) in error
        assert "No module named" in error or "no-such-flag" in error
        assert not scratch.exists()
    finally:
        await server.close()
        await server.close()


async def test_a_server_is_ended_while_it_starts(options: Any, context: Any) -> None:
    server = ManagedServer.start(options(), context(), "float32")
    scratch = server._scratch
    await server.close()
    assert server.ended.is_set() or not guard.members(server.pid)
    assert not guard.members(server.pid) and not scratch.exists()


def test_members_are_distinguished_by_what_they_run() -> None:
    core = guard.Member(1, 2, "VLLM::EngineCore\0\0")
    assert core.is_vllm and core.name == "engine core" and not core.is_tracker
    server = guard.Member(1, 2, "python\0-m\0atropos_engine_vllm.server_main\0005")
    assert server.is_vllm and server.name == "server"
    tracker = guard.Member(1, 2, "python\0-c\0from multiprocessing.resource_tracker import main;main(3)")
    assert tracker.is_tracker and not tracker.is_vllm
    assert not guard.Member(1, 2, "gcc\0x.c").is_vllm
    ours = guard.members(os.getpgid(0))
    assert os.getpid() not in {member.pid for member in ours}


def test_shared_memory_is_removed_only_where_it_is_what_was_seen(tmp_path: Path) -> None:
    seen, other = Path("/dev/shm", f"atropos-test-{os.getpid()}"), Path("/dev/shm", f"atropos-test-{os.getpid()}-b")
    for path in (seen, other):
        path.write_bytes(b"x")
    try:
        nobody = 2**22 + 1  # above the largest pid
        guard.end_group(nobody, {str(seen): seen.stat().st_ino, str(other): other.stat().st_ino + 1}, tmp_path / "none")
        assert not seen.exists()
        assert other.exists(), "the name is another's by now"
    finally:
        other.unlink()


def test_the_entry_point_into_vllm_does_nothing_unless_a_server_of_ours_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    monkeypatch.delenv(GUARD_VARIABLE, raising=False)
    before = threading.active_count()
    enter()
    assert threading.active_count() == before
