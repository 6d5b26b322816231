"""The producer: as many groups as are wanted, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.errors import DataError, HubClosed, NoProgress, ProcessDied
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Limits
from atropos_core.interfaces import TaskSource
from atropos_core.rollouts.producer import PATIENCE, Producer
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.types import Sampling, ScoredGroup
from tests.unit.parts import TOKENIZER, SayingEngine, Words, episode


class Scene:
    """A producer with everything around it. Rollouts end as `how(task number)` says; `gate` holds them back."""

    def __init__(self, how: Callable[[int], Any] = lambda n: None, *, min_group: int = 1, size_bytes: int = 10**6):
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.most_at_once = 0
        self.failed: list[ScoredGroup] = []
        scene = self

        class Gated(Words):
            async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
                scene.running += 1
                scene.most_at_once = max(scene.most_at_once, scene.running)
                try:
                    await scene.gate.wait()
                    await asyncio.sleep(0)
                    made = how(task.data["n"])
                    if asyncio.iscoroutine(made):
                        await made
                finally:
                    scene.running -= 1
                return episode(1.0)

        self.curriculum = OrderedCurriculum(0, shuffled=False)
        self.curriculum.open({"words": TaskSource(8, 1.0)})
        self.hub: Hub[ScoredGroup] = Hub(
            Limits(size_bytes), max_staleness=0, on_dropped=lambda entry, cause: None, keep_trained=False
        )
        self.session = self.hub.open("test")
        reward = WeightedReward("environment", EnvironmentReward(), 1.0, 10.0)
        rollout_runner = RolloutRunner(
            {"words": Gated()}, [reward], SayingEngine(), TOKENIZER, deadline_s=10, deterministic=False
        )
        self.producer = Producer(
            rollout_runner,
            self.curriculum,
            self.hub,
            group_size=2,
            min_group=min_group,
            sampling=Sampling(),
            on_failed=self.failed.append,
        )

    async def lease(self, n: int) -> list[int]:
        return sorted(entry.payload.draw.id for entry in await self.session.lease(BatchSize(groups=n), 0, 5))

    def unsettled(self) -> list[int]:
        return [fields[0] for fields in self.curriculum.state()["unsettled"]]


def always(error: BaseException) -> Callable[[int], Any]:
    def how(number: int) -> None:
        raise error

    return how


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_what_is_wanted_is_run_at_once_and_lies_in_the_hub():
    scene = Scene()
    scene.gate.clear()
    scene.producer.request(3)
    await settle()
    assert scene.running == 6, "three groups of two"
    scene.gate.set()
    assert await scene.lease(3) == [0, 1, 2]
    await scene.producer.stop()


async def test_wanting_the_same_again_runs_nothing_new():
    scene = Scene()
    scene.gate.clear()
    scene.producer.request(2)
    await settle()
    scene.producer.request(2)
    scene.producer.request(1)
    await settle()
    assert scene.running == 4
    scene.gate.set()
    await settle()
    scene.producer.request(2)
    await settle()
    assert len(scene.hub) == 2, "groups that wait in the hub count"
    scene.producer.request(3)
    assert await scene.lease(3) == [0, 1, 2]
    await scene.producer.stop()


async def test_a_group_that_failed_is_reported_and_another_is_drawn():
    scene = Scene(lambda number: 1 / 0 if number in (0, 2) else None)
    scene.producer.request(3)
    assert await scene.lease(3) == [1, 3, 4]
    assert [group.draw.id for group in scene.failed] == [0, 2]
    assert scene.unsettled() == [0, 1, 2, 3, 4], "whoever hears of it settles it"
    await scene.producer.stop()


async def test_a_group_with_fewer_episodes_than_min_group_failed():
    runs: dict[int, int] = {}

    def how(number: int) -> None:
        runs[number] = runs.get(number, 0) + 1
        if number == 0 and runs[number] == 1:
            raise KeyError("one of its two rollouts")

    scene = Scene(how, min_group=2)
    scene.producer.request(2)
    assert await scene.lease(2) == [1, 2]
    assert [len(group.episodes) for group in scene.failed] == [1]
    await scene.producer.stop()

    runs.clear()
    lenient = Scene(how, min_group=1)
    lenient.producer.request(2)
    assert await lenient.lease(2) == [0, 1]
    await lenient.producer.stop()


async def test_failures_without_end_break_the_producer_with_the_cause_and_its_trace():
    scene = Scene(always(KeyError("no such column")))
    scene.producer.request(2)
    with pytest.raises(NoProgress) as caught:
        await asyncio.wait_for(scene.producer.broken, 60)
    text = str(caught.value)
    assert f"the last {2 * PATIENCE} groups all failed" in text
    assert "in rollout: KeyError: 'no such column'" in text
    assert text.splitlines()[1] == f"  {caught.value.remedy}" and "Traceback" not in text
    [trace] = caught.value.__notes__
    assert "test_producer.py" in trace, "the user's own line"
    await scene.producer.stop()


async def test_a_success_now_and_then_is_progress():
    finished: list[int] = []

    def how(number: int) -> None:
        finished.append(number)
        if number % 4:
            raise KeyError("three of four")

    scene = Scene(how)
    scene.producer.request(1)
    for _ in range(8):
        [entry] = await scene.session.lease(BatchSize(groups=1), 0, 5)
        scene.session.trained([entry.id])
        scene.producer.request(1)
    assert not scene.producer.broken.done()
    assert len(scene.failed) > PATIENCE
    await scene.producer.stop()


async def test_a_process_that_died_breaks_the_producer_at_once():
    scene = Scene(always(ProcessDied("the engine is gone")))
    scene.producer.request(1)
    with pytest.raises(ProcessDied, match="the engine is gone"):
        await asyncio.wait_for(scene.producer.broken, 60)
    assert scene.failed == []
    await scene.producer.stop()


async def test_a_group_too_large_for_the_hub_breaks_the_producer_by_name():
    scene = Scene(size_bytes=1000)
    scene.producer.request(1)
    with pytest.raises(DataError, match="more than the whole hub"):
        await asyncio.wait_for(scene.producer.broken, 60)
    await scene.producer.stop()


async def test_a_hub_that_closes_under_a_waiting_group_is_no_surprise_to_stop():
    scene = Scene(size_bytes=6000)  # room for one group
    scene.producer.request(2)
    await settle()
    scene.hub.stop()
    with pytest.raises(HubClosed):
        await asyncio.wait_for(asyncio.shield(scene.producer.broken), 60)
    await scene.producer.stop()


async def test_groups_that_wait_for_room_count_as_being_run():
    scene = Scene(size_bytes=6000)
    scene.producer.request(2)
    await settle()
    scene.producer.request(2)
    await settle()
    assert (len(scene.hub), scene.unsettled()) == (1, [0, 1]), "no third draw"
    await scene.producer.stop()


async def test_stopping_cancels_what_is_run_and_leaves_its_draws_open_for_a_resumed_run():
    scene = Scene()
    scene.gate.clear()
    scene.producer.request(2)
    await settle()
    await scene.producer.stop()
    assert scene.running == 0
    assert scene.unsettled() == [0, 1]
    assert not scene.producer.broken.done()
    await scene.producer.stop()


async def test_a_rollout_cancelled_from_inside_does_not_make_its_group_vanish():
    async def cancels_itself() -> None:
        helper = asyncio.ensure_future(asyncio.sleep(10))
        helper.cancel()
        await helper

    scene = Scene(lambda number: cancels_itself() if number == 0 else None)
    scene.producer.request(1)
    assert await scene.lease(1) == [1], "the first one failed, and was replaced"
    await scene.producer.stop()
