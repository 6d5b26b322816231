"""What changed travels to an engine elsewhere, over connections that are cut and between runs that are killed: bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import AtroposError, FitError
from atropos_testing.bridge_setup import Scene
from tests.conftest import metrics_of
from tests.e2e.roles import Role
from tests.scenes import differences, scenes, update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    "--set", "evaluation.problems=0", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "trainer.learning_rate=1e-4", "--set", "checkpoint.every=1", "--set", "sampling.max_tokens=32",
)  # fmt: skip


class Cutting:
    """A way to a server that breaks off after so many bytes, once; the next connection has the whole way."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.cut_after: int | None = None  # bytes on their way to the server
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(here, there, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(there, here, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, inward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if inward and self.cut_after is not None:
                    self.cut_after -= len(data)
                    if self.cut_after < 0:
                        self.cut_after = None
                        self.cuts += 1
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def started(folder: Path, bridge: str, name: str = "engine", *more: str) -> tuple[Role, int]:
    role = Role(
        folder,
        name,
        ["engine", "--model", "tiny", "--bridge", bridge, "--port", "0", "--set", "engine.threads=1", *more],
    )
    return role, int(role.says(r"http://127\.0\.0\.1:(\d+)", 180))


async def digests(scene: Scene) -> set[str]:
    ends = [scene.parts.trainer.endpoint, *(engine.endpoint for engine in scene.parts.engines)]
    return {(await end.call("digest"))[0] for end in ends}


def far(port: int) -> dict[str, Any]:
    return {"use": "remote", "url": f"http://127.0.0.1:{port}", "threads": None}


async def test_an_engine_elsewhere_is_bit_equal_also_where_its_connection_is_cut_and_the_trainer_killed(
    tmp_path: Path,
) -> None:
    role, port = started(tmp_path, "delta")
    way = Cutting(port)
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
    try:
        async with scenes(tmp_path / "first", "delta", {"learning_rate": 3e-3}) as open_scene:
            scene = await open_scene(engine=far(way.port))
            assert len(await digests(scene)) == 1
            for version in (1, 2, 3, 4):
                way.cut_after = 500_000 * version  # in the middle of an update of 2.5 MB
                await update(scene, version)
                assert way.cuts == version
                assert len(await digests(scene)) == 1
                assert np.max(await differences(scene)) <= 1e-4
            os.kill(scene.parts.trainer.behind.child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(AtroposError):
                await scene.parts.bridge.publish(5)
            with contextlib.suppress(AtroposError):
                await scene.parts.trainer.close()
        async with scenes(tmp_path / "second", "delta", {"learning_rate": 3e-3}) as open_scene:
            scene = await open_scene(engine=far(way.port))
            assert len(await digests(scene)) == 1  # from its own disk, without a full copy
            await update(scene, 1)
            assert len(await digests(scene)) == 1
    finally:
        way.close()
        role.kill()


async def test_an_engine_that_was_started_for_another_bridge_says_what_to_type(tmp_path: Path) -> None:
    role, port = started(tmp_path, "checkpoint")
    try:
        async with scenes(tmp_path, "delta", {}) as open_scene:
            with pytest.raises(FitError, match=r"(?s)its own code in the engine's process.*--bridge of the run"):
                await open_scene(engine=far(port))
    finally:
        role.kill()


async def test_a_run_trains_an_engine_elsewhere_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The commands of plugins/bridge_delta/README.md."""
    role, port = started(tmp_path, "delta")
    command = [
        "run", "--env", "gsm8k", "--bridge", "delta", "--engine", "remote", "--set", f"engine.url=http://127.0.0.1:{port}",
        "--dir", "run", "--steps", "24", *SMALL,
    ]  # fmt: skip
    first = Role(tmp_path, "run", command)
    try:
        async with asyncio.timeout(300):
            metrics = tmp_path / "run/metrics.jsonl"
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
                assert first.process.poll() is None, first.text
                await asyncio.sleep(0.02)
        first.kill()
        again = Role(tmp_path, "resumed", ["resume", "run"])
        assert await asyncio.to_thread(again.ends, 300) == 0, again.text
    finally:
        first.kill()
        role.kill()
    assert re.search(r"bridge +delta: what an update changed, compressed", first.text), first.text
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(rows[0]["step"], 25))
    assert all(row["alignment/max_abs_logprob_diff"] <= 1e-4 for row in rows if "alignment/max_abs_logprob_diff" in row)
    trained = [row for row in rows if row["step"] > 0 and "step/skipped" not in row]  # others publish nothing
    assert trained
    assert all(0 < row["bridge/bytes_copied"] < 0.95 * 3_064_320 for row in trained)
