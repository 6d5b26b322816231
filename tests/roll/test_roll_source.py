"""ROLL's own env managers and its group queue, where ROLL_SOURCE names a checkout with its requirements. Its model, router and
tokenizer are stood in for: an llm proxy that follows a script, and one id a character.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import threading
from types import SimpleNamespace

import pytest

from atropos_adapter_roll import managers
from atropos_adapter_roll.adapter import check_roll
from atropos_adapter_roll.group import GroupFilter
from atropos_adapter_roll.through_roll import LetterTokenizer, make_manager, run_one_rollout
from tests.families import FAMILIES, write
from tests.roll.environments import HERE

if "ROLL_SOURCE" not in os.environ:
    pytest.skip("needs a checkout of ROLL: ROLL_SOURCE=... make test-roll", allow_module_level=True)

ray = pytest.importorskip("ray")
transformers = pytest.importorskip("transformers")

STOCK = "atropos_adapter_roll.trial:Stock"


class Queues:
    """ROLL's own GroupQueue with our filter, in an actor as ROLL has it; several, by number, one after another."""

    def __init__(self):
        self.queues = []

    async def open(self, group_size: int, episodes: int):
        module = importlib.import_module("roll.distributed.scheduler.rollout_scheduler")
        given = {
            "group_id": 0, "progress_bar": SimpleNamespace(update=lambda count: None), "group_size": group_size,
            "group_size_redundancy": 0, "max_traj_per_env": episodes, "async_generation_ratio": 0,
            "group_filter": GroupFilter(None, None, "train"), "env_monitor": None, "staleness_tolerance": 0,
        }  # fmt: skip
        takes = inspect.signature(module.GroupQueue.__init__).parameters
        self.queues.append(module.GroupQueue(**{name: value for name, value in given.items() if name in takes}))
        self.queues[-1].advance_step(0)
        return len(self.queues) - 1

    async def get_episode_id(self, number, group_id, env_id=None):
        return await self.queues[number].get_episode_id(env_id)

    async def put(self, number, group_id, episode_id, start_step, rollout, env_id=None):
        self.queues[number].put(episode_id, start_step, rollout)

    async def get(self, number: int, groups: int):
        found = []
        for _ in range(groups):
            group = await asyncio.wait_for(self.queues[number].get(), 60)
            found.append([summary_of(rollout) for rollout in group.rollouts])
        return found, self.queues[number].group_filter_count

    async def shutdown(self, number: int):
        self.queues[number].shutdown()


@pytest.fixture(scope="module")
def queues(roll):
    return ray.remote(Queues).options(max_concurrency=32).remote()


def summary_of(rollout):
    scores, mask = rollout.batch["scores"], rollout.batch["attention_mask"]
    return {
        "score": float(rollout.non_tensor_batch["episode_scores"][-1]),
        "in_tensor": float(scores[-1][int(mask[-1].sum()) - 1]),
        "rows": len(scores),
        "metrics": rollout.meta_info["metrics"],
    }


def run(queues, policies, name, *, environment, groups=1):
    """A group of ROLL's env managers, each in a thread of its own, until `groups` groups are released."""
    number = ray.get(queues.open.remote(len(policies), groups), timeout=120)
    of = SimpleNamespace(
        get_episode_id=SimpleNamespace(remote=functools.partial(queues.get_episode_id.remote, number)),
        put=SimpleNamespace(remote=functools.partial(queues.put.remote, number)),
    )
    made = [
        make_manager(name, policy, of, group_size=len(policies), env_id=env_id, environment=environment)
        for env_id, policy in enumerate(policies)
    ]
    data = SimpleNamespace(meta_info={"seed": 3})
    threads = [threading.Thread(target=manager.run_rollout_loop, args=(data,), daemon=True) for manager in made]
    for thread in threads:
        thread.start()
    found = ray.get(queues.get.remote(number, groups), timeout=120)
    for manager in made:
        manager.running = False
    ray.get(queues.shutdown.remote(number))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found, made


def test_rolls_own_rows_have_what_their_replies_earned(roll):
    replies = iter(["go on", "go on", "1"])
    made = run_one_rollout(
        "AgentNativeStepEnvManager", lambda messages: next(replies), environment=f"{HERE}:Credited", turn_rewards=True
    )
    assert [float(one) for one in made.non_tensor_batch["step_scores"]] == [0.25, 0.25, 0.5]
    assert made.batch["scores"].sum(-1).tolist() == [0.25, 0.25, 0.5]
    assert [float(one) for one in made.non_tensor_batch["episode_scores"]] == [1.0] * 3
    returns = importlib.import_module("roll.pipeline.agentic.utils").compute_discounted_returns(
        made, "step_reinforce", 1.0
    )
    assert returns.batch["step_rewards"].tolist() == [1.0, 0.75, 0.5]


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_loader_finds_our_managers_and_they_are_its_own(roll, name):
    load = importlib.import_module("roll.utils.import_utils").safe_import_class
    found = load(f"atropos_adapter_roll.managers.{name}")
    assert issubclass(found, getattr(importlib.import_module(managers.BASES[name][0]), name))
    assert load(managers.FILTER) is GroupFilter


