"""Who runs which draw: nothing is run twice that need not be, nothing is forgotten."""

from __future__ import annotations

import asyncio

from atropos_core.types import Draw, Sampling
from atropos_trajectory_api.service.draws import Draws, Rules

RULES = Rules(4, 1, Sampling())


def drawn(number: int, environment: str = "words") -> Draw:
    return Draw(number, environment, "train", number, number)


def offering(*draws_offered: Draw) -> Draws:
    draws = Draws()
    draws.begin(RULES, (), anew=True)
    draws.offer(draws_offered, {})
    return draws


async def ids(draws: Draws, worker: str, n: int = 10, environment: str = "words", wait_s: float = 0.0) -> list[int]:
    return [draw.id for draw in await draws.take(worker, environment, n, wait_s)]


async def test_the_oldest_draws_of_its_environment_go_to_whoever_asks():
    draws = offering(drawn(0), drawn(1, "sums"), drawn(2), drawn(3))
    assert await ids(draws, "a", 2) == [0, 2]
    assert await ids(draws, "b") == [3]
    assert await ids(draws, "c", environment="sums") == [1]


async def test_a_worker_that_waits_gets_a_draw_the_moment_it_is_offered():
    draws = offering()
    waiting = asyncio.create_task(ids(draws, "a", wait_s=30))
    await asyncio.sleep(0.01)
    draws.offer([drawn(5)], {})
    assert await asyncio.wait_for(waiting, 30) == [5]


async def test_workers_that_wait_together_share_what_comes():
    draws = offering()
    waiting = [asyncio.create_task(ids(draws, worker, wait_s=30)) for worker in "abc"]
    await asyncio.sleep(0.01)
    draws.offer([drawn(number) for number in range(8)], {})
    assert sorted(map(len, await asyncio.wait_for(asyncio.gather(*waiting), 30))) == [2, 3, 3]
    draws.offer([drawn(number) for number in range(8, 12)], {})
    assert await ids(draws, "a") == [8, 9, 10, 11], "alone"


async def test_draws_of_a_worker_that_has_gone_are_run_before_newer_ones():
    draws = offering(drawn(0), drawn(1), drawn(2))
    assert await ids(draws, "a", 2) == [0, 1]
    assert draws.give_back("a") == 2
    assert await ids(draws, "b") == [0, 1, 2]


async def test_of_two_groups_of_one_draw_the_second_is_refused():
    draws = offering(drawn(0))
    await ids(draws, "slow")
    draws.give_back("slow")
    await ids(draws, "quick")
    assert draws.refusal(drawn(0)) is None
    draws.arrived(drawn(0))
    assert "run already" in (draws.refusal(drawn(0)) or "")
    assert draws.status() == {"waiting": 0, "playing": 0}


async def test_a_draw_that_came_back_while_it_waited_again_is_not_handed_out():
    draws = offering(drawn(0), drawn(1))
    await ids(draws, "a", 1)
    draws.give_back("a")
    draws.arrived(drawn(0))
    assert await ids(draws, "b") == [1]


async def test_the_same_draw_with_other_content_is_another_draw():
    draws = offering(drawn(0))
    assert draws.refusal(Draw(0, "words", "train", 9, 9)) is not None


async def test_a_resumed_trainer_that_offers_what_is_being_run_has_it_run_once():
    draws = offering(drawn(0), drawn(1), drawn(2))
    assert await ids(draws, "a", 1) == [0]
    draws.begin(RULES, [1], anew=False)  # a new session of the same run; the group of draw 1 is in the hub
    assert draws.offer([drawn(0), drawn(1), drawn(2)], {}) == 1
    assert await ids(draws, "b") == [2]
    assert draws.refusal(drawn(0)) is None


async def test_another_run_wants_nothing_that_was_drawn_for_the_one_before():
    draws = offering(drawn(0), drawn(1))
    await ids(draws, "a", 1)
    draws.begin(RULES, (), anew=True)
    assert draws.refusal(drawn(0)) is not None
    assert await ids(draws, "b") == []


async def test_a_server_that_was_started_anew_takes_groups_before_the_trainer_has_offered_again():
    draws = Draws(present=[3])
    draws.begin(RULES, [3], anew=False)
    assert draws.refusal(drawn(4)) is None and draws.refusal(drawn(3)) is not None
    draws.offer([drawn(5)], {5: "a"})  # worker a registered first, and says it runs draw 5
    assert draws.refusal(drawn(4)) is not None
    assert await ids(draws, "b") == []


async def test_a_worker_that_registers_after_the_offer_keeps_what_it_runs():
    draws = offering(drawn(0), drawn(1))
    draws.mark_running("a", [0, 77])
    assert await ids(draws, "b") == [1]
    assert draws.give_back("a") == 1


async def test_groups_that_nobody_drew_are_always_welcome():
    draws = offering()
    assert draws.refusal(drawn(-1)) is None
    draws.arrived(drawn(-1))
    assert draws.present == []


async def test_a_worker_that_runs_a_draw_for_another_run_is_not_given_the_same_for_this_one():
    draws = offering(drawn(0), drawn(1))
    await ids(draws, "a", 1)
    draws.begin(RULES, (), anew=True)
    draws.offer([drawn(0)], {0: "a"})
    assert await ids(draws, "a") == []
    assert draws.refusal(drawn(0), "a") is not None and not draws.failed(drawn(0), "a")
    waiting = asyncio.create_task(ids(draws, "a", wait_s=30))
    await asyncio.sleep(0.01)
    draws.keep_running("a", ())
    assert await asyncio.wait_for(waiting, 30) == [0]
    assert draws.refusal(drawn(0), "a") is None


async def test_another_worker_is_given_it_at_once():
    draws = offering(drawn(0))
    await ids(draws, "a", 1)
    draws.begin(RULES, (), anew=True, running=[("c", 0)])
    draws.offer([drawn(0)], {})
    assert await ids(draws, "c") == []
    assert await ids(draws, "b") == [0]
    assert draws.refusal(drawn(0), "b") is None


async def test_without_a_trainer_nothing_is_handed_out():
    draws = offering(drawn(0))
    await ids(draws, "a")
    draws.begin(None, (), anew=False)
    draws.give_back("a")
    assert await ids(draws, "b") == []
    waiting = asyncio.create_task(ids(draws, "b", wait_s=30))
    await asyncio.sleep(0.01)
    draws.begin(RULES, (), anew=False)
    draws.offer([drawn(0)], {})
    assert await asyncio.wait_for(waiting, 30) == [0]
