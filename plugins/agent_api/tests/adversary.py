"""A client that does to a session whatever clients have been seen to do, at random and several at once, and an engine that
samples whatever a model might. What the client saw and what the engine sampled are two ledgers, which the session's record
is compared with: `episode` raises AssertionError if they differ.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atropos_agent_api.calls import Answer, Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions, trained_calls
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_core.conversation import Policy
from atropos_core.group_schema import check_episode
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Episode, Message, Tokens
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": {"type": "object"}}}
    for name in ("look_up", "write_down")
)
WORDS = ("the", "a cat", "42", "über", "no\n\nyes", "  ", "{", "END", "naïve 🙂")
FormatOf = Callable[[Policy, ChatTokenizer], ChatFormat]


class WildEngine(LedgerEngine):
    """Samples text, reasoning, calls, broken calls and ids without sense, in tokens that no tokenizer would make of them."""

    def ids(self, prompt: Tokens, seed: int) -> Tokens:
        dice = random.Random(seed)
        if dice.random() < 0.05:
            size = self._tokenizer.vocabulary
            return np.array([dice.randrange(size) for _ in range(dice.randrange(1, 9))], np.int32)
        said = f"<think>{words(dice)}</think>" if dice.random() < 0.4 else ""
        said += words(dice) if dice.random() < 0.7 else ""
        for _ in range(dice.choice((0, 0, 1, 1, 3))):
            arguments = {"b": dice.randrange(9) / 2, "a": [words(dice), {"z": None, "y": True}]}
            written = json.dumps(arguments, ensure_ascii=dice.random() < 0.5)
            name = dice.choice(("look_up", "write_down", "unknown"))
            end = "}" if dice.random() < 0.9 else ""
            said += f'<tool_call>\n{{"name": "{name}", "arguments": {written}{end}\n</tool_call>'
        if dice.random() < 0.5:  # in pieces: other tokens than its text is encoded to
            at = sorted(dice.randrange(len(said) + 1) for _ in range(3))
            pieces = [said[start:end] for start, end in zip([0, *at], [*at, len(said)], strict=True)]
            return np.concatenate([self._tokenizer.encode(piece) for piece in pieces]).astype(np.int32)
        return self._tokenizer.encode(said)

    def steps(self, seed: int) -> int:
        return seed % 5


@dataclass
class Thread:
    """A conversation as the client has it, and the message that it was answered last."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    hints: dict[str, str] = field(default_factory=dict)
    reply: Message | None = None
    call: Call | None = None


