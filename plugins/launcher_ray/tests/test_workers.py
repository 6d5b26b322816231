"""How many workers there should be, and what is refused of them before any starts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from atropos_launcher_ray.config import RayOptions, Workers
from atropos_launcher_ray.scaling import Scale
from atropos_launcher_ray.workers import command


def look(scale: Scale, share: float, *, all_run: bool = True, steps: int = 3) -> float | None:
    """So many steps of two seconds, of which the loop waits this share: what changed by them."""
    said = [scale.step_ended(2 * share, 2.0, all_run=all_run) for _ in range(steps)]
    return next((one for one in said if one is not None), None)


def test_the_number_follows_the_waits_from_the_least_to_the_most_and_back() -> None:
    scale = Scale(1, 8, 6.0)
    numbers = []
    for share in [0.9] * 6 + [0.0] * 6:
        look(scale, share)
        numbers.append(scale.wanted)
    assert numbers == [2, 3, 5, 8, 8, 8, 5, 3, 2, 1, 1, 1]


def test_between_the_bounds_and_on_little_evidence_it_stays() -> None:
    scale = Scale(2, 8, 6.0)
    assert look(scale, 0.2) is None and scale.wanted == 2, "neither much nor little"
    assert look(scale, 0.9, steps=2) is None, "two steps are no evidence"
    assert Scale(2, 8, 60.0).step_ended(9.0, 10.0, all_run=True) is None
    slow = Scale(2, 8, 60.0)
    assert look(slow, 0.9, steps=29) is None and look(slow, 0.9, steps=1) == pytest.approx(0.9), (
        "look_s are not over before"
    )


def test_steps_while_workers_start_do_not_count() -> None:
    scale = Scale(1, 8, 6.0)
    assert look(scale, 0.9, all_run=False, steps=50) is None
    look(scale, 0.9, steps=2)
    look(scale, 0.9, all_run=False, steps=1)
    assert look(scale, 0.9, steps=2) is None, "counting begins anew behind them"
    assert look(scale, 0.9, steps=1) == pytest.approx(0.9)


def test_where_fewer_were_too_few_it_waits_twice_as_long_before_it_tries_again() -> None:
    """A loop that waits with three workers, and not with four: without this the number would change with every look."""
    scale, changes = Scale(1, 8, 6.0), []
    for number in range(400):
        before = scale.wanted
        if look(scale, 0.5 if scale.wanted < 4 else 0.0) is not None:
            changes.append((number, before, scale.wanted))
    shrinking = [number for number, before, after in changes if after < before]
    gaps = [after - before for before, after in pairwise(shrinking)]
    assert len(shrinking) > 5 and gaps == sorted(gaps), changes
    assert gaps[-1] >= 32, "at the end one try in more than thirty looks"


def test_what_a_worker_is_started_with() -> None:
    several = Workers(count=4, concurrency=7, cpus=2, gpus=0.5, memory_gb=3, other={"disk": 1})
    assert several.bundle() == {"CPU": 2.0, "GPU": 0.5, "memory": 3e9, "disk": 1.0}
    assert command("gsm8k", several, "http://h:1", Path("/run")) == [
        "env", "--api", "http://h:1", "--token-file", "/run/api/token", "--file", "/run/config.toml", "--concurrency", "7", "--", "gsm8k"
    ]  # fmt: skip


def test_how_many_there_are_at_the_start() -> None:
    assert Workers(count=64).first == 64
    assert Workers(count=64, least=2, cpus=8).first == 2
    with pytest.raises(ValidationError, match="least is 8, but count only 8"):
        Workers(count=8, least=8)


def test_look_s_without_bounds_is_refused() -> None:
    assert RayOptions.model_validate({"workers": {"a": {"count": 8, "least": 1}}, "look_s": 5}).look_s == 5
    with pytest.raises(ValidationError, match="look_s has no effect because no workers set `least`"):
        RayOptions.model_validate({"workers": {"a": {"count": 8}}, "look_s": 5})
