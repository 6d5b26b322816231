"""Publish 200 times, killing either end between and during publications: each end that lives has whole weights, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import AtroposError
from tests.scenes import scenes, update

PUBLICATIONS = int(os.environ.get("DELTA_PUBLICATIONS", "200"))
KILL_EVERY = 20


async def digests(scene: Any) -> set[str]:
    ends = [scene.parts.trainer.endpoint, *(engine.endpoint for engine in scene.parts.engines)]
    return {(await end.call("digest"))[0] for end in ends}


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_engines_are_bit_equal_after_200_publications_with_kills_in_between(tmp_path: Path) -> None:
    draw, version, killed = random.Random(0), 0, []
    saved: Path | None = None
    while version < PUBLICATIONS:
        async with scenes(tmp_path, "delta", {"learning_rate": 1e-4, "dtype": "bfloat16"}) as open_scene:
            scene = await open_scene(engine={"dtype": "bfloat16"})
            bridge, trainer, [engine] = scene.parts.bridge, scene.parts.trainer, scene.parts.engines
            if saved is not None:  # as a run resumes
                async with bridge.writing(version):
                    await trainer.restore(saved)
                assert len(await digests(scene)) == 1
            until = min(version + KILL_EVERY, PUBLICATIONS)
            while version < until:
                await update(scene, version + 1)
                version += 1
                assert len(await digests(scene)) == 1
            saved = tmp_path / f"saved-{version}"
            saved.mkdir()
            await trainer.save(saved)
            if version == PUBLICATIONS:
                break
            whose = draw.choice(("engine", "trainer"))
            pid = (engine if whose == "engine" else trainer).behind.child.process.pid
            asyncio.get_running_loop().call_later(draw.uniform(0, 0.2), os.kill, pid, signal.SIGKILL)
            known: dict[str, str] = {}
            with pytest.raises(AtroposError):
                for further in range(version + 1, version + 1000):
                    known[(await engine.endpoint.call("state"))[0]] = (await engine.endpoint.call("digest"))[0]
                    await update(scene, further)
            killed.append(whose)
            if whose == "trainer":  # the engine is in the state before the publication, or in that after it
                state = (await engine.endpoint.call("state"))[0]
                assert state
                assert state not in known or known[state] == (await engine.endpoint.call("digest"))[0]
    assert version == PUBLICATIONS and len(killed) == PUBLICATIONS // KILL_EVERY - 1