@pytest.mark.parametrize(("name", "rows"), [("TrajEnvManager", 1), ("AgentNativeStepEnvManager", 3)])
def test_rolls_managers_run_an_environment_of_three_turns(queues, name, rows):
    from tests.roll.test_contract import stock_policy

    holder = managers.env.AtroposEnv(environment=STOCK)
    before = len(holder._environment.orders)
    wrong = lambda messages: stock_policy(messages) if len(messages) < 5 else "0"  # noqa: E731
    (groups, dropped), made = run(queues, [stock_policy, wrong], name, environment=STOCK, groups=2)
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
def test_rolls_queue_releases_groups_that_are_scored_as_a_whole(queues, name):
    policies = [lambda messages, n=n: "x" * n for n in (1, 2, 3)]
    (groups, _), _ = run(queues, policies, name, environment=f"{HERE}:Ranked", groups=2)
    for group in groups:
        assert sorted(one["score"] for one in group) == sorted(one["in_tensor"] for one in group) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("name", list(managers.BASES))
def test_rolls_queue_drops_a_group_with_a_failed_rollout_and_runs_another(queues, name):
    scripted = iter(["fail", *["fine"] * 50])
    policies = [lambda messages: next(scripted)] * 2
    (groups, dropped), _ = run(queues, policies, name, environment=f"{HERE}:FailsOnRequest")
    assert dropped == 1
    assert [one["metrics"]["env/Tag/failed"] for one in groups[0]] == [0.0, 0.0]


@pytest.mark.parametrize("name", list(managers.BASES))
def test_what_is_trained_is_what_was_sampled(roll, name):
    """Ids, prefixes, masks, logprobs and the place of the score, of three turns."""
    tokenizer = LetterTokenizer()
    scripted = ["go on", "go on", "1"]
    replies = iter(scripted)
    rollout = run_one_rollout(name, lambda messages: next(replies), environment=f"{HERE}:Dialogue", max_steps=3)
    rows = []
    for row in range(len(rollout.batch["input_ids"])):
        length = int(rollout.batch["attention_mask"][row].sum())
        ids = rollout.batch["input_ids"][row][:length].tolist()
        mask = rollout.batch["response_mask"][row][:length].bool().tolist()
        rows.append((ids, mask, rollout.batch["infer_logprobs"][row].tolist()))
        scores = rollout.batch["scores"][row]
        assert scores.nonzero().flatten().tolist() == (
            [length - 1] if row == len(rollout.batch["input_ids"]) - 1 else []
        )
        assert not rollout.batch["response_mask"][row][length:].any()
    sampled = [[*map(ord, text), tokenizer.eos_token_id, tokenizer.pad_token_id] for text in scripted]
    replied = [[-1 / place for place in range(1, len(ids) + 1)] for ids in sampled]
    if name == "TrajEnvManager":
        [(ids, mask, logprobs)] = rows
        assert [one for one, flag in zip(ids, mask, strict=True) if flag] == sum(sampled, [])
        # logprobs are those of the next id: ROLL leaves the first out
        assert [p for p, flag in zip(logprobs, mask[1:], strict=False) if flag] == pytest.approx(sum(replied, []))
        assert not any(p for p, flag in zip(logprobs, mask[1:], strict=False) if not flag)
    else:
        assert len(rows) == 3
        for (ids, mask, logprobs), reply, own in zip(rows, sampled, replied, strict=True):
            assert (ids[-len(reply) :], mask) == (reply, [False] * (len(ids) - len(reply)) + [True] * len(reply))
            assert logprobs[len(ids) - len(reply) - 1 : len(ids) - 1] == pytest.approx(own)
    assert rollout.meta_info["atropos"]["replies"] == scripted


@pytest.mark.parametrize("name", list(managers.BASES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_answer_is_right_whatever_the_tokenizer_ends_it_with(roll, tmp_path, family, name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(write(family, tmp_path))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    scripted = ("<|channel|>final<|message|>14",) if family == "gpt-oss" else ("#### 14", "14")
    for text in [text + end + tokenizer.pad_token for text in scripted for end in FAMILIES[family].ends]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rollout = run_one_rollout(
            name, lambda messages, ids=ids: ids, tokenizer=tokenizer, environment=f"{HERE}:Fourteen", max_steps=1
        )
        assert rollout.meta_info["atropos"]["failed"] == ""
        assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.0], rollout.meta_info["atropos"]["replies"]


@pytest.mark.parametrize(
    ("sequence_length", "says"), [(12, "leaves no room for a reply in sequence_length 12"), (90, "")]
)
@pytest.mark.parametrize("name", list(managers.BASES))
def test_a_prompt_that_leaves_no_room_fails_its_episode_and_not_the_manager(roll, name, sequence_length, says):
    """The first prompt, and one in the middle of an episode."""
    rollout = run_one_rollout(
        name, lambda messages: "go on", environment=f"{HERE}:Dialogue", max_steps=30, sequence_length=sequence_length
    )
    assert says in rollout.meta_info["atropos"]["failed"] != ""
    assert rollout.meta_info["drop_flag"] is True
    assert rollout.meta_info["metrics"]["env/Tag/failed"] == 1.0
    assert rollout.batch["input_ids"].shape[1] == sequence_length
    assert GroupFilter(None, None, "train").filter(0, 0, [rollout]) is True


def test_the_doctor_runs_through_rolls_managers(roll):
    found = {finding.subject: finding for finding in check_roll()}
    for name in managers.BASES:
        assert found[f"ROLL's {name}"].ok, found[f"ROLL's {name}"].detail
        assert found[f"ROLL's {name}"].detail.startswith("3 replies, score 1; from ")
    assert found["ROLL's interfaces"].ok is not False