class Client:
    """One agent with its sub-agents. `seen` has every answer that it saw and has not made again: token by token, by
    logprob."""

    def __init__(self, session: Session, dice: random.Random) -> None:
        self.session = session
        self.dice = dice
        self.seen: dict[float, bool] = {}  # whether its call is trained
        self.unsure: set[float] = set()  # of answers that it made again while the session ended
        self.done: Counter[str] = Counter()
        self.text = "once"

    async def run(self) -> None:
        threads = [self.new_thread()]
        await self.ask(threads[0])
        acts = [self.go_on] * 6 + [
            self.retry, self.go_away, self.lose, self.fork, self.compact, self.sub_agents, self.twice, self.edit,
            self.change_tools, self.title, self.complete_text,
        ]  # fmt: skip
        for _ in range(self.dice.randrange(2, 11)):
            act = self.dice.choice(acts)
            self.done[act.__name__] += 1
            await act(self.dice.choice(threads), threads)

    def new_thread(self) -> Thread:
        system = [{"role": "system", "content": f"You are {words(self.dice)}."}] * self.dice.randrange(2)
        return Thread([*system, user(self.dice)], TOOLS if self.dice.random() < 0.8 else ())

    async def go_on(self, thread: Thread, threads: list[Thread]) -> None:
        if thread.reply is None:
            return
        echoed = self.mangled(thread.reply)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": words(self.dice)}
            for call in echoed.get("tool_calls") or ()
        ]
        thread.messages = [*thread.messages, *self.split(echoed), *(results or [user(self.dice)])]
        await self.ask(thread)

    async def retry(self, thread: Thread, threads: list[Thread]) -> None:
        """The answer came, and the client makes the call again as if it had not."""
        if thread.call is None:
            return
        call = replace(thread.call, hints=thread.hints)
        if await self.call(call) is not None:
            await self.ask(thread, replace(call, hints={**thread.hints, "retry": "1"}))

    async def go_away(self, thread: Thread, threads: list[Thread]) -> None:
        """The client closes its connection while it waits; then it tries again, says so or not, or does something else."""
        call = self.call_of(thread)
        gone = asyncio.create_task(self.session.answer(call))
        steps = self.dice.randrange(6)
        for _ in range(steps):
            await asyncio.sleep(0)
        gone.cancel()
        try:
            self.see(await gone, call)
        except (asyncio.CancelledError, CallRefused):
            if self.dice.random() < 0.7:
                says_so = steps and self.dice.random() < 0.5
                await self.ask(thread, replace(call, hints={**thread.hints, **({"retry": "1"} if says_so else {})}))

    async def lose(self, thread: Thread, threads: list[Thread]) -> None:
        """A stream that breaks: the server could not write it to its end, and the client continues without it."""
        if (answer := await self.call(self.call_of(thread))) is not None:
            self.unsee(answer)
            self.session.not_delivered(answer.id)

    async def fork(self, thread: Thread, threads: list[Thread]) -> None:
        cut = self.dice.randrange(1, len(thread.messages) + 1)
        other = Thread([*thread.messages[:cut], user(self.dice)], thread.tools)
        threads.append(other)
        await self.ask(other)

    async def compact(self, thread: Thread, threads: list[Thread]) -> None:
        summary = (thread.reply or {}).get("content") or "nothing"
        other = Thread([{"role": "user", "content": f"So far: {summary}"}], thread.tools)
        threads.append(other)
        await self.ask(other)

    async def sub_agents(self, thread: Thread, threads: list[Thread]) -> None:
        several = [self.new_thread() for _ in range(self.dice.randrange(2, 5))]
        for number, one in enumerate(several):
            one.hints = {"agent": f"sub-{number}"}
        threads += several
        await asyncio.gather(*(self.ask(one) for one in several))
        await asyncio.gather(*(self.go_on(one, threads) for one in several))

    async def twice(self, thread: Thread, threads: list[Thread]) -> None:
        """Two identical calls at once, both of which are answered and continued."""
        other = Thread(list(thread.messages), thread.tools)
        threads.append(other)
        await asyncio.gather(self.ask(thread), self.ask(other))
        await asyncio.gather(self.go_on(thread, threads), self.go_on(other, threads))

    async def edit(self, thread: Thread, threads: list[Thread]) -> None:
        at = self.dice.randrange(len(thread.messages))
        edited = [dict(message) for message in thread.messages]
        edited[at]["content"] = f"{edited[at].get('content') or ''} edited"
        other = Thread(edited, thread.tools)
        if edited[-1]["role"] != "assistant":
            threads.append(other)
            await self.ask(other)

    async def change_tools(self, thread: Thread, threads: list[Thread]) -> None:
        thread.tools = TOOLS[: self.dice.randrange(3)]
        await self.ask(thread)

    async def title(self, thread: Thread, threads: list[Thread]) -> None:
        await self.ask(Thread([{"role": "user", "content": f"A title for: {words(self.dice)}"}], ()))

    async def complete_text(self, thread: Thread, threads: list[Thread]) -> None:
        answer = await self.call(Call("completions", "m", prompt=self.text))
        if answer is not None:
            self.text += answer.choices[0].message["content"] + self.dice.choice((" and", "\n", "🙂 "))

    def call_of(self, thread: Thread) -> Call:
        return Call("chat", "m", tuple(thread.messages), tools=thread.tools, hints=thread.hints)

    async def ask(self, thread: Thread, call: Call | None = None) -> bool:
        """True if there was an answer."""
        call = call or self.call_of(thread)
        if self.dice.random() < 0.15:
            options: list[dict[str, Any]] = [
                {"n": 2}, {"stop": ("END", "}")}, {"max_tokens": 3}, {"parallel_tool_calls": False},
                {"tool_choice": "none"}, {"sampling": {"temperature": 0.1}},
            ]  # fmt: skip
            call = replace(call, **self.dice.choice(options))
        if (answer := await self.call(call)) is not None:
            thread.call, thread.reply = call, self.dice.choice(answer.choices).message
        return answer is not None

    async def call(self, call: Call) -> Answer | None:
        try:
            answer = await self.session.answer(call)
        except CallRefused as refused:
            assert refused.code in ("session_ended", "context_length_exceeded", "invalid_request"), refused
            return None
        self.see(answer, call)
        return answer

    def see(self, answer: Answer, call: Call) -> None:
        is_trained = self.session._options.trained_calls(call)
        for choice in answer.choices:
            self.seen |= dict.fromkeys(choice.logprobs.tolist(), is_trained)

    def unsee(self, answer: Answer, *, unsure: bool = False) -> None:
        for choice in answer.choices:
            for one in choice.logprobs.tolist():
                del self.seen[one]
                if unsure:
                    self.unsure.add(one)

    def mangled(self, message: Message) -> dict[str, Any]:
        """As clients send it back."""
        echo: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        if message.get("reasoning_content") and self.dice.random() < 0.5:
            echo["reasoning_content"] = message["reasoning_content"] + self.dice.choice(("", "\n", ""))
        if self.dice.random() < 0.5:
            echo["content"] = (echo["content"] or "").strip() or self.dice.choice(("", None))
        if message.get("tool_calls"):
            echo["tool_calls"] = [self.mangled_call(call) for call in message["tool_calls"]]
            if self.dice.random() < 0.2:
                echo["content"] = None
        return echo

    def mangled_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if isinstance(function["arguments"], dict):
            function["arguments"] = dict(reversed(list(function["arguments"].items())))
        if self.dice.random() < 0.5:
            function["arguments"] = json.dumps(function["arguments"])
        renamed = f"toolu_{self.dice.randrange(10**9)}" if self.dice.random() < 0.5 else call["id"]
        return {"function": function, "id": renamed, "type": "function"}

    def split(self, echo: dict[str, Any]) -> list[dict[str, Any]]:
        """Some send a text and its calls as two messages."""
        if echo.get("tool_calls") and echo.get("content") and self.dice.random() < 0.3:
            return [
                {**echo, "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": echo["tool_calls"]},
            ]
        return [echo]


