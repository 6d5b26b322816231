"""The ensemble with real members, some of which fail: what comes out, what it says, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import CheckpointError, ConfigError, DataError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Episode, Task
from atropos_reward_ensemble.config import EnsembleOptions
from atropos_reward_ensemble.ensemble import Ensemble
from atropos_reward_ensemble.plugin import build_ensemble
from atropos_testing import reward_contract
from atropos_testing.samples import make_episode, make_task
from tests.conftest import in_front, plant

Make = Callable[..., Ensemble]
SOURCE = Path(__file__).with_name("planted.py").read_text()


@pytest.fixture(scope="module", autouse=True)
def planted(tmp_path_factory: pytest.TempPathFactory):
    """The rewards of planted.py, installed for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("installed")
    plant(folder, "ensemble_planted", SOURCE)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", in_front(folder))
    yield
    patch.undo()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Any] = []

    def build(members: dict[str, Any], deterministic: bool = False, **options: Any) -> Any:
        context = RunContext(directory=tmp_path, model=TOY_MODEL, deterministic=deterministic)
        made.append(build_ensemble(EnsembleOptions(members=members, **options), context))
        return made[-1]

    yield build
    for one in made:
        await one.close()


def group(number: int = 0, *scores: float) -> tuple[Task, list[Episode]]:
    task = make_task(number=number)
    return task, [make_episode(task, f"reply {at}", score) for at, score in enumerate(scores or (0, 1, 0, 1))]


def says(*values: float, **more: Any) -> dict[str, Any]:
    return {"use": "planted", "values": values, **more}


GOOD = {"exact": {}, "numeric": {}, "environment": {}}
test_contract = reward_contract("ensemble", options={"members": GOOD})
test_contract_of_a_vote = reward_contract(
    "ensemble", options={"members": GOOD, "combine": "majority", "on_departure": "exclude", "metric": "nominal"}
)


# -- what comes out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"combine": "mean"}, [2 / 3, 0.5]),
        ({"combine": "median"}, [1.0, 0.5]),
        ({"combine": "weighted"}, [0.75, 0.5]),
        ({"combine": "minimum"}, [0.0, 0.0]),
        ({"combine": "majority"}, [1.0, 0.0]),
        ({"combine": "all_of"}, [0.0, 0.0]),
        ({"combine": "first_of"}, [1.0, 1.0]),
        ({"combine": "trimmed", "trim": 0.4}, [1.0, 0.5]),
    ],
)
async def test_each_way_to_combine(make, options, expected):
    members = {"a": says(1, 1), "b": says(1, 0.5), "c": says(0, 0)}
    if options["combine"] == "weighted":
        members["a"] = says(1, 1, weight=2.0)
        expected = [0.75, 0.625]
    given = await make(members, **options)(*group(0, 0, 1))
    assert given.dtype == np.float32
    np.testing.assert_allclose(given, expected, rtol=1e-6)


async def test_a_veto(make):
    ensemble = make({"a": says(1, 1), "b": says(0.5, 0.5), "c": says(0, 1, veto=True)}, combine="veto")
    np.testing.assert_allclose(await ensemble(*group(0, 0, 1)), [0, 0.75])


@pytest.mark.parametrize("does", ["raises", "waits", "nan", "shape", "cancelled"])
async def test_a_member_that_fails_is_a_missing_rating_and_no_zero(make, does, capfd):
    members = {"a": says(1, 1), "b": says(0.5, 0.5), "bad": {"use": "planted", "does": does, "deadline_s": 0.2}}
    ensemble = make(members, combine="mean")
    started = time.monotonic()
    given = await ensemble(*group(0, 1, 1))
    assert time.monotonic() - started < 30
    missing = 0.5 if does == "nan" else 1.0  # of the one that says NaN once, the other rating counts
    np.testing.assert_allclose(given, [0.75, 2.5 / 3 if does == "nan" else 0.75])
    metrics = ensemble.metrics()
    assert metrics["bad/missing"] == missing
    assert metrics["missing"] == pytest.approx(missing / 3)
    assert metrics["a/missing"] == 0
    assert (metrics["a/mean"], metrics["b/mean"]) == (1.0, 0.5) and ("bad/mean" in metrics) == (does == "nan")
    assert "'bad' gave no rating" in capfd.readouterr().err
    await ensemble(*group(0, 1, 1))
    assert "gave no rating" not in capfd.readouterr().err  # reported once
    assert ensemble.metrics()["bad/missing"] == missing


