"""One scripted policy, the same seeds: our own loop and the gem path see the same messages and the same rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gem
import numpy as np
import pytest

import atropos_adapter_roll.env  # noqa: F401 - registers
from atropos_adapter_roll.group import GroupFilter
from atropos_adapter_roll.trial import Stock, right_replies
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.replies import AS_SAMPLED, message_of
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive
from atropos_core.types import Completion, Draw, Sampling, Tokens
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k
from atropos_env_gsm8k.plugin import HERE as GSM8K
from tests.roll.driver import manager
from tests.roll.environments import HERE, Ranked

TOKENIZER = ChatTokenizer(GSM8K / "tiny_tools")
STOCK = "atropos_adapter_roll.trial:Stock"


class ScriptedEngine(Engine):
    """Gives the next of these replies, whatever the prompt."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.endpoint = LocalEndpoint(self)
        self._replies = iter(replies)

    async def open(self) -> ModelInfo:
        raise NotImplementedError

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        ids = np.append(TOKENIZER.encode(next(self._replies)), TOKENIZER.encode(TOKENIZER.eos)).astype(np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", 1.0)]


def scripts(name: str) -> tuple[Any, dict[str, Any], list[list[str]]]:
    """An environment, what gem.make gets of it, and the replies of each of its episodes."""
    if name == "gsm8k":
        environment: Any = Gsm8k(Gsm8kOptions())
        tasks = environment.tasks("train")
        answers = [str(tasks[derive(seed, "task") % len(tasks)].answer) for seed in range(12)]
        replies = [answers[seed] if seed % 3 else "no idea, #### 3" for seed in range(12)]
        return environment, {"environment": "gsm8k"}, [[TOKENIZER.decode(TOKENIZER.encode(reply))] for reply in replies]
    environment = Stock()
    tasks = environment.tasks("train")
    right = [right_replies(tasks[derive(seed, "task") % len(tasks)]) for seed in range(12)]
    scripted = [[*replies[:2], "0"] if seed % 3 == 0 else replies for seed, replies in enumerate(right)]
    scripted[1] = ["no tool", "none", "none"]
    return (
        environment,
        {"environment": STOCK},
        [[TOKENIZER.decode(TOKENIZER.encode(one)) for one in each] for each in scripted],
    )


@pytest.mark.parametrize("name", ["gsm8k", "stock"])
async def test_our_own_loop_and_gem_see_the_same_messages_and_rewards(name):
    environment, config, scripted = scripts(name)
    native = gem.make("atropos", **config, observation="messages")
    delta = gem.make("atropos", **config)
    rewards = []
    for seed, replies in enumerate(scripted):
        # our own loop
        rollout_runner = RolloutRunner(
            {"it": environment}, [WeightedReward("environment", EnvironmentReward(), 1.0, 9.0)], ScriptedEngine(replies),
            TOKENIZER, deadline_s=9.0, deterministic=True,
        )  # fmt: skip
        draw = Draw(seed, "it", "train", derive(seed, "task") % len(environment.tasks("train")), seed)
        ran = await rollout_runner.run(draw, rollout_runner.schedule_keys(draw, 1), 1, Sampling())
        [episode] = ran.episodes

        # gem, by both kinds of observation
        shown, _ = native.reset(seed=seed)
        texts = [delta.reset(seed=seed)[0]]
        totals = [0.0, 0.0]
        for reply in replies:
            last = [*shown, {"role": "assistant", "content": reply}]
            shown, reward, over, _, _ = native.step(reply + "<|im_end|>")
            text, other, *_ = delta.step(reply)
            texts.append(text)
            totals = [totals[0] + reward, totals[1] + other]
        assert over

        assert [as_parsed(message) for message in last] == [dict(message) for message in episode.messages]
        shown_first = "\n\n".join(message["content"] for message in ran.task.messages)
        later = [m["content"] for m in episode.messages[len(ran.task.messages) :] if m["role"] != "assistant"]
        assert texts[0].endswith(shown_first), "before it there may be a description of the tools"
        assert texts[1:] == [*later, ""]
        assert totals == [float(ran.rewards[0])] * 2
        assert native.record()["task"] == ran.task.id
        rewards.append(totals[0])
    assert 0 < sum(rewards) < len(rewards), "some were right and some wrong"
    native.close()
    delta.close()


def as_parsed(message):
    """The message as an episode records it: without the keys that only rewards read."""
    parsed = message_of(message["content"]) if message["role"] == "assistant" else message
    return {name: value for name, value in parsed.items() if name not in AS_SAMPLED}


async def test_a_group_that_its_environment_scores_has_our_own_loops_rewards():
    """The members' replies meet in the group filter, in another order than they were given in."""
    replies = ["a", "abcdef", "abc", "abcdef"]
    own = RolloutRunner(
        {"it": Ranked()}, [WeightedReward("environment", EnvironmentReward(), 1.0, 9.0)], ScriptedEngine(replies), TOKENIZER,
        deadline_s=9.0, deterministic=True,
    )  # fmt: skip
    draw = Draw(0, "it", "train", derive(5, "task") % 500, 5)
    ran = await own.run(draw, own.schedule_keys(draw, 4), 4, Sampling())
    rollouts = [
        manager(lambda messages, reply=reply: reply, environment=f"{HERE}:Ranked", group_size=4, env_id=at).run_episode(
            seed=5
        )
        for at, reply in enumerate(replies)
    ][::-1]
    assert not GroupFilter(None, None, "train").filter(0, 0, rollouts)
    scores = [rollout.non_tensor_batch["episode_scores"][0] for rollout in rollouts]
    assert np.float32(scores[::-1]).tolist() == ran.rewards.tolist() == np.float32([0, 1, 0.4, 1]).tolist()
