"""One episode of an agent: its calls, each answered by the policy and recorded before the answer is given.

Samples are kept whatever happens to the call. Sampling is the session's own task, so a client that goes away cannot cut a turn in
half.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import replace

from atropos_agent_api.calls import SESSION_ENDED, Answer, Call, CallRefused
from atropos_agent_api.sessions.limits import (
    TokenBudget,
    bounded,
    check_call,
    check_calls,
    check_length,
    check_requests,
    check_sampling,
    overruled,
)
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.prompts import Prompt, PromptBuilder
from atropos_agent_api.sessions.record import SessionRecord, call_records, metrics_of
from atropos_agent_api.sessions.replies import choice_of, reply_of
from atropos_agent_api.sessions.side_calls import description, side_turns
from atropos_agent_api.tokens.account import account_of, is_trained, name_of
from atropos_agent_api.tokens.canonical import digest
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_agent_api.tokens.token_tree import Reply, TokenTree, Turn
from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError
from atropos_core.rollouts.stop_texts import sample_to_stop
from atropos_core.seeds import derive
from atropos_core.types import Sampling


class Session:
    """Used concurrently on one event loop. The prompt and seed of a call depend only on its conversation, and on how often the
    same one came before. They do not depend on which of two simultaneous calls came first."""

    def __init__(
        self, policy: Policy, format: ChatFormat, options: SessionOptions, *, seed: int, name: str, prompt: str = ""
    ) -> None:
        """`prompt`: the task's, by which calls outside the task are recognised; empty for none."""
        self.id = secrets.token_urlsafe(18)
        self.key = f"sk-atropos-{secrets.token_urlsafe(24)}"
        self.name = name  # for people: the task's
        self.ended = ""  # the reason, once it has ended
        self.failure: AtroposError | None = None  # the first error of the policy: it may have to end the run
        self._policy = policy
        self._format = format
        self._options = options
        self._prompt = prompt
        self._seed = seed
        self._tree = TokenTree()
        self._prompts = PromptBuilder(format, self._tree, options.history)
        self._repeats: Counter[bytes] = Counter()
        self._requests = self._calls = self._refused = self._failed = 0
        self._budget = TokenBudget(options.max_sampled_tokens)
        self._pending: set[asyncio.Task[Answer]] = set()
        self._last: list[Reply] = []  # of each call that may be trained, in the order in which they were answered

    def arrived(self) -> None:
        """Count a request before any of it is read. Raises CallRefused if the session has no call left. Requests that are refused, or
        that count tokens, have a bound of the same size as those that are answered."""
        if self.ended:
            raise self._refused_as_ended()
        check_calls(self._calls, self._options)
        self._requests += 1
        check_requests(self._requests, self._options)

    async def answer(self, call: Call) -> Answer:
        """Answer a call. Raises CallRefused. If cancelled, sampling continues and is recorded as an undelivered answer."""
        try:
            turn, prompt, sampling = await self._begin(call)
        except CallRefused:
            self._refused += 1
            raise
        task = asyncio.create_task(self._sample(call, turn, prompt, sampling))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            turn.is_delivered = False
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # so that its error counts as seen
            raise
        if task.cancelled():
            raise self._refused_as_ended()
        return task.result()

    async def count(self, call: Call) -> int:
        """The number of tokens in the prompt of this call. Raises CallRefused."""
        if self.ended:
            raise self._refused_as_ended()
        check_call(call)
        return len((await self._prompts.prompt(call)).ids)

    def not_delivered(self, answer_id: str) -> None:
        """Record that the client was gone before the answer was sent: an orphan, unless a later call continues it."""
        for turn in self._tree.turns:
            if name_of(turn) == answer_id:
                turn.is_delivered = False

    def end(self, reason: str) -> None:
        """End the session: calls in flight and later ones are refused with 409, and nothing more is recorded. May be called twice."""
        if not self.ended:
            self.ended = reason or "it was closed"
            for task in self._pending:
                task.cancel()
            self._budget.close()

    def record(self) -> SessionRecord:
        """The record of all calls that were answered so far."""
        turns = [turn for turn in self._tree.turns if turn.replies]
        side = side_turns(turns, self._prompt)
        for turn in turns:
            turn.is_side = turn in (side or ())
            turn.is_left_out = turn.is_side and self._options.only_main
        account, calls = account_of(turns), call_records(turns)
        last = next((reply for reply in reversed(self._last) if is_trained(reply.turn)), None)
        return SessionRecord(
            account=account,
            calls=calls,
            messages=() if last is None else last.conversation,
            finish="stop" if last is None else last.completion.finish,
            metrics=metrics_of(account, calls, refused=self._refused, failed=self._failed),
            side=next((description(turn) for turn in turns if turn.is_side), ""),
            ends_aside=last is not None and last.turn.is_side,
            shows_task=side is not None,
        )

    async def _begin(self, call: Call) -> tuple[Turn, Prompt, Sampling]:
        if self.ended:
            raise self._refused_as_ended()
        run = self._policy.sampling
        check_call(call)
        check_sampling(call, run, self._options)
        check_length(call, self._options)
        check_calls(self._calls, self._options)
        self._calls += 1  # before the first await, or simultaneous calls would exceed the limit together
        try:
            return await self._begun(call, run)
        except BaseException:
            self._calls -= 1
            raise

    async def _begun(self, call: Call, run: Sampling) -> tuple[Turn, Prompt, Sampling]:
        prompt = await self._prompts.prompt(call)
        sampling = bounded(call, len(prompt.ids), run, self._options)
        most = await self._budget.take(call.n, sampling.max_tokens)
        if self.ended:
            self._budget.give_back(call.n * most)
            raise self._refused_as_ended()
        sampling = replace(sampling, max_tokens=most)
        same = digest(prompt.ids.tobytes(), call.n, list(call.stop), call.max_tokens)
        turn = Turn(
            seed=derive(self._seed, same.hex(), self._repeats[same]),
            dialect=call.dialect,
            parent=prompt.parent,
            beginning=prompt.beginning,
            messages=prompt.messages,
            units=prompt.units,
            position=prompt.position,
            added=prompt.added,
            tools=tuple(sorted({tool["function"]["name"] for tool in call.tools})),
            is_trained=self._options.trained_calls(call),
            is_cut=sampling.max_tokens < run.max_tokens,
            hints=dict(call.hints),
            overruled=dict(overruled(call, run)),
        )
        self._repeats[same] += 1
        self._tree.begin(turn)
        return turn, prompt, sampling

    async def _sample(self, call: Call, turn: Turn, prompt: Prompt, sampling: Sampling) -> Answer:
        unused = 0  # a failed call may have sampled all of its tokens
        try:
            completions = await sample_to_stop(
                self._policy, prompt.ids, call.n, call.stop, sampling, turn.seed, self._format
            )
            unused = call.n * sampling.max_tokens - sum(len(one.tokens) for one in completions)
            replies = [await reply_of(call, turn, prompt, one, self._format, at) for at, one in enumerate(completions)]
            choices = [await choice_of(call, reply, self._format) for reply in replies]
        except AtroposError as error:
            self._tree.remove(turn)
            self._failed += 1
            self.failure = self.failure or error
            fact = Exception.__str__(error).splitlines()[:1] or [type(error).__name__]
            why = " ".join([*fact, error.remedy or ""]).rstrip()
            raise CallRefused(f"the policy could not answer: {why}", status=500, code="policy_failed") from error
        except asyncio.CancelledError:
            self._tree.remove(turn)
            raise
        finally:
            self._budget.give_back(unused)
        self._tree.add(turn, replies)
        if turn.is_trained:
            self._last.append(replies[-1])
        return Answer(
            id=name_of(turn),
            model=call.model,
            choices=tuple(choices),
            prompt_tokens=len(prompt.ids),
            cached_tokens=len(prompt.history),
            created=int(time.time()),
        )

    def _refused_as_ended(self) -> CallRefused:
        return CallRefused(f"this session has ended: {self.ended}. {SESSION_ENDED}", status=409, code="session_ended")
