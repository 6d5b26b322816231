"""Control turned round, without gem: one thread asks and answers, the play waits on the shared loop."""

import asyncio
import threading
import time

import pytest

from atropos_adapter_roll import texts
from atropos_adapter_roll.play import Asked, Play
from atropos_adapter_roll.shared import Loop
from atropos_core.conversation import Conversation
from atropos_core.interfaces import Score
from atropos_core.types import Episode, Failed

USER = {"role": "user", "content": "?"}


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


def play(loop, playing, *, action=5.0, episode=10.0, cleanup=2.0):
    return Play(loop, playing, action_deadline_s=action, episode_deadline_s=episode, cleanup_deadline_s=cleanup)


def content(event):
    assert isinstance(event, Asked), event
    return texts.read(event.prompt).messages[-1]["content"]


async def ask(policy, content="?"):
    talk = Conversation(policy, seed=0)
    await talk.reply({"role": "user", "content": content})
    return talk.episode(Score(1.0))


def test_a_play_waits_for_each_answer_and_goes_on_from_it(loop):
    said = []

    async def playing(policy):
        talk = Conversation(policy, seed=0)
        said.append((await talk.reply(USER))["content"])
        said.append((await talk.reply({"role": "user", "content": "more"}))["content"])
        return talk.episode(Score(0.5))

    one = play(loop, playing)
    assert content(one.next(2)) == "?"
    one.answer("a")
    assert content(one.next(2)) == "more"
    one.answer("b")
    ended = one.next(2)
    assert isinstance(ended, Episode)
    assert (ended.score, said) == (0.5, ["a", "b"])


def test_calls_at_once_are_served_in_the_order_in_which_they_were_made(loop):
    got = []

    async def playing(policy):
        async def member(number):
            talk = Conversation(policy, seed=0)
            got.append((number, (await talk.reply({"role": "user", "content": str(number)}))["content"]))
            return talk

        talks = await asyncio.gather(*(member(number) for number in range(8)))
        return talks[0].episode(Score(1.0))

    one = play(loop, playing)
    for number in range(8):
        assert content(one.next(2)) == str(number)
        one.answer(f"to {number}")
    assert isinstance(one.next(2), Episode)
    assert sorted(got) == [(number, f"to {number}") for number in range(8)]


def test_a_call_that_the_play_gave_up_is_passed_over(loop):
    async def playing(policy):
        async with asyncio.timeout(0.05):
            try:
                await ask(policy, "given up")
            except asyncio.CancelledError:
                pass
        return await ask(policy, "wanted")

    async def outlasting(policy):
        try:
            return await playing(policy)
        except TimeoutError:
            return await ask(policy, "wanted")

    one = play(loop, outlasting)
    time.sleep(0.3)
    assert content(one.next(2)) == "wanted"


def test_more_than_one_reply_to_a_prompt_is_refused_by_name(loop):
    async def playing(policy):
        await policy.sample(await policy.render([USER]), n=4, seed=0)

    ended = play(loop, playing).next(2)
    assert isinstance(ended, Failed)
    assert "sample(n=4)" in ended.cause


def test_a_trainer_that_never_answers_ends_the_play_from_inside(loop):
    tidied = threading.Event()

    async def playing(policy):
        try:
            return await ask(policy)
        finally:
            tidied.set()

    one = play(loop, playing, action=0.5)
    assert isinstance(one.next(2), Asked)
    ended = one.next(2)
    assert isinstance(ended, Failed)
    assert "the trainer gave no answer within 0.5 s" in ended.cause
    assert tidied.is_set()


def test_an_episode_has_a_deadline_in_all(loop):
    ended = play(loop, lambda policy: asyncio.sleep(60), episode=0.1).next(2)
    assert isinstance(ended, Failed)
    assert "the episode gave no answer within 0.1 s" in ended.cause


def test_stopping_waits_until_the_play_has_cleaned_up(loop):
    tidied = []

    async def playing(policy):
        try:
            return await ask(policy)
        finally:
            await asyncio.sleep(0.2)
            tidied.append(True)

    one = play(loop, playing)
    one.next(2)
    assert one.stop()
    assert tidied == [True]
    assert one.stop()


def test_an_answer_that_comes_after_the_end_does_nothing(loop):
    one = play(loop, ask)
    one.next(2)
    one.stop()
    one.answer("late")
    assert one.next(0.1) is None


def test_a_play_that_refuses_to_end_is_left_behind_and_said_so(loop, caplog):
    released = threading.Event()

    async def playing(policy):
        while not released.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue

    one = play(loop, playing, cleanup=0.1)
    assert not one.stop()
    assert "left behind" in caplog.text
    released.set()


def test_a_play_whose_exception_is_no_exception_fails_all_the_same(loop):
    async def playing(policy):
        raise SystemExit(3)

    ended = play(loop, playing).next(2)
    assert isinstance(ended, Failed)
    assert "raised SystemExit(3)" in ended.cause
    assert isinstance(play(loop, ask).next(2), Asked), "the loop goes on"


def test_plays_share_one_thread_and_install_nothing(loop):
    names = []

    async def playing(policy):
        names.append(threading.current_thread().name)
        return await ask(policy)

    policy_before = asyncio.get_event_loop_policy()
    plays = [play(loop, playing) for _ in range(64)]
    for one in plays:
        assert isinstance(one.next(5), Asked)
    for one in plays:
        one.answer("x")
    assert all(isinstance(one.next(5), Episode) for one in plays)
    assert set(names) == {"atropos-roll"}
    assert asyncio.get_event_loop_policy() is policy_before
