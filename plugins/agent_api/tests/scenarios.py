"""Actions of clients, one at a time, and a picture of the session after each: docs/agent-tokens.md shows them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from atropos_agent_api.calls import Call
from atropos_agent_api.sessions.options import SessionOptions, trained_calls
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.account import name_of
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_agent_api.tokens.token_tree import Reply, Turn
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Message
from plugins.agent_api.tests.families import write
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from plugins.agent_api.tests.models import qwen_like

WEATHER = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": {"type": "object"}}}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text()


class Agent:
    """Replies are the last message in capitals, numbered if the same prompt comes again."""

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        self.engine = LedgerEngine(tokenizer, self._reply)
        policy = policy_of(self.engine, tokenizer)
        self.session = Session(
            policy, TemplateFormat(policy, tokenizer), SessionOptions(**options), seed=1, name="page", prompt="plan"
        )
        self._prompts: Counter[str] = Counter()

    def _reply(self, prompt: str, seed: int) -> str:
        self._prompts[prompt] += 1
        last = prompt.split("<|im_start|>")[-2].partition("\n")[2].removesuffix("<|im_end|>\n")
        if "weather?" in last:
            return CALLS
        again = self._prompts[prompt]
        thought = "<think>hm</think>" if "think" in last else ""
        return thought + last.upper() + (str(again) if again > 1 else "")

    async def ask(self, *messages: Message | str, **more: Any) -> dict[str, Any]:
        return (await self.ask_all(*messages, **more))[0]

    async def ask_all(self, *messages: Message | str, **more: Any) -> list[dict[str, Any]]:
        said = tuple({"role": "user", "content": one} if isinstance(one, str) else one for one in messages)
        answer = await self.session.answer(Call("chat", "m", said, **more))
        return [dict(choice.message) for choice in answer.choices]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


async def continued(agent: Agent) -> None:
    plan = await agent.ask("plan")
    await agent.ask("plan", plan, "go on")


async def echoed(agent: Agent) -> None:
    call = await agent.ask("weather?", tools=(WEATHER,))
    function = {"arguments": '{"days": 2.0, "city": "Oslo"}', "name": "weather"}
    echo = {"role": "assistant", "content": None, "tool_calls": [{"id": "toolu_7", "function": function}]}
    assert call["tool_calls"][0]["id"] != "toolu_7"
    await agent.ask("weather?", echo, {"role": "tool", "tool_call_id": "toolu_7", "content": "wet"}, tools=(WEATHER,))


async def forked(agent: Agent) -> None:
    plan = await agent.ask("plan")
    await agent.ask("plan", plan, "left")
    await agent.ask("plan", plan, "right")


async def sub_agents(agent: Agent) -> None:
    plan = await agent.ask(system("lead"), "plan")
    one, _ = await asyncio.gather(agent.ask(system("read"), "book"), agent.ask(system("write"), "page"))
    await agent.ask(system("read"), "book", one, "more")
    await agent.ask(system("lead"), "plan", plan, "done")


async def identical(agent: Agent) -> None:
    await asyncio.gather(agent.ask("guess"), agent.ask("guess"))


async def retried(agent: Agent) -> None:
    await agent.ask("plan")
    plan = await agent.ask("plan", hints={"retry": "1"})
    await agent.ask("plan", plan, "go on")


async def gone(agent: Agent) -> None:
    waiting = asyncio.create_task(agent.ask("plan"))
    while not agent.session._pending:  # its prompt is rendered in a thread
        await asyncio.sleep(0)
    waiting.cancel()  # the client closes its connection
    await agent.ask("other")


async def cut_stream(agent: Agent) -> None:
    plan = await agent.ask("plan")
    agent.session.not_delivered(name_of(agent.session._tree.turns[0]))  # the stream broke behind what was shown
    await agent.ask("plan", plan, "go on")


async def compacted(agent: Agent) -> None:
    plan = await agent.ask("plan")
    summary = await agent.ask("plan", plan, "sum up")
    await agent.ask(f"so far: {summary['content']}", hints={"kind": "compaction"})


async def edited(agent: Agent) -> None:
    plan = await agent.ask("plan")
    await agent.ask("plan", plan, "go on")
    await agent.ask("plan", {**plan, "content": "Another plan"}, "go on")


async def other_tools(agent: Agent) -> None:
    plan = await agent.ask("plan")
    await agent.ask("plan", plan, "go on", tools=(WEATHER,))


async def as_sent(agent: Agent) -> None:
    plan = await agent.ask("think")
    await agent.ask("think", plan, "go on")


async def auxiliary(agent: Agent) -> None:
    await agent.ask("a title for: plan")
    await agent.ask("plan", tools=(WEATHER,))


async def beside(agent: Agent) -> None:
    await agent.ask("hello?")
    plan = await agent.ask(system("lead"), "plan", tools=(WEATHER,))
    await agent.ask(system("name it"), "plan")
    await agent.ask(system("lead"), f"so far: {plan['content']}", tools=(WEATHER,))


async def several(agent: Agent) -> None:
    _, second = await agent.ask_all("guess", n=2)
    await agent.ask("guess", second, "go on")


async def stopped(agent: Agent) -> None:
    await agent.ask("one two three", stop=("TWO",))


Scenario = Callable[[Agent], Awaitable[None]]
SCENARIOS: Mapping[str, tuple[Scenario, dict[str, Any]]] = {
    "A request continues what it repeats": (continued, {}),
    "An echo in other words is the same": (echoed, {}),
    "Two continuations are two branches": (forked, {}),
    "Sub-agents are separate roots": (sub_agents, {}),
    "Two identical calls at once are two branches": (identical, {}),
    "A header makes no orphan": (retried, {}),
    "A client that goes away leaves an orphan": (gone, {}),
    "A reply that was continued counts, even if the stream broke": (cut_stream, {}),
    "A compaction starts again": (compacted, {}),
    "An edited history is another one": (edited, {}),
    "Other tools are another prompt": (other_tools, {}),
    "As sampled, or as sent": (as_sent, {"history": "as_sampled"}),
    "A template that strips reasoning forks": (as_sent, {"history": "as_sent"}),
    "Calls that are not trained": (auxiliary, {"trained_calls": trained_calls("with_tools")}),
    "Calls outside the task": (beside, {"only_main": True}),
    "Several choices are siblings": (several, {}),
    "A stop text ends a reply": (stopped, {}),
}


async def drawn(name: str, directory: Path) -> str:
    """The picture of a scenario."""
    scenario, options = SCENARIOS[name]
    tokenizer = write("qwen3", directory, QWEN3) if scenario is as_sent else qwen_like(directory)
    agent = Agent(tokenizer, **options)
    await scenario(agent)
    while agent.session._pending:
        await asyncio.sleep(0)
    return picture(agent.session)


def picture(session: Session) -> str:
    """The tree of turns, with what became of each reply, and the rollouts: * is what they train."""
    record = session.record()
    fates: dict[Reply, str] = {}
    lines = []
    for number in range(len(record.rollouts)):
        spans = [span for span in record.account.spans if span.rollout == number and span.why != "rendered"]
        chain = _chain(session, number)
        fates |= {
            reply: f"trained in rollout {number}"
            for reply, span in zip(chain, spans, strict=True)
            if span.fate == "trained"
        }
        said = [f"{_said(reply.turn)} {_label(reply.message)}" for reply in chain]
        stars = ["*" if span.fate == "trained" else "" for span in spans]
        lines.append(f"rollout {number}: {'  '.join(map(''.join, zip(said, stars, strict=True)))}")
    dropped = {part.turn: part.why for part in record.account.dropped}
    rows: list[tuple[str, str]] = []

    def draw(turn: Turn, lead: str, below: str) -> None:
        for reply in turn.replies:
            name = name_of(turn)
            fate = fates.get(reply) or f"dropped: {dropped[name]}"
            if len(reply.cut):
                fate += f", {len(reply.cut)} tokens past a stop dropped"
            rows.append((f"{lead}{_said(turn)} → {_label(reply.message)}", fate))
            children = [child for child in session._tree.turns if child.parent is reply and child.replies]
            for at, child in enumerate(children):
                last = at == len(children) - 1
                draw(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))

    for turn in session._tree.turns:
        if turn.parent is None and turn.replies:
            draw(turn, "", "")
    width = max(len(left) for left, _ in rows) + 3
    return "\n".join([*(f"{left:{width}}{fate}" for left, fate in rows), "", *lines]).rstrip()


def _chain(session: Session, number: int) -> list[Reply]:
    """Of a rollout, by its conversation."""
    conversation = session.record().account.conversations[number]
    for turn in session._tree.turns:
        for reply in turn.replies:
            if reply.conversation == conversation:
                return reply.chain
    raise LookupError(number)


def _said(turn: Turn) -> str:
    return ", ".join(_label(message) for message in turn.messages)


def _label(message: Message) -> str:
    if calls := message.get("tool_calls"):
        return ", ".join(f"{call['function']['name']}()" for call in calls)
    text = str(message["content"])
    marks = {"system": "[{}]", "assistant": "({})" if text != text.upper() else "{}"}
    return marks.get(message["role"], "{}").format(text)
