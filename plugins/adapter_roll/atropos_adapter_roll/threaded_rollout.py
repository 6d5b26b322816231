"""One rollout with inverted control: the environment's coroutine waits at each call of the model, on the shared loop. Another thread takes
its requests and brings the answers. Nothing runs twice.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_adapter_roll import texts
from atropos_adapter_roll.shared import Loop
from atropos_core.conversation import Policy
from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.guards.deadlines import within
from atropos_core.rollouts.replies import message_of
from atropos_core.rollouts.runner import checked_episode, failed_by
from atropos_core.types import Completion, Episode, Failed, Message, Sampling, Tokens

START_DEADLINE_S = 30.0  # for the loop to start a rollout: beyond it, another one blocks the loop
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PendingReply:
    """A call of the model that waits for its answer."""

    prompt: Tokens
    answer: asyncio.Future[str]


Event = PendingReply | Episode | Failed
RunEpisode = Callable[[Policy], Coroutine[Any, Any, Episode | Failed]]


class ThreadedRollout:
    """Runs `run_episode(policy)` on the loop. One other thread calls `next`, `answer` and `stop`."""

    def __init__(
        self,
        loop: Loop,
        run_episode: RunEpisode,
        *,
        action_deadline_s: float,
        episode_deadline_s: float,
        cleanup_deadline_s: float,
        members: int = 1,
    ) -> None:
        self._loop = loop
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waiting: PendingReply | None = None  # taken, but not answered yet
        self._cleanup_deadline_s = cleanup_deadline_s
        self._policy = AskingPolicy(self._events.put, action_deadline_s, members=members)
        self._task = loop.start(self._run(run_episode, episode_deadline_s), START_DEADLINE_S)

    async def _run(self, run_episode: RunEpisode, deadline_s: float) -> None:
        try:
            self._events.put(checked_episode(await within(run_episode(self._policy), deadline_s, "the episode")))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            self._events.put(failed_by(error, "rollout"))
        finally:
            self._policy.closed = True

    def next(self, deadline_s: float) -> Event | None:
        """Return the next event, with calls of the model in their order; None if there is none in time."""
        until = time.monotonic() + deadline_s
        while True:
            try:
                event = self._events.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                return None
            if isinstance(event, PendingReply):
                if event.answer.done():
                    continue  # the environment has given this call up
                self._waiting = event
            return event

    def answer(self, text: str) -> Tokens:
        """Answer the call that `next` gave last. Returns the ids of its whole history. A late answer is not an error: the environment's
        reaction to the delay comes next."""
        pending, self._waiting = self._waiting, None
        assert pending is not None, "answer only a call that was taken"

        def resolve() -> None:
            if not pending.answer.done():
                pending.answer.set_result(text)

        self._loop.soon(resolve)
        return np.concatenate([pending.prompt, texts.replied(text)])

    def stop(self) -> bool:
        """Cancel the rollout, and wait until it has cleaned up. False if that takes too long: it is left behind."""

        async def end() -> bool:
            self._policy.closed = True
            self._task.cancel()
            _, left = await asyncio.wait({self._task}, timeout=self._cleanup_deadline_s)
            return not left

        try:
            ended = self._loop.call(end(), self._cleanup_deadline_s + 1, "the end of an episode")
        except DeadlineExceeded:
            ended = False  # something blocks the loop
        if not ended:
            log.error("an episode was cancelled and still runs after %g s; it is left behind", self._cleanup_deadline_s)
        return ended


class AskingPolicy(Policy):
    """A policy whose replies come from elsewhere: `ask` passes every call on. With `members` above 1 the rollout is of a group whose
    replies meet elsewhere: it may ask for all of them at once, and is stopped before it gets any."""

    def __init__(self, ask: Callable[[PendingReply], None], action_deadline_s: float, *, members: int = 1) -> None:
        self.sampling = Sampling()
        self.closed = False
        self._ask = ask
        self._deadline_s = action_deadline_s
        self._members = members

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        if not messages and after is None:
            raise DataError("render() was given no messages")
        return texts.rendered(messages, tools if after is None else None)

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Temperature, length and seed are the trainer's: those requested here are ignored."""
        if not 1 <= n <= self._members:
            raise DataError(
                f"sample(n={n}): an episode in ROLL is one conversation, and cannot hold {n} replies to one prompt.",
                remedy="Ask for one reply at a time; several rollouts of a task are members of a group, each with an episode.",
            )
        if sampling is not None and sampling != self.sampling:
            log.warning("the environment asks for %s: in ROLL, generating_args decide", sampling)
        pending = PendingReply(np.asarray(prompt, np.int32), asyncio.get_running_loop().create_future())
        if self.closed:
            raise DataError("sample() was called after the end of the episode")
        self._ask(pending)
        limit_s = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        return [completion(await within(pending.answer, limit_s, "the trainer"), sampling or self.sampling)]

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return message_of(texts.to_text(tokens[tokens < texts.MESSAGE_START]))


def completion(text: str, sampling: Sampling, member: int = 0) -> Completion:
    """A reply as an environment gets it. The trainer's own ids and logprobs are with the trainer."""
    ids = texts.replied(text, member)
    zeros = np.zeros(len(ids), np.float32)
    return Completion(ids, zeros, np.zeros(len(ids), np.int32), "stop", sampling.temperature, sampling.truncated)