async def test_too_few_ratings_fail_the_group_with_names_and_causes(make):
    members = {"good": says(1, 1), "raising": {"use": "planted", "does": "raises"},
               "slow": {"use": "planted", "does": "waits", "deadline_s": 0.1}}  # fmt: skip
    ensemble = make(members)
    with pytest.raises(DataError) as caught:
        await ensemble(*group(0, 1, 1))
    text = str(caught.value)
    assert "1 where 2 of 3 are needed" in text
    assert "raising: KeyError: 'the rubric'" in text
    assert "slow: DeadlineExceeded" in text
    assert ensemble.metrics()["groups_short"] == 1
    assert ensemble.metrics()["groups_short"] == 0
    np.testing.assert_allclose(await make(members, least=1)(*group(0, 1, 1)), [1, 1])


async def test_members_are_called_at_once_and_a_first_of_one_after_the_other(make):
    slow = {"use": "planted", "does": "waits", "deadline_s": 2.0}
    started = time.monotonic()
    await make({**{f"slow {at}": slow for at in range(8)}, "d": says(1)}, least=1)(*group())
    assert time.monotonic() - started < 15  # and not the sixteen seconds of one after the other
    first = make({"a": says(0.25), "b": slow}, combine="first_of")
    assert (await first(*group(0, 1))).tolist() == [0.25]
    metrics = first.metrics()
    assert (metrics["a/calls"], metrics["b/calls"]) == (1, 0)
    patchy = make({"a": {"use": "planted", "does": "nan"}, "b": says(0.5)}, combine="first_of")
    assert (await patchy(*group(0, 1, 1))).tolist() == [0.5, 1.0]


async def test_the_end_of_a_call_is_no_members_failure(make):
    ensemble = make({"a": {"use": "planted", "does": "waits"}, "b": says(1)}, least=1)
    pending = asyncio.ensure_future(ensemble(*group()))
    await asyncio.sleep(0.05)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert ensemble.metrics()["missing"] == 0


# -- members in separate processes


APART = {"runs_in": "process", "deadline_s": 1.0}


@pytest.mark.slow
async def test_a_member_in_a_process_of_its_own_may_hang_or_die_and_comes_back(make, capfd):
    members = {"here": {"use": "pid"}, "there": {"use": "pid", **APART},
               "hangs": {"use": "forgetful", "does": "computes", **APART},
               "dies": {"use": "forgetful", "does": "dies", **APART}}  # fmt: skip
    ensemble = make(members, combine="mean", least=2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.05)

    ticking = asyncio.ensure_future(tick())
    first, second = [await ensemble(*group(number, 1)) for number in range(2)]
    ticking.cancel()
    assert ticks > 5  # the loop ran on while a member computed for twice its second: blocked, it would be one a call
    metrics = ensemble.metrics()
    assert metrics["hangs/missing"] == metrics["dies/missing"] == 1
    assert metrics["there/missing"] == 0
    assert first[0] != os.getpid()  # the mean of two processes
    assert first[0] == second[0]
    printed = capfd.readouterr().err
    assert re.search(r"'hangs' gave no rating: DeadlineExceeded", printed)
    assert re.search(r"'dies' gave no rating: RemoteError: .* ended with exit code 7", printed)


@pytest.mark.slow
async def test_a_member_that_keeps_what_it_learned_is_refused_in_a_process_of_its_own(make):
    ensemble = make({"here": {"use": "pid"}, "keeps": {"use": "planted", **APART}}, combine="mean", least=1)
    with pytest.raises(ConfigError, match="Planted keeps what it has learned with the run"):
        await ensemble(*group())


# -- agreement, departure, gate


def panel(hijacked: bool = True, **options: Any) -> dict[str, Any]:
    """Four raters that err in one of twenty, and one that may say 1 whatever it sees."""
    honest = {f"honest_{at}": {"use": "planted", "flip": 0.05, "seed": at} for at in range(4)}
    return {
        "members": honest | {"fifth": says(1.0) if hijacked else {"use": "planted", "flip": 0.05, "seed": 9}},
        **options,
    }


