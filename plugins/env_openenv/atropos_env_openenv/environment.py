"""The environment `openenv`: episodes at a server, each in its own session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atropos_core import console
from atropos_core.errors import ConfigError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Message
from atropos_env_kit.stepping import Stepped, SteppedEnvironment, Turn, raised_on_action
from atropos_env_openenv.config import OpenenvOptions
from atropos_env_openenv.sessions import OF_ACTIONS, RAISED, Refused, Session, Sessions


class OpenEnv(SteppedEnvironment):
    """An episode's score is the sum of its steps' rewards."""

    def __init__(self, options: OpenenvOptions, context: RunContext) -> None:
        if context.deterministic:
            raise ConfigError(
                "a run with an OpenEnv server cannot be deterministic: the server limits its sessions, and draws its own random numbers.",
                remedy="Leave --deterministic out.",
            )
        super().__init__(options.url, options)
        self._options = options
        self._sessions = Sessions(options)

    async def open(self) -> None:
        if self.at_once is not None:
            return
        try:
            self.at_once = await self._sessions.open()
            session = await self._sessions.take()
            first, again = [await session.request("reset", {"seed": 1}) for _ in range(2)]
            if first != again:
                console.warn(f"{self.name} ignores the seed of a reset: the rollouts of a group begin differently")
            if self._options.tools:
                self.tools = await listed(session)
            self._sessions.give_back(session)
        except BaseException:
            await self._sessions.close()
            raise

    def stepped(self) -> Stepped:
        return Remote(self._sessions, self._options)

    async def close(self) -> None:
        await super().close()
        await self._sessions.close()


class Remote(Stepped):
    """An episode, which holds one session from beginning to end."""

    def __init__(self, sessions: Sessions, options: OpenenvOptions) -> None:
        self._sessions = sessions
        self._options = options
        self._session: Session | None = None
        self._raised = ""  # the error that the last step's action raised

    async def reset(self, seed: int) -> Turn:
        self._session = await self._sessions.take()
        answer = await self._session.request("reset", {"seed": seed})
        return Turn(0, [user(text_of(answer, self._options.shown))], ended=bool(answer.get("done")))

    async def step(self, reply: Message, action: str) -> Turn:
        self._raised = ""
        if self._options.tools:
            return await self._call(reply.get("tool_calls") or [])
        assert self._options.field is not None, "the options say so"
        answer = await self._take({**self._options.fields, self._options.field: action})
        return Turn(0, [user(text_of(answer, self._options.shown))], *ending(answer), self._raised)

    async def _call(self, calls: Sequence[Mapping[str, Any]]) -> Turn:
        """Run all calls of a reply in order, each answered by a message; calls after the end of the episode get none."""
        messages: list[Message] = []
        total, ended = 0.0, not calls
        for call in calls:
            wanted = call["function"]
            answer = await self._take(
                {"type": "call_tool", "tool_name": wanted["name"], "arguments": dict(wanted["arguments"])}
            )
            messages.append({"role": "tool", "content": text_of(answer, self._options.shown)})
            [reward], ended = ending(answer)
            total += reward
            if ended:
                break
        return Turn(0, messages, [total], ended, self._raised)

    async def _take(self, action: dict[str, Any]) -> dict[str, Any]:
        """The server's answer. If it cannot read the action, or the environment raises on it, the answer shows the error to the policy, and
        the step has no reward."""
        assert self._session is not None, "it has begun"
        try:
            return await self._session.request("step", action)
        except Refused as error:
            if error.code not in OF_ACTIONS:
                raise
            said = Exception.__str__(error)
            if error.code == RAISED:
                self._raised = said
                self._sessions.tell_once(raised_on_action(self._options.url, said))
            return {"observation": {self._options.shown or "error": f"error: {said}"}}

    async def close(self) -> None:
        """Give the session back, for the next episode."""
        if self._session is not None:
            self._sessions.give_back(self._session)
            self._session = None


async def listed(session: Session) -> list[dict[str, Any]]:
    """The server's tools, in OpenAI's form. Raises ConfigError if it has none."""
    try:
        answer = await session.request("step", {"type": "list_tools"})
    except Refused as error:
        raise ConfigError(f"{error}: it does not have tools.", remedy="Leave tools out, and give field.") from error
    return [
        {
            "type": "function",
            "function": {"name": one["name"], "description": one["description"], "parameters": one["input_schema"]},
        }
        for one in answer["observation"].get("tools", [])
    ]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def text_of(answer: Mapping[str, Any], shown: str | None) -> str:
    observation = answer.get("observation") or {}
    value = observation if shown is None else observation.get(shown, "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def ending(answer: Mapping[str, Any]) -> tuple[list[float], bool]:
    """The reward of a step, and whether it ended the episode."""
    return [float(answer.get("reward") or 0.0)], bool(answer.get("done"))
