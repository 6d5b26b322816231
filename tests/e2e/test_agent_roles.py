"""Agents in another process than the trainer, over the network API of `atropos serve`: workers start them, sessions sample from the
trainer's engines."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.roles import Scene, scene

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "plugins/agent_api/atropos_agent_api/examples/calculator.toml"
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny/config.json"
CONTEXT = json.loads(TINY.read_text())["max_position_embeddings"]
FILE = ("--file", str(EXAMPLE))


def test_a_worker_runs_agents_for_a_trainer_elsewhere(tmp_path: Path) -> None:
    with scene(tmp_path) as place:
        small = ("training.groups_per_step=2", "training.group_size=4", "evaluation.problems=0")
        trainer = place.train("--model", "tiny", "--steps", "3", *(word for one in small for word in ("--set", one)))
        trainer.says("waiting for a worker", 120)
        told = httpx.get(f"{place.url}/info", timeout=10).json()
        assert told == {"batch_size": 8, "max_token_len": CONTEXT}, "what old environments ask"
        worker = place.worker(1, "agent", *FILE)
        assert trainer.ends(240) == 0, place.all_text
        lines = place.metrics
        assert len(lines) == 3
        assert max(line["agent/calls"] for line in lines) > 1.0, "the calculator was used"
        assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
        assert worker.terminate() == 0
        assert int(worker.says(r"(\d+) groups sent")) >= 6


def test_a_worker_refuses_a_baseline_whose_answers_nothing_can_train(tmp_path: Path) -> None:
    with scene(tmp_path) as place:
        baseline = 'environment.agent.baseline={url="http://127.0.0.1:9/v1", model="theirs"}'
        worker = place.worker(1, "agent", *FILE, "--model", "tiny", "--set", baseline)
        assert worker.ends(60) == 2
        assert "a baseline cannot be trained" in worker.text


def learned_by_workers(scene: Scene, steps: int) -> tuple[float, float]:
    """The mean reward of the first step of a trainer with two workers, and that of its last three. The soak looks at the gain."""
    changes = ("training.groups_per_step=8", "evaluation.problems=0")
    trainer = scene.train("--model", "tiny", "--steps", str(steps), *(w for c in changes for w in ("--set", c)))
    for number in (1, 2):
        scene.worker(number, "agent", *FILE)
    assert trainer.ends(100 + 65 * steps) == 0, scene.all_text
    rewards = [line["reward/mean"] for line in scene.metrics]
    return rewards[0], sum(rewards[-3:]) / len(rewards[-3:])