async def score_groups(ensemble: Ensemble, numbers: range) -> list[np.ndarray]:
    chance = np.random.default_rng(0)
    return [await ensemble(*group(number, *(chance.random(8) < 0.5).astype(float))) for number in numbers]


async def test_a_hijacked_member_is_flagged_and_nobody_else(make, capfd):
    ensemble = make(**panel())
    await score_groups(ensemble, range(40))
    metrics = ensemble.metrics()
    assert [name for name in metrics if name.endswith("/flagged") and metrics[name]] == ["fifth/flagged"]
    assert metrics["flagged"] == 1
    assert metrics["fifth/suspicion"] == 1
    assert metrics["fifth/agreement"] < 0.3 < 0.5 < metrics["honest_0/agreement"]
    assert 0 < metrics["alpha"] < 0.9
    assert "'fifth' departs from the others" in capfd.readouterr().err


async def test_honest_members_are_not_flagged(make, capfd):
    ensemble = make(**panel(hijacked=False))
    await score_groups(ensemble, range(100))
    metrics = ensemble.metrics()
    assert metrics["flagged"] == 0
    assert metrics["alpha"] > 0.7
    assert capfd.readouterr().err == ""


async def test_one_that_is_shut_out_is_not_called_and_does_not_count(make):
    ensemble = make(**panel(combine="mean", on_departure="exclude"))
    wrong_before = (await ensemble(*group(0, 0, 0, 0)))[0]
    await score_groups(ensemble, range(1, 60))
    calls = ensemble.metrics()["fifth/calls"]
    assert calls < 60
    task, episodes = group(1000, *[0.0] * 8)
    after = await ensemble(task, episodes)
    assert wrong_before >= 0.2
    assert after.min() == 0.0
    assert ensemble.metrics()["fifth/calls"] == calls


async def test_one_that_is_weighted_down_counts_less(make):
    ensemble = make(**panel(combine="mean", on_departure="downweight", downweight=0.0))
    await score_groups(ensemble, range(60))
    after = await ensemble(*group(1000, *[0.0] * 8))
    assert after.min() == 0.0


SUDDEN = {"on_departure": "exclude", "tolerance": 1.2, "horizon": 10, "false_alarm": 0.5}


async def test_the_last_members_are_never_shut_out(make, capfd):
    one = make({"a": {"use": "planted"}, "b": says(1.0), "c": {"use": "planted"}}, **SUDDEN)
    await score_groups(one, range(80))
    assert one.state()["out"] == [False, True, False]
    assert "is still called" not in capfd.readouterr().err
    two = make({"a": {"use": "planted"}, "b": says(1.0), "c": {"use": "planted"}, "d": says(0.0)}, **SUDDEN)
    await score_groups(two, range(80))
    assert two.metrics()["flagged"] == 2
    assert sum(two.state()["out"]) == 1
    assert "is still called: too few others" in capfd.readouterr().err


async def test_a_veto_is_not_lost_with_its_member(make, capfd):
    members = {"a": {"use": "planted"}, "b": says(1.0, veto=True), "c": {"use": "planted"}}
    ensemble = make(members, combine="veto", **SUDDEN)
    given = await score_groups(ensemble, range(80))
    assert ensemble.state()["out"] == [False] * 3
    assert ensemble.metrics()["b/flagged"] == 1
    assert len(given) == 80
    assert "its veto would be lost" in capfd.readouterr().err


async def test_a_group_that_the_members_do_not_agree_on_is_gated(make):
    members = {"a": says(0, 1, 0, 1), "b": says(1, 0, 1, 0), "c": says(0, 1, 1, 0)}
    ensemble = make(members, gate_alpha=0.3)
    with pytest.raises(DataError, match=r"alpha -0\.\d+ is below gate_alpha 0\.3; ratings a \[0\.0, 1\.0"):
        await ensemble(*group())
    assert ensemble.metrics()["groups_gated"] == 1
    agreed = make({"a": says(0, 1), "b": says(0, 1), "c": says(0, 1)}, gate_alpha=0.9)
    assert (await agreed(*group())).tolist() == [0, 1, 0, 1]
    assert (await ensemble(*group(0, 1))).tolist() == [0]  # a single episode cannot show agreement
    flat = make({"a": says(1), "b": says(1)}, gate_alpha=0.9)
    assert (await flat(*group())).tolist() == [1, 1, 1, 1]


