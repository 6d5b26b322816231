"""One episode of an agent: its calls, each answered by the policy and recorded before the answer is given.

What is sampled is kept whatever becomes of the call: sampling is the session's own task, so that a client that goes away
takes no half of a turn along.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atropos_agent_api.calls import Answer, Call, CallRefused, Choice
from atropos_agent_api.sessions.cuts import end_after_one_call, end_at_stop, without_stop
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.tokens.account import Account, account_of, name_of
from atropos_agent_api.tokens.canonical import Unit, digest, units_of
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_agent_api.tokens.token_tree import Beginning, Match, Reply, TokenTree, Turn, positions_of
from atropos_core.errors import AtroposError, DataError
from atropos_core.interfaces import Policy
from atropos_core.seeds import derive
from atropos_core.types import Completion, Message, Metrics, Rollout, Sampling, Tokens

_NOTHING: Tokens = np.zeros(0, np.int32)


@dataclass(frozen=True)
class SessionRecord:
    """What an episode was. `messages` is the conversation that was answered last, of those that are trained."""

    account: Account
    messages: tuple[Message, ...]
    finish: str  # of the last reply of `messages`
    metrics: Metrics

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Empty where nothing that is trained was sampled."""
        return self.account.rollouts


@dataclass(frozen=True)
class _Prompt:
    """What a call is sampled from."""

    match: Match
    units: tuple[Unit, ...]
    positions: tuple[bytes, ...]
    history: Tokens  # stored ids that it extends
    added: Tokens  # ids after those
    opening: Tokens  # of `added`, those at its end with which the reply begins

    @property
    def ids(self) -> Tokens:
        return np.concatenate([self.history, self.added])