def user(dice: random.Random) -> dict[str, str]:
    return {"role": "user", "content": words(dice)}


def words(dice: random.Random) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randrange(1, 5)))


async def episode(seed: int, tokenizer: ChatTokenizer, format_of: FormatOf) -> Counter[str]:
    """One episode, compared with both ledgers. Returns what happened in it, counted."""
    dice = random.Random(seed)
    engine = WildEngine(tokenizer, lambda prompt, seed: "")
    policy = policy_of(engine, tokenizer, max_tokens=200)
    options = SessionOptions(
        history=dice.choice(("as_sampled", "as_sampled", "as_sent")),
        trained_calls=trained_calls(dice.choice(("all", "all", "with_tools"))),
    )
    session = Session(policy, format_of(policy, tokenizer), options, seed=seed, name=str(seed))
    client = Client(session, dice)
    if dice.random() < 0.1:  # the episode ends while calls are in flight
        running = asyncio.create_task(client.run())
        for _ in range(dice.randrange(60)):
            await asyncio.sleep(0)
        session.end("the limit of time")
        await running
    else:
        await client.run()
        while session._pending:  # of clients that have gone
            await asyncio.sleep(0)
        session.end("the program has exited")
    return compare(session, engine, client.seen, client.unsure) + client.done


def compare(session: Session, engine: LedgerEngine, seen: Mapping[float, bool], unsure: set[float]) -> Counter[str]:
    """Compare the session's record with what the engine sampled and what the client saw."""
    record = session.record()
    entries = {one: (entry, at) for entry in engine.ledger for at, one in enumerate(entry.logprobs.tolist())}
    trained: Counter[float] = Counter()
    for number, rollout in enumerate(record.rollouts):
        assert rollout.logprobs is not None
        assert (rollout.trained == rollout.sampled).all()
        for at in np.flatnonzero(rollout.trained):
            logprob = float(rollout.logprobs[at])
            entry, within = entries[logprob]
            trained[logprob] += 1
            assert rollout.tokens[at] == entry.tokens[within], "another id than was sampled"
            assert rollout.policy_version[at] == entry.versions[within], "another version than it was sampled from"
            if within == 0:
                assert rollout.tokens[:at].tolist() == entry.prompt.tolist(), (
                    "after another prompt than it was sampled after"
                )
            else:
                assert rollout.trained[at - 1] and float(rollout.logprobs[at - 1]) == float(entry.logprobs[within - 1])
        assert not rollout.logprobs[~rollout.trained].any()
        spans = [span for span in record.account.spans if span.rollout == number]
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == len(rollout.tokens)
    assert set(trained.values()) <= {1}, "a token is trained twice"
    expected = {one for one, is_trained in seen.items() if is_trained}
    assert expected <= trained.keys(), "what the client saw is not trained"
    assert trained.keys() <= expected | unsure, "what the client never saw, or threw away, is trained"
    dropped = [int(one) for part in record.account.dropped for one in part.tokens]
    if record.rollouts:
        check_episode(Episode(record.rollouts, 0.0, metrics=record.metrics, messages=record.messages))
    metrics = record.metrics
    assert metrics["agent/trained_tokens"] == len(trained)
    untrained = {
        span.turn: span.stop - span.start for span in record.account.spans if span.why == "its call is not trained"
    }
    recorded = len(trained) + len(dropped) + sum(untrained.values())
    sampled = sum(len(entry.tokens) for entry in engine.ledger)
    assert metrics["agent/sampled_tokens"] == recorded, "a token has no fate, or two"
    assert recorded <= sampled, "more than was sampled"
    assert recorded == sampled or session.ended == "the limit of time", "something that was sampled is not recorded"
    return Counter(
        episodes=1,
        sampled=sampled,
        trained=len(trained),
        dropped=len(dropped),
        rollouts=len(record.rollouts),
        orphans=record.account.orphans,
        branches=record.account.branches,
        **Counter(f"begun_{call.beginning}" for call in record.calls),
    )
