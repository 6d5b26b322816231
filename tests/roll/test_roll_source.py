"""ROLL's own env managers and its group queue, where ROLL_SOURCE names a checkout with its requirements. Its model, router and
tokenizer are stood in for: an llm proxy that follows a script, and one id a character.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import threading
from types import SimpleNamespace

import pytest

from atropos_adapter_roll import managers
from atropos_adapter_roll.adapter import check_roll
from atropos_adapter_roll.group import GroupFilter
from atropos_adapter_roll.through_roll import make_manager
from tests.conftest import REPOSITORY
from tests.roll.environments import HERE

if "ROLL_SOURCE" not in os.environ:
    pytest.skip("needs a checkout of ROLL: ROLL_SOURCE=... make test-roll", allow_module_level=True)

ray = pytest.importorskip("ray")

STOCK = "atropos_adapter_roll.trial:Stock"


@pytest.fixture(scope="module")
def cluster():
    environment = {"PYTHONPATH": f"{REPOSITORY}:{os.environ['ROLL_SOURCE']}", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


class Queue:
    """ROLL's own GroupQueue with our filter, in an actor as ROLL has it."""

    def __init__(self, group_size: int, episodes: int):
        module = importlib.import_module("roll.distributed.scheduler.rollout_scheduler")
        given = {
            "group_id": 0, "progress_bar": SimpleNamespace(update=lambda count: None), "group_size": group_size,
            "group_size_redundancy": 0, "max_traj_per_env": episodes, "async_generation_ratio": 0,
            "group_filter": GroupFilter(None, None, "train"), "env_monitor": None, "staleness_tolerance": 0,
        }  # fmt: skip
        takes = inspect.signature(module.GroupQueue.__init__).parameters
        self.queue = module.GroupQueue(**{name: value for name, value in given.items() if name in takes})
        self.started = False

    async def get_episode_id(self, group_id, env_id=None):
        if not self.started:
            self.started = True
            self.queue.advance_step(0)
        return await self.queue.get_episode_id(env_id)

    async def put(self, group_id, episode_id, start_step, rollout, env_id=None):
        self.queue.put(episode_id, start_step, rollout)

    async def get(self, groups: int):
        found = []
        for _ in range(groups):
            group = await asyncio.wait_for(self.queue.get(), 60)
            found.append([told(rollout) for rollout in group.rollouts])
        return found, self.queue.group_filter_count

    async def shutdown(self):
        self.queue.shutdown()


def told(rollout):
    scores, mask = rollout.batch["scores"], rollout.batch["attention_mask"]
    return {
        "score": float(rollout.non_tensor_batch["episode_scores"][-1]),
        "in_tensor": float(scores[-1][int(mask[-1].sum()) - 1]),
        "rows": len(scores),
        "metrics": rollout.meta_info["metrics"],
    }


def run(policies, name, *, environment, groups=1):
    """A group of ROLL's env managers, each in a thread of its own, until `groups` groups are released."""
    queue = ray.remote(Queue).options(max_concurrency=32).remote(len(policies), groups)
    made = [
        make_manager(name, policy, queue, group_size=len(policies), env_id=env_id, environment=environment)
        for env_id, policy in enumerate(policies)
    ]
    data = SimpleNamespace(meta_info={"seed": 3})
    threads = [threading.Thread(target=manager.run_rollout_loop, args=(data,), daemon=True) for manager in made]
    for thread in threads:
        thread.start()
    found = ray.get(queue.get.remote(groups), timeout=120)
    for manager in made:
        manager.running = False
    ray.get(queue.shutdown.remote())
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found, made


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_loader_finds_our_managers_and_they_are_its_own(name):
    load = importlib.import_module("roll.utils.import_utils").safe_import_class
    found = load(f"atropos_adapter_roll.managers.{name}")
    assert issubclass(found, getattr(importlib.import_module(managers.BASES[name][0]), name))
    assert load(managers.FILTER) is GroupFilter


@pytest.mark.parametrize(("name", "rows"), [("TrajEnvManager", 1), ("AgentNativeStepEnvManager", 3)])
def test_rolls_managers_play_an_environment_of_three_turns(cluster, name, rows):
    from tests.roll.test_contract import stock_policy

    holder = managers.env.AtroposEnv(environment=STOCK)
    before = len(holder._environment.orders)
    wrong = lambda messages: stock_policy(messages) if len(messages) < 5 else "0"  # noqa: E731
    (groups, dropped), made = run([stock_policy, wrong], name, environment=STOCK, groups=2)
    assert dropped == 0
    assert [[one["score"] for one in sorted(group, key=lambda one: -one["score"])] for group in groups] == [
        [1.0, 0.0]
    ] * 2
    assert all(one["in_tensor"] == one["score"] and one["rows"] == rows for group in groups for one in group)
    assert all(one["metrics"]["env/Tag/failed"] == 0.0 for group in groups for one in group)
    assert len(holder._environment.orders) == before + 4, "two members, two episodes, one order each"
    for env in (holder, *(manager.env for manager in made)):
        env.close()


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_queue_releases_groups_that_are_scored_as_a_whole(cluster, name):
    policies = [lambda messages, n=n: "x" * n for n in (1, 2, 3)]
    (groups, _), _ = run(policies, name, environment=f"{HERE}:Ranked", groups=2)
    for group in groups:
        assert sorted(one["score"] for one in group) == sorted(one["in_tensor"] for one in group) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_queue_drops_a_group_with_a_failed_play_and_plays_another(cluster, name):
    said = iter(["fail", *["fine"] * 50])
    policies = [lambda messages: next(said)] * 2
    (groups, dropped), _ = run(policies, name, environment=f"{HERE}:FailsOnRequest")
    assert dropped == 1
    assert [one["metrics"]["env/Tag/failed"] for one in groups[0]] == [0.0, 0.0]


def test_the_doctor_plays_through_rolls_managers():
    found = check_roll()
    assert found.ok, found.detail
    assert found.detail.startswith("TrajEnvManager: 3 replies, score 1; AgentNativeStepEnvManager: 3 replies, score 1")