# -- state


async def test_a_resumed_ensemble_goes_on_as_the_one_that_was_not(make):
    one = make(**panel(combine="mean", on_departure="downweight", metric="nominal"))
    await score_groups(one, range(12))
    other = make(**panel(combine="mean", on_departure="downweight", metric="nominal"))
    other.load(json.loads(json.dumps(one.state(), allow_nan=False)))
    for ensemble in (one, other):
        ensemble.given = await score_groups(ensemble, range(12, 50))
    assert all(np.array_equal(a, b) for a, b in zip(one.given, other.given, strict=True))
    assert one.metrics() == other.metrics()
    assert one.state() == other.state()


async def test_the_state_of_other_members_is_refused(make):
    one = make({"a": says(1), "b": says(1)})
    with pytest.raises(CheckpointError, match="was saved with the members a, b, and now has a, c"):
        make({"a": says(1), "c": says(1)}).load(one.state())


async def test_deterministic_the_order_of_groups_in_a_step_changes_nothing(make):
    groups = [group(number, *(np.random.default_rng(number).random(8) < 0.5).astype(float)) for number in range(60)]
    ended = []
    for order in (range(60), reversed(range(60)), np.random.default_rng(1).permutation(60)):
        ensemble = make(**panel(combine="mean", on_departure="exclude"), deterministic=True)
        given = {}
        order_of = list(order)
        for step in range(3):
            for at in order_of:
                if at // 20 == step:
                    given[at] = (await ensemble(*groups[at])).tolist()
            ensemble.metrics()
        ended.append((given, ensemble.state()))
    assert ended[0] == ended[1] == ended[2]
    assert ended[0][1]["out"] == [False] * 4 + [True]


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": {"exact": {}}}, "needs two members or more, and it has 1"),
        ({"members": GOOD, "least": 4}, "least = 4 is more than the 3 members"),
        ({"members": {**GOOD, "exact": {"weight": 2}}, "combine": "mean"}, "'exact' has a weight, and combine"),
        ({"members": GOOD, "combine": "veto"}, 'combine = "veto" and veto = true'),
        (
            {"members": GOOD, "combine": "trimmed"},
            'trim = 0.2 of 3 members cuts none: use combine = "mean", or trim = 0.34',
        ),
        ({"members": GOOD, "combine": "minimum", "on_departure": "downweight"}, "changes nothing"),
        ({"members": GOOD, "combine": "first_of", "on_departure": "exclude"}, "one member at a time"),
        ({"members": {"exact": {}, "numeric": {}}, "on_departure": "exclude"}, "three members or more"),
        ({"members": GOOD, "tolerance": 3}, "tolerance = 3"),
        ({"members": GOOD, "combine": "all_of", "on_departure": "exclude"}, "could exclude no member"),
        ({"members": {name: {"weight": 0} for name in GOOD}}, "every member has weight 0"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_starts(options, message):
    with pytest.raises(ValidationError) as caught:
        EnsembleOptions.model_validate(options)
    assert message in str(caught.value)


@pytest.mark.parametrize("count", range(2, 9))
def test_the_trim_that_is_advised_can_be_set(count):
    members = {f"member{number}": {"use": "exact"} for number in range(count)}
    chosen = {"members": members, "combine": "trimmed"}
    with pytest.raises(ValidationError, match="cuts none") as caught:
        EnsembleOptions.model_validate({**chosen, "trim": 0.01})
    advised = re.search(r"or trim = ([\d.]+)", str(caught.value))
    assert (advised is None) == (count == 2), "of two members none can be cut at either end"
    if advised:
        EnsembleOptions.model_validate({**chosen, "trim": float(advised[1])})


def test_a_members_own_mistakes_are_named_with_its_path():
    with pytest.raises(ConfigError, match=r"unknown key 'members\.exact\.stripp'.* Did you mean 'strip'"):
        EnsembleOptions.model_validate({"members": {**GOOD, "exact": {"stripp": True}}})
    with pytest.raises(ConfigError, match="there is no reward named 'exactt'. Did you mean 'exact'"):
        EnsembleOptions.model_validate({"members": {**GOOD, "exactt": {}}})
