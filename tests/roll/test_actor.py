"""Inside a real Ray actor that has an asyncio loop of its own, as ROLL's workers have."""

from __future__ import annotations

import os

import pytest

from tests.conftest import REPOSITORY

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def cluster():
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0"})
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment}
    )
    yield
    ray.shutdown()


class Worker:
    """One environment a thread, beside the actor's loop."""

    async def run_episode(self, first: int, members: int, episodes: int):
        import asyncio

        from tests.roll.driver import manager
        from tests.roll.test_contract import STOCK, stock_policy

        def one(env_id: int):
            member = manager(stock_policy, environment=STOCK, env_id=env_id, group_size=members)
            ran = [member.run_episode(seed=100 + episode) for episode in range(episodes)]
            return [
                (rollout.meta_info["atropos"]["task"], float(rollout.non_tensor_batch["episode_scores"][0]))
                for rollout in ran
            ]

        results = await asyncio.gather(*(asyncio.to_thread(one, first + at) for at in range(members)))
        from atropos_adapter_roll.shared import shared_loop

        [stock] = shared_loop().environments._open.values()
        return results, len(stock.orders), os.getpid()

    async def rank(self, reply: str):
        from tests.roll.driver import manager
        from tests.roll.environments import HERE

        return manager(lambda messages: reply, environment=f"{HERE}:Ranked", group_size=2).run_episode(seed=5)

    async def filter(self, rollouts):
        from atropos_adapter_roll.group import GroupFilter

        dropped = GroupFilter(None, None, "train").filter(0, 0, rollouts)
        return dropped, [float(rollout.non_tensor_batch["episode_scores"][0]) for rollout in rollouts]

    async def fail(self):
        from tests.roll.driver import manager
        from tests.roll.environments import HERE

        rollout = manager(lambda messages: "x", environment=f"{HERE}:Raises").run_episode(seed=5)
        return rollout.meta_info["drop_flag"], rollout.meta_info["atropos"]["failed"]


def test_episodes_in_two_actors_run_the_same_tasks_with_their_tools_once(cluster):
    workers = [ray.remote(Worker).remote() for _ in range(2)]
    (one, orders, pid), (other, other_orders, other_pid) = ray.get(
        [worker.run_episode.remote(4 * at, 4, 3) for at, worker in enumerate(workers)], timeout=120
    )
    assert pid != other_pid
    assert orders == other_orders == 12
    members = [*one, *other]
    assert all(member == members[0] for member in members), "a group over two workers, one task an episode"
    assert [score for _, score in members[0]] == [1.0, 1.0, 1.0]
    assert len({task for task, _ in members[0]}) == 3


def test_a_group_over_two_actors_is_scored_in_a_third_and_a_failure_is_marked(cluster):
    workers = [ray.remote(Worker).remote() for _ in range(3)]
    rollouts = ray.get([workers[0].rank.remote("x"), workers[1].rank.remote("xxxx")], timeout=120)
    assert ray.get(workers[2].filter.remote(rollouts), timeout=60) == (False, [0.0, 1.0])
    dropped, cause = ray.get(workers[0].fail.remote(), timeout=60)
    assert dropped
    assert cause == "ZeroDivisionError: a tool divided by zero"
