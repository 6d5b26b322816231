"""The report of a fleet: its bottleneck, and the cost of failures."""

from __future__ import annotations

import random

import pytest

from atropos_simulation.figures import FailureFigures
from atropos_simulation.loop_model import ClusterSize
from atropos_simulation.report import conclusions, rows, useful_share
from plugins.simulation.tests.figures_of_one import figures

BUSY = {
    "run__groups_per_step": 16,
    "run__group_size": 4,
    "run__max_staleness": 2,
    "rollout__tokens": tuple(range(50, 150)),
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"trainer__step_s": 400.0}, "the trainer"),
        ({"hub__group_s": 30.0}, "the hub"),
        ({"worker__rollout_s": 9.0}, "the workers' processors"),
        ({"rollout__environment_s": 500.0}, "the environment"),
        ({"bridge__publish_s": 900.0}, "the bridge"),
        ({"engine__peak_tokens_per_s": 51.0}, "the engines' peak rate"),
        ({"loop__group_s": 30.0}, "the loop's own work"),
        ({"engine__peak_tokens_per_s": 1e9, "engine__single_tokens_per_s": 0.5}, "the time of one decode step"),
    ],
)
def test_the_part_that_takes_longest_is_what_saturates_first(changes, wanted):
    (row,) = rows(figures(**BUSY | {"trainer__token_s": 0.0} | changes), [ClusterSize(1)], rollouts=1000)
    assert row.verdict.startswith(f"1 engine: {wanted}")


def test_what_a_hub_takes_is_said_in_engines():
    given = figures(
        **BUSY
        | {"hub__group_s": 0.001, "engine__peak_tokens_per_s": 5000.0, "run__group_size": 8, "rollout__tokens": (1000,)}
    )
    made = list(rows(given, [ClusterSize(1)], rollouts=200))
    said = "\n".join(conclusions(given, made))
    assert "can take 1,000 groups/s" in said
    assert "which 1,600 engines sample at their peak" in said  # 1,000 groups/s x 8,000 tokens / 5,000 tokens/s


def test_the_batch_grows_with_the_engines_where_it_should():
    one, four = (next(rows(figures(**BUSY), [ClusterSize(n)], grows=True, rollouts=500)).outcome for n in (1, 4))
    per_step = [each.trajectories_per_s * each.step_s for each in (one, four)]
    assert per_step == pytest.approx([64, 256])


def test_failures_take_what_a_simulation_of_them_takes():
    """A random simulation of failures, event by event, compared with Daly's formula."""
    failing = FailureFigures(process_mtbf_s=9000.0, restart_s=200.0, checkpoint_every_s=600.0, checkpoint_s=30.0)
    source, clock, segments = random.Random(0), 0.0, 20_000
    for _ in range(segments):
        work, begun = 630.0, False
        while True:
            need = work + (200.0 if begun else 0.0)
            until = source.expovariate(3 / 9000.0)
            if until >= need:
                clock += need
                break
            clock += until
            begun = True
    assert useful_share(failing, 3) == pytest.approx(segments * 600.0 / clock, rel=0.02)
    assert useful_share(None, 3) == 1.0
