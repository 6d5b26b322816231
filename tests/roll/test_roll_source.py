"""ROLL's own env managers and its group queue, where ROLL_SOURCE names a checkout with its requirements. Its model, router and
tokenizer are stood in for: an llm proxy that follows a script, and one id a character.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from atropos_adapter_roll import managers
from atropos_adapter_roll.group import GroupFilter
from tests.conftest import REPOSITORY
from tests.roll.environments import HERE

if "ROLL_SOURCE" not in os.environ:
    pytest.skip("needs a checkout of ROLL: ROLL_SOURCE=... make test-roll", allow_module_level=True)

ray = pytest.importorskip("ray")

STOCK = "atropos_adapter_roll.trial:Stock"
SPECIAL = {"<s>": 0x110010, "<|im_end|>": 0x110011, "<|endoftext|>": 0x110012}


class LetterTokenizer:
    """One id a character; a turn is `<s>role\\ncontent<|im_end|>`."""

    pad_token_id = SPECIAL["<|endoftext|>"]
    eos_token_id = SPECIAL["<|im_end|>"]
    all_special_ids = list(SPECIAL.values())  # noqa: RUF012

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=False, **_):
        ids = [ord(letter) for letter in json.dumps(tools)] if tools else []
        for message in messages:
            ids += [SPECIAL["<s>"], *map(ord, f"{message['role']}\n{message['content']}"), SPECIAL["<|im_end|>"]]
        return [*ids, SPECIAL["<s>"], *map(ord, "assistant\n")] if add_generation_prompt else ids

    def decode(self, ids, skip_special_tokens=False):
        names = {} if skip_special_tokens else {number: name for name, number in SPECIAL.items()}
        return "".join(names.get(int(one), "" if int(one) in self.all_special_ids else chr(int(one))) for one in ids)

    def batch_decode(self, rows, skip_special_tokens=False):
        return [self.decode(row, skip_special_tokens) for row in rows]

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return isinstance(other, LetterTokenizer)


class Proxy:
    def __init__(self, policy):
        self._policy = policy

    def generate(self, messages, lm_input, generation_config):
        proto = importlib.import_module("roll.distributed.scheduler.protocol").DataProto
        ids = [*map(ord, self._policy(messages)), SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]]
        return proto(batch=TensorDict({"responses": torch.tensor([ids])}, batch_size=1))


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


def run(monkeypatch, policies, name, *, environment, groups=1, max_steps=3, **env_config):
    """A group of ROLL's env managers, each in a thread of its own, until `groups` groups are released."""
    base = importlib.import_module("roll.pipeline.agentic.env_manager.traj_env_manager")
    proxies = iter([Proxy(policy) for policy in policies])
    monkeypatch.setattr(base, "create_llm_proxy", lambda **_: next(proxies))
    queue = ray.remote(Queue).options(max_concurrency=32).remote(len(policies), groups)
    observation = managers.BASES[name][1]
    custom = {
        "env_type": "atropos", "max_steps": max_steps, "max_tokens_per_step": 256, "agent_system_template": "Be brief.",
        "agent_template": "{observation}",
    }  # fmt: skip
    made = []
    for env_id in range(len(policies)):
        entry = {
            **custom, "tag": "Tag", "group_id": 0, "env_id": env_id, "group_seed": 17,
            "config": {"environment": environment, "observation": observation, "max_steps": max_steps, **env_config},
        }  # fmt: skip
        generating = SimpleNamespace(max_new_tokens=256, to_dict=dict)
        worker = SimpleNamespace(
            llm_proxy=None, generating_args=generating, group_filter_cls=managers.FILTER, group_size=len(policies)
        )
        pipeline = SimpleNamespace(
            custom_envs={"Tag": custom}, sequence_length=4096, skip_mock_system_prompt=True, exp_name="test",
            parse_tool_call_parameter_to_dict=False,
        )  # fmt: skip
        manager = getattr(managers, name)(
            worker, pipeline, OmegaConf.create(entry), LetterTokenizer(), None, queue, threading.Lock()
        )
        manager.current_step = 0
        made.append(manager)
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
def test_rolls_managers_play_an_environment_of_three_turns(cluster, monkeypatch, name, rows):
    from tests.roll.test_contract import stock_policy

    holder = managers.env.AtroposEnv(environment=STOCK)
    before = len(holder._environment.orders)
    wrong = lambda messages: stock_policy(messages) if len(messages) < 5 else "0"  # noqa: E731
    (groups, dropped), made = run(monkeypatch, [stock_policy, wrong], name, environment=STOCK, groups=2)
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
def test_rolls_queue_releases_groups_that_are_scored_as_a_whole(cluster, monkeypatch, name):
    policies = [lambda messages, n=n: "x" * n for n in (1, 2, 3)]
    (groups, _), _ = run(monkeypatch, policies, name, environment=f"{HERE}:Ranked", groups=2)
    for group in groups:
        assert sorted(one["score"] for one in group) == sorted(one["in_tensor"] for one in group) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_queue_drops_a_group_with_a_failed_play_and_plays_another(cluster, monkeypatch, name):
    said = iter(["fail", *["fine"] * 50])
    policies = [lambda messages: next(said)] * 2
    (groups, dropped), _ = run(monkeypatch, policies, name, environment=f"{HERE}:FailsOnRequest")
    assert dropped == 1
    assert [one["metrics"]["env/Tag/failed"] for one in groups[0]] == [0.0, 0.0]
