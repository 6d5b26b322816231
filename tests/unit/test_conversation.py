"""Conversations: token histories that hold exactly what was rendered and what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atropos_core.conversation import Conversation
from atropos_core.errors import DataError
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.seeds import derive
from atropos_core.types import ABSTAINED, Completion, Sampling, Score, tokens
from tests.unit.parts import ASSISTANT, END, TOKENIZER, USER, SayingEngine, ids


def talk(engine: SayingEngine, *, seed: int = 5, sampling: Sampling | None = None, **options: Any) -> Conversation:
    policy = EnginePolicy(engine, TOKENIZER, Sampling(max_tokens=8), deadline_s=10)
    return Conversation(policy, seed=seed, sampling=sampling, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_one_turn_is_the_prompt_given_and_the_reply_sampled():
    conversation = talk(SayingEngine(lambda prompt, seed: "yes"))
    answer = await conversation.reply(user("hi"))
    assert answer == {"role": "assistant", "content": "yes"}
    made = conversation.episode(Score(0.5, True, {"a": 1.0}, {"b": 2.0}))
    [one] = made.rollouts
    assert one.tokens.tolist() == [USER, *ids("hi"), ASSISTANT, *ids("yes"), END]
    assert one.sampled.tolist() == [False] * 4 + [True] * 4
    assert one.trained.tolist() == one.sampled.tolist()
    assert one.logprobs.tolist() == [0, 0, 0, 0, -1, -2, -3, -4]
    assert one.policy_version.tolist() == [0, 0, 0, 0, 7, 7, 7, 7]
    assert (made.score, made.correct, made.parts, made.metrics) == (0.5, True, {"a": 1.0}, {"b": 2.0})
    assert made.messages == (user("hi"), answer)
    assert made.finish == "stop"


async def test_a_second_turn_extends_the_same_history():
    engine = SayingEngine(lambda prompt, seed: "ab" if len(prompt) < 6 else "c")
    conversation = talk(engine)
    await conversation.reply(user("1"))
    await conversation.reply(user("2"), user("3"))
    [one] = conversation.episode(Score(0.0)).rollouts
    first = [USER, *ids("1"), ASSISTANT]
    second = [USER, *ids("2"), USER, *ids("3"), ASSISTANT]
    assert one.tokens.tolist() == [*first, *ids("ab"), END, *second, *ids("c"), END]
    assert engine.requests[1][0].tolist() == one.tokens.tolist()[:-2], "the engine saw the history as it was sampled"
    assert one.sampled.tolist() == [False] * 3 + [True] * 3 + [False] * 5 + [True] * 2
    assert one.logprobs[one.sampled].tolist() == [-1, -2, -3, -1, -2]
    assert not one.logprobs[~one.sampled].any()


async def test_a_reply_cut_off_is_ended_by_a_token_that_was_not_sampled():
    conversation = talk(SayingEngine(lambda prompt, seed: "ab", finish="length"))
    await conversation.reply(user("1"))
    await conversation.reply(user("2"))
    made = conversation.episode(Score(0.0))
    assert made.finish == "length"
    [one] = made.rollouts
    at = len([USER, *ids("1"), ASSISTANT, *ids("ab")])
    assert one.tokens[at] == END
    assert not one.sampled[at]


async def test_finish_is_that_of_the_last_reply():
    conversation = talk(SayingEngine())
    assert conversation.finish == "stop"
    cut = talk(SayingEngine(finish="length"))
    await cut.reply(user("1"))
    assert cut.finish == "length"


async def test_a_score_that_abstains_is_a_metric_of_the_episode():
    conversation = talk(SayingEngine())
    await conversation.reply(user("1"))
    assert conversation.episode(Score(0.0, metrics={"b": 2.0}, abstains=True)).metrics == {"b": 2.0, ABSTAINED: 1.0}
    assert conversation.episode(Score(0.0)).metrics == {}


async def test_what_was_sampled_is_never_encoded_again():
    """A special token inside a reply: text shows nothing of it, so encoding the text again would lose it."""

    class Odd(SayingEngine):
        async def sample(self, prompt, n, sampling, seeds, deadline_s):
            await super().sample(prompt, n, sampling, seeds, deadline_s)
            drawn_ids = tokens([*ids("a"), USER, *ids("b"), END])
            return [Completion(drawn_ids, np.zeros(4, np.float32), np.zeros(4, np.int32), "stop", 1.0)]

    conversation = talk(Odd())
    answer = await conversation.reply(user("1"))
    assert answer["content"] == "ab"
    await conversation.reply(user("2"))
    [one] = conversation.episode(Score(0.0)).rollouts
    assert one.tokens[one.sampled].tolist() == [*ids("a"), USER, *ids("b"), END] * 2


async def test_starting_over_makes_another_rollout_of_the_same_episode():
    engine = SayingEngine(lambda prompt, seed: "x")
    conversation = talk(engine)
    await conversation.reply(user("1"))
    conversation.start_over()
    conversation.start_over()  # nothing was sampled since: no empty rollout
    await conversation.reply(user("2"))
    made = conversation.episode(Score(0.0))
    assert [one.tokens.tolist() for one in made.rollouts] == [
        [USER, *ids("1"), ASSISTANT, *ids("x"), END],
        [USER, *ids("2"), ASSISTANT, *ids("x"), END],
    ]
    assert [message["content"] for message in made.messages] == ["1", "x", "2", "x"]


async def test_every_reply_has_a_seed_of_its_own_that_derives_from_the_rollouts():
    engine = SayingEngine()
    conversation = talk(engine, seed=42)
    await conversation.reply(user("1"))
    conversation.start_over()
    await conversation.reply(user("2"))
    assert [seeds for _, _, seeds, _ in engine.requests] == [[derive(42, 0)], [derive(42, 1)]]


async def test_its_own_sampling_goes_before_the_runs_and_marks_the_rollout():
    engine = SayingEngine()
    conversation = talk(engine, sampling=Sampling(max_tokens=3, temperature=0.5, top_k=4))
    await conversation.reply(user("1"))
    assert engine.requests[0][1] == Sampling(max_tokens=3, temperature=0.5, top_k=4)
    [one] = conversation.episode(Score(0.0)).rollouts
    assert one.temperature == 0.5
    assert one.truncated


async def test_one_truncated_reply_marks_the_whole_rollout():
    policy = EnginePolicy(SayingEngine(), TOKENIZER, Sampling(top_p=0.9), deadline_s=10)
    conversation = Conversation(policy, seed=0)
    await conversation.reply(user("1"))
    policy.sampling = Sampling()
    await conversation.reply(user("2"))
    [one] = conversation.episode(Score(0.0)).rollouts
    assert one.truncated


async def test_an_episode_of_no_reply_is_refused():
    with pytest.raises(DataError, match="at least one reply"):
        talk(SayingEngine()).episode(Score(1.0))


async def test_a_reply_that_fails_leaves_the_conversation_as_it_was():
    class Once(SayingEngine):
        async def sample(self, prompt, n, sampling, seeds, deadline_s):
            if len(self.requests) == 1:
                self.requests.append(())
                raise DataError("lost")
            return await super().sample(prompt, n, sampling, seeds, deadline_s)

    conversation = talk(Once())
    await conversation.reply(user("1"))
    with pytest.raises(DataError, match="lost"):
        await conversation.reply(user("2"))
    [one] = conversation.episode(Score(0.0)).rollouts
    assert one.tokens.tolist() == [USER, *ids("1"), ASSISTANT, *ids("ok"), END]
    assert len(conversation.messages) == 2
