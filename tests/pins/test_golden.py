"""A run of today comes to what the recorded one came to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pins import golden

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return golden.run(tmp_path_factory.mktemp("golden") / "run")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(golden.RECORDED.read_text())
    return made


@pytest.mark.parametrize("what", ["metrics", "sampled in step 1", "rollouts"])
def test_names_of_metrics_and_what_was_sampled_and_scored_are_the_same(now, recorded, what):
    assert now[what] == recorded[what]


def test_the_weights_are_the_same_within_rounding(now, recorded):
    assert set(now["weights"]) == set(recorded["weights"])
    for name, numbers in recorded["weights"].items():
        assert now["weights"][name] == pytest.approx(numbers, rel=1e-4, abs=1e-4), name
