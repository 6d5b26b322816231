"""Agents in another process than the trainer, over the network API of `atropos serve`: workers start them, sessions sample from the
trainer's engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.roles import scene

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "plugins/agent_api/atropos_agent_api/examples/calculator.toml"
FILE = ("--file", str(EXAMPLE))


def test_a_worker_runs_agents_for_a_trainer_elsewhere(tmp_path: Path) -> None:
    with scene(tmp_path) as place:
        small = ("training.groups_per_step=2", "training.group_size=4", "evaluation.problems=0")
        trainer = place.train("--model", "tiny", "--steps", "3", *(word for one in small for word in ("--set", one)))
        worker = place.worker(1, "agent", *FILE)
        assert trainer.ends(240) == 0, place.all_text
        lines = place.metrics
        assert len(lines) == 3
        assert max(line["agent/calls"] for line in lines) > 1.0, "the calculator was used"
        assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
        assert worker.terminate() == 0
        assert int(worker.says(r"(\d+) groups sent")) >= 6


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_agents_of_workers_learn(tmp_path: Path) -> None:
    with scene(tmp_path) as place:
        changes = ("training.groups_per_step=8", "evaluation.problems=128")
        trainer = place.train(
            "--env", "gsm8k", "--model", "tiny", "--steps", "20", *(w for c in changes for w in ("--set", c))
        )
        for number in (1, 2):
            place.worker(number, "agent", *FILE)
        assert trainer.ends(1400) == 0, place.all_text
        lines = place.metrics
        last = sum(line["reward/mean"] for line in lines[-3:]) / 3
        assert last >= lines[0]["reward/mean"] + 0.20, [line.get("reward/mean") for line in lines]
