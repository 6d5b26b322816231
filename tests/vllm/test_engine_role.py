"""`atropos engine --engine vllm --bridge lora`: a vLLM on another machine, which runs send adapters, one run after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atropos_trajectory_client.remote_engine import RemoteEngine
from tests.conftest import metrics_of
from tests.e2e.roles import Role

pytestmark = pytest.mark.timeout(400)


def test_adapters_reach_a_vllm_elsewhere_and_the_next_run_begins_from_its_own_start(tmp_path: Path) -> None:
    rank = ("--bridge", "lora", "--set", "trainer.lora.rank=24")  # above what vLLM takes unless it is configured
    engine = Role(tmp_path, "engine", ["engine", "--port", "0", "--engine", "vllm", *rank])
    try:
        url = engine.says(r"(http://[\w.:]+)", 200)

        async def leave_paused() -> None:
            remote = RemoteEngine(url)
            await remote.pause()
            await remote.close()

        for name, steps in (("first", 2), ("second", 1)):
            run = Role(tmp_path, name, [
                "run", "--env", "gsm8k", "--dir", name, "--steps", str(steps), "--engine", "remote", "--set", f"engine.url={url}",
                *rank, "--set", "trainer.lora.learning_rate=3e-3", "--set", "evaluation.problems=8",
                "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
            ])  # fmt: skip
            try:
                assert run.ends(120) == 0, run.text + engine.text
            finally:
                run.kill()
            lines = metrics_of(tmp_path / name)
            assert lines[-1]["step"] == steps
            assert max(line["bridge/bytes_copied"] for line in lines) > 0
            found = [
                line["alignment/max_abs_logprob_diff"] for line in lines if "alignment/max_abs_logprob_diff" in line
            ]
            print(f"{name}: at most {max(found):.1e} nats off at {len(found)} steps")
            assert max(found) <= 1e-4
            asyncio.run(leave_paused())  # as a run that was killed while it sent weights
        start, end, again = (
            (tmp_path / name / f"rollouts/eval-{step:06d}.jsonl").read_bytes()
            for name, step in (("first", 0), ("first", 2), ("second", 0))
        )
        assert again == start != end, "the same replies at step 0, and others once it was trained"
        assert engine.terminate() == 0
    finally:
        engine.kill()
