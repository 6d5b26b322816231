"""Each bridge trains the real model for two steps: the engine samples the second step from the weights of the first update."""

from __future__ import annotations

import math

import pytest

from tests.conftest import metrics_of
from tests.real.runs import Runs, largest_difference, plain

KEPT = ("ipc", "lora")  # other tests use these runs


@pytest.mark.timeout(500)
@pytest.mark.parametrize("bridge", ["lora", "ipc", "checkpoint", "delta", "nccl"])
def test_the_engine_samples_from_what_was_trained(runs: Runs, bridge: str) -> None:
    run = runs[bridge]
    lines = [line for line in metrics_of(run) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["alignment/max_abs_logprob_diff"] <= 1e-4 for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    before, after = (
        largest_difference(run, 2, plain(of)) for of in (runs.model, run / "checkpoints/step-000001/policy")
    )
    print(f"{bridge}: {after:.2g} nats from the trained weights, {before:.2g} from those before")
    assert after <= 1e-4
    assert before > 0.01, "the update changes the logprobs"
    if bridge not in KEPT:
        runs.remove(bridge)