class Session:
    """Used concurrently on one event loop. `failure` is the error of the policy that nobody but the run can mend, if any."""

    def __init__(self, policy: Policy, format: ChatFormat, options: SessionOptions, *, seed: int, name: str) -> None:
        self.id = secrets.token_urlsafe(18)
        self.key = f"sk-atropos-{secrets.token_urlsafe(24)}"
        self.name = name  # for people: the task's
        self.ended = ""  # why, once it has
        self.failure: AtroposError | None = None
        self._policy = policy
        self._format = format
        self._options = options
        self._seed = seed
        self._tree = TokenTree()
        self._repeats: Counter[bytes] = Counter()
        self._counts: Counter[str] = Counter()
        self._sampling: set[asyncio.Task[Answer]] = set()
        self._last: Reply | None = None

    async def answer(self, call: Call) -> Answer:
        """Raises CallRefused. Cancelled, it goes on sampling: what comes is recorded as an answer that nobody saw."""
        turn, prompt, sampling = await self._begin(call)
        task = asyncio.create_task(self._sample(call, turn, prompt, sampling))
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            turn.is_delivered = False
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else looks
            raise
        if task.cancelled():
            raise self._refused_as_ended()
        return task.result()

    async def count(self, call: Call) -> int:
        """How many tokens the prompt of this call has. Raises CallRefused."""
        self._check(call)
        return len((await self._prompt(call)).ids)

    def not_delivered(self, answer_id: str) -> None:
        """The answer was made, and did not reach the agent: an orphan, unless a later call continues it."""
        for turn in self._tree.turns:
            if name_of(turn) == answer_id:
                turn.is_delivered = False

    def end(self, reason: str) -> None:
        """Calls in flight and later ones are refused with 409. What is recorded stays as it is."""
        if not self.ended:
            self.ended = reason or "ended"
            for task in self._sampling:
                task.cancel()

    def record(self) -> SessionRecord:
        """Of all calls that were answered so far."""
        turns = [turn for turn in self._tree.turns if turn.replies]
        account = account_of(turns)
        chain = self._last.chain if self._last is not None else []
        messages = tuple(said for reply in chain for said in (*reply.turn.messages, reply.message))
        finish = self._last.completion.finish if self._last is not None else "stop"
        return SessionRecord(account, messages, finish, self._metrics(account, turns))

    async def _begin(self, call: Call) -> tuple[Turn, _Prompt, Sampling]:
        self._check(call)
        sampling = self._run_sampling(call)
        prompt = await self._prompt(call)
        sampling = self._bounded(call, prompt, sampling)
        if self.ended:
            raise self._refused_as_ended()
        same = digest(prompt.ids.tobytes(), call.n, list(call.stop), call.max_tokens)
        seed = derive(self._seed, same.hex(), self._repeats[same])
        self._repeats[same] += 1
        turn = Turn(
            seed=seed,
            parent=prompt.match.parent,
            beginning=prompt.match.beginning,
            messages=tuple(unit.message for unit in prompt.match.remainder),
            units=len(prompt.units),
            position=prompt.positions[-1],
            added=prompt.added,
            is_trained=self._options.trained_calls(call),
            hints=dict(call.hints),
        )
        self._counts["calls"] += 1
        self._tree.begin(turn)
        return turn, prompt, sampling

    async def _sample(self, call: Call, turn: Turn, prompt: _Prompt, sampling: Sampling) -> Answer:
        try:
            completions = await self._policy.sample(prompt.ids, n=call.n, sampling=sampling, seed=turn.seed)
            if self.ended:
                raise asyncio.CancelledError
            replies = [await self._reply(call, turn, prompt, one, at) for at, one in enumerate(completions)]
            choices = [await self._choice(call, reply) for reply in replies]
        except AtroposError as error:
            self._tree.remove(turn)
            self._counts["failed_calls"] += 1
            self.failure = self.failure or error
            raise CallRefused(
                f"the policy could not answer: {str(error).splitlines()[0]}", status=500, code="policy_failed"
            ) from error
        except asyncio.CancelledError:
            self._tree.remove(turn)
            raise
        self._tree.add(turn, replies)
        self._counts["sampled_tokens"] += sum(len(completion.tokens) for completion in completions)
        if turn.is_trained:
            self._last = replies[-1]
        return Answer(
            id=name_of(turn),
            model=call.model,
            choices=tuple(choices),
            prompt_tokens=len(prompt.ids),
            cached_tokens=len(prompt.history),
            created=int(time.time()),
        )

    def _check(self, call: Call) -> None:
        if self.ended:
            raise self._refused_as_ended()
        if not call.messages and (call.prompt is None or not len(call.prompt)):
            what = "prompt" if call.dialect == "completions" else "messages"
            raise CallRefused(f"{what} is empty: there is nothing to answer.", field=what)
        if call.n < 1:
            raise CallRefused(f"n is {call.n}, and an answer has at least one choice.", field="n")
        if self._options.max_calls and self._counts["calls"] >= self._options.max_calls:
            raise CallRefused(
                f"this session has answered {self._options.max_calls} calls, which is all that it may.",
                status=403,
                code="call_limit",
            )

    def _run_sampling(self, call: Call) -> Sampling:
        """The run's own, whatever the call wants."""
        run = self._policy.sampling
        for name, wanted in call.sampling.items():
            given = getattr(run, name, None)
            if wanted == given:
                continue
            self._overrule(
                name, f"{name} is {wanted}, and this run samples with {'its own' if given is None else given}"
            )
        for name in call.left_out:
            self._overrule(name.partition(":")[0], f"{name} is not there for the model")
        return run

    def _overrule(self, field: str, why: str) -> None:
        """Count it, or refuse it, as the session's options say."""
        self._counts[f"{self._options.client_sampling}d_sampling"] += 1
        if self._options.client_sampling == "refuse":
            raise CallRefused(
                f'{why}: leave it out, or have the run say sampling = "overrule".',
                field=field,
                code="unsupported_parameter",
            )

    def _bounded(self, call: Call, prompt: _Prompt, sampling: Sampling) -> Sampling:
        """With no more tokens than the run, the call, the model's context and the session leave."""
        bounds = [sampling.max_tokens]
        if call.max_tokens is not None:
            if call.max_tokens < 1:
                raise CallRefused(
                    f"max_tokens is {call.max_tokens}, and an answer has at least one.", field="max_tokens"
                )
            bounds.append(call.max_tokens)
        if self._options.context_tokens:
            bounds.append(self._options.context_tokens - len(prompt.ids))
            if bounds[-1] < 1:
                raise CallRefused(
                    f"the prompt has {len(prompt.ids)} tokens, and the model's context is {self._options.context_tokens}.",
                    field="messages" if call.messages else "prompt",
                    code="context_length_exceeded",
                )
        if self._options.max_sampled_tokens:
            bounds.append(self._options.max_sampled_tokens - self._counts["sampled_tokens"])
            if bounds[-1] < 1:
                raise CallRefused(
                    f"{self._counts['sampled_tokens']} tokens were sampled in this session, which is all that it may have.",
                    status=403,
                    code="token_limit",
                )
        return replace(sampling, max_tokens=min(bounds))

    async def _prompt(self, call: Call) -> _Prompt:
        try:
            if call.prompt is not None:
                return await self._text_prompt(call.prompt)
            units = tuple(units_of(call.messages))
            positions = tuple(positions_of(units, call.tools))
            match = self._tree.match(units, positions)
            history, added, match = await self._continued(match, units, call)
            opening = await self._opening(call)
        except UnicodeEncodeError as error:
            raise CallRefused(
                f"a message holds {error.object[error.start]!a}, half of a surrogate pair, which nothing can write down.",
                field="messages" if call.messages else "prompt",
            ) from None
        except DataError as error:
            raise CallRefused(str(error), field="messages" if call.messages else "prompt") from error
        return _Prompt(match, units, positions, history, np.concatenate([added, opening]), opening)

    async def _continued(self, match: Match, units: tuple[Unit, ...], call: Call) -> tuple[Tokens, Tokens, Match]:
        """The stored ids that are extended, what comes after them, and whose they are."""
        parent = match.parent
        if parent is not None and self._options.history == "as_sampled":
            remainder = [unit.message for unit in match.remainder]
            before = parent.history
            size = len(parent.completion.tokens)
            added = await self._format.extend(before[:-size], before[-size:], remainder, call.tools)
            if added is not None:
                return before, added, match
        rendered = await self._format.render([unit.message for unit in units], call.tools)
        for reply in parent.chain[::-1] if parent is not None else ():
            stored = reply.history
            if len(stored) < len(rendered) and np.array_equal(rendered[: len(stored)], stored):
                beginning: Beginning = "extended" if reply is parent else "rewritten"
                return stored, rendered[len(stored) :], Match(reply, beginning, units[reply.turn.units + 1 :])
        return _NOTHING, rendered, Match(None, match.beginning if parent is None else "rewritten", units)

    async def _text_prompt(self, prompt: str | Tokens) -> _Prompt:
        text = prompt if isinstance(prompt, str) else ""
        ids = await self._format.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt, np.int32)
        unit = Unit({"role": "user", "content": text}, digest("prompt", text, ids.tobytes()))
        return _Prompt(Match(None, "new", (unit,)), (unit,), tuple(positions_of((unit,), ())), _NOTHING, ids, _NOTHING)

    async def _opening(self, call: Call) -> Tokens:
        if call.tool_choice in ("auto", "none"):
            return _NOTHING
        name = call.tool_choice.removeprefix("tool:") if call.tool_choice != "required" else None
        names = {tool["function"]["name"] for tool in call.tools}
        if not names or (name is not None and name not in names):
            raise CallRefused(f"tool_choice is {call.tool_choice!r}, and no such tool is given.", field="tool_choice")
        opening = await self._format.opening(name, call.tools)
        if opening is None:
            raise CallRefused(
                f"tool_choice {call.tool_choice!r} cannot be kept: the format {self._format.name!r} of this model has no "
                'beginning of a call that could be given. Use "auto".',
                field="tool_choice",
                code="unsupported_parameter",
            )
        return opening

    async def _reply(self, call: Call, turn: Turn, prompt: _Prompt, completion: Completion, at: int) -> Reply:
        sampled = completion.tokens
        before = prompt.ids[: len(prompt.ids) - len(prompt.opening)]

        async def parse(tokens: Tokens) -> Message:
            if not call.messages:
                return {"role": "assistant", "content": await self._format.text(tokens)}
            return await self._format.parse(before, np.concatenate([prompt.opening, tokens]), call.tools)

        size, stop = await end_at_stop(sampled, call.stop, self._format.text) if call.stop else (len(sampled), "")
        if not call.parallel_tool_calls and call.tool_choice != "none":
            size = await end_after_one_call(sampled[:size], parse)
        message = dict(without_stop(await parse(sampled[:size]), stop))
        calls = message.pop("tool_calls", None) or []
        if call.tool_choice == "none" and calls:
            message["content"], calls = await self._format.text(sampled[:size]), []
        if calls:
            message["tool_calls"] = [
                {**one, "id": f"call_{derive(turn.seed, at, number):016x}"} for number, one in enumerate(calls)
            ]
        position = digest(turn.position, units_of([message])[0].key)
        return Reply(turn, message, position, _kept(completion, size), sampled[size:], stop)

    async def _choice(self, call: Call, reply: Reply) -> Choice:
        completion = reply.completion
        finish = "tool_calls" if completion.finish == "stop" and reply.message.get("tool_calls") else completion.finish
        wanted = range(len(completion.tokens)) if call.logprobs else ()
        texts = tuple([await self._format.text(completion.tokens[at : at + 1]) for at in wanted])
        return Choice(reply.message, finish, completion.tokens, completion.logprobs, texts, reply.stop)

    def _refused_as_ended(self) -> CallRefused:
        return CallRefused(f"this session has ended: {self.ended}.", status=409, code="session_ended")

    def _metrics(self, account: Account, turns: Sequence[Turn]) -> Metrics:
        trained, dropped = account.count("trained"), account.count("dropped")
        sampled = self._counts["sampled_tokens"]
        return {
            "agent/calls": float(len(turns)),
            "agent/failed_calls": float(self._counts["failed_calls"]),
            "agent/rollouts": float(len(account.rollouts)),
            "agent/branches": float(account.branches),
            "agent/orphans": float(account.orphans),
            "agent/rewritten": float(sum(turn.beginning == "rewritten" for turn in turns)),
            "agent/sampled_tokens": float(sampled),
            "agent/trained_tokens": float(trained),
            "agent/context_tokens": float(account.count("context")),
            "agent/dropped_tokens": float(dropped),
            "agent/delivered_share": trained / sampled if sampled else 0.0,
            "agent/overruled_sampling": float(self._counts["overruled_sampling"]),
            "agent/refused_sampling": float(self._counts["refused_sampling"]),
        }


def _kept(completion: Completion, size: int) -> Completion:
    if size == len(completion.tokens):
        return completion
    return replace(
        completion,
        tokens=completion.tokens[:size],
        logprobs=completion.logprobs[:size],
        policy_version=completion.policy_version[:size],
        finish="stop",
    )
