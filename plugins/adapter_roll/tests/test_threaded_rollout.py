"""Control turned round, without gem: one thread asks and answers, the rollout waits on the shared loop."""

import asyncio
import threading

import pytest

from atropos_adapter_roll import texts
from atropos_adapter_roll.shared import Loop
from atropos_adapter_roll.threaded_rollout import PendingReply, ThreadedRollout
from atropos_core.conversation import Conversation
from atropos_core.types import Episode, Failed, Score

USER = {"role": "user", "content": "?"}


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


def threaded(loop, run_episode, *, action=5.0, episode=10.0, cleanup=2.0):
    return ThreadedRollout(
        loop, run_episode, action_deadline_s=action, episode_deadline_s=episode, cleanup_deadline_s=cleanup
    )


def content(event):
    assert isinstance(event, PendingReply), event
    return texts.read(event.prompt).messages[-1]["content"]


async def ask(policy, content="?"):
    talk = Conversation(policy, seed=0)
    await talk.reply({"role": "user", "content": content})
    return talk.episode(Score(1.0))


def test_a_rollout_waits_for_each_answer_and_goes_on_from_it(loop):
    replies = []

    async def run_episode(policy):
        talk = Conversation(policy, seed=0)
        replies.append((await talk.reply(USER))["content"])
        replies.append((await talk.reply({"role": "user", "content": "more"}))["content"])
        return talk.episode(Score(0.5))

    one = threaded(loop, run_episode)
    assert content(one.next(60)) == "?"
    one.answer("a")
    assert content(one.next(60)) == "more"
    one.answer("b")
    ended = one.next(60)
    assert isinstance(ended, Episode)
    assert (ended.score, replies) == (0.5, ["a", "b"])


def test_calls_at_once_are_served_in_the_order_in_which_they_were_made(loop):
    got = []

    async def run_episode(policy):
        async def member(number):
            talk = Conversation(policy, seed=0)
            got.append((number, (await talk.reply({"role": "user", "content": str(number)}))["content"]))
            return talk

        talks = await asyncio.gather(*(member(number) for number in range(8)))
        return talks[0].episode(Score(1.0))

    one = threaded(loop, run_episode)
    for number in range(8):
        assert content(one.next(60)) == str(number)
        one.answer(f"to {number}")
    assert isinstance(one.next(60), Episode)
    assert sorted(got) == [(number, f"to {number}") for number in range(8)]


def test_a_call_that_the_rollout_gave_up_is_passed_over(loop):
    gave_up = threading.Event()

    async def run_episode(policy):
        async with asyncio.timeout(0.05):
            try:
                await ask(policy, "given up")
            except asyncio.CancelledError:
                gave_up.set()
        return await ask(policy, "wanted")

    async def outlasting(policy):
        try:
            return await run_episode(policy)
        except TimeoutError:
            return await ask(policy, "wanted")

    one = threaded(loop, outlasting)
    assert gave_up.wait(60)
    assert content(one.next(60)) == "wanted"


def test_more_than_one_reply_to_a_prompt_is_refused_by_name(loop):
    async def run_episode(policy):
        await policy.sample(await policy.render([USER]), n=4, seed=0)

    ended = threaded(loop, run_episode).next(60)
    assert isinstance(ended, Failed)
    assert "sample(n=4)" in ended.cause


def test_a_trainer_that_never_answers_ends_the_rollout_from_inside(loop):
    tidied = threading.Event()

    async def run_episode(policy):
        try:
            return await ask(policy)
        finally:
            tidied.set()

    one = threaded(loop, run_episode, action=0.5)
    assert isinstance(one.next(60), PendingReply)
    ended = one.next(60)
    assert isinstance(ended, Failed)
    assert "the trainer gave no answer within 0.5 s" in ended.cause
    assert tidied.is_set()


def test_an_episode_has_a_deadline_in_all(loop):
    ended = threaded(loop, lambda policy: asyncio.sleep(60), episode=0.1).next(60)
    assert isinstance(ended, Failed)
    assert "the episode gave no answer within 0.1 s" in ended.cause


def test_stopping_waits_until_the_rollout_has_cleaned_up(loop):
    tidied = []

    async def run_episode(policy):
        try:
            return await ask(policy)
        finally:
            await asyncio.sleep(0.2)
            tidied.append(True)

    one = threaded(loop, run_episode)
    one.next(60)
    assert one.stop()
    assert tidied == [True]
    assert one.stop()


def test_an_answer_that_comes_after_the_end_does_nothing(loop):
    one = threaded(loop, ask)
    one.next(60)
    one.stop()
    one.answer("late")
    assert one.next(0.1) is None


def test_a_rollout_that_refuses_to_end_is_left_behind_and_reported(loop, caplog):
    released = threading.Event()

    async def run_episode(policy):
        while not released.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue

    one = threaded(loop, run_episode, cleanup=0.1)
    assert not one.stop()
    assert "left behind" in caplog.text
    released.set()


def test_a_rollout_whose_exception_is_no_exception_fails_all_the_same(loop):
    async def run_episode(policy):
        raise SystemExit(3)

    ended = threaded(loop, run_episode).next(60)
    assert isinstance(ended, Failed)
    assert "raised SystemExit(3)" in ended.cause
    assert isinstance(threaded(loop, ask).next(60), PendingReply), "the loop goes on"


def test_rollouts_share_one_thread_and_install_nothing(loop):
    names = []

    async def run_episode(policy):
        names.append(threading.current_thread().name)
        return await ask(policy)

    policy_before = asyncio.get_event_loop_policy()
    rollouts = [threaded(loop, run_episode) for _ in range(64)]
    for one in rollouts:
        assert isinstance(one.next(5), PendingReply)
    for one in rollouts:
        one.answer("x")
    assert all(isinstance(one.next(5), Episode) for one in rollouts)
    assert set(names) == {"atropos-roll"}
    assert asyncio.get_event_loop_policy() is policy_before
