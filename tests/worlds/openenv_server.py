"""A server of OpenEnv on this machine, with one of three environments: python openenv_server.py KIND PORT SESSIONS

echo     the one that OpenEnv's own template makes (`openenv init`)
number   a number that follows the seed is guessed in four steps; 98 raises, 99 hangs
tools    tools of MCP: look(where), which finds something in the box and ends the episode
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import openenv
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

TEMPLATE = Path(openenv.__file__).parent / "cli/templates/openenv_env"


class Guess(Action):
    guess: int
    note: str = ""


class Hint(Observation):
    hint: str = ""


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed: int | None = None) -> Hint:
        self.number, self.steps = random.Random(seed).randrange(10), 0
        return Hint(hint=f"Guess the number that is {'odd' if self.number % 2 else 'even'}.")

    def step(self, action: Guess) -> Hint:
        if action.guess == 98:
            raise OSError("the dice are gone")
        if action.guess == 99:
            time.sleep(3)
        self.steps += 1
        if action.guess == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        hint = "higher" if action.guess < self.number else "lower"
        return Hint(hint=hint + action.note, reward=0.0, done=self.steps == 4)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Unseeded(Number):
    def reset(self) -> Hint:
        return Hint(hint=f"Guess within {time.monotonic_ns()} turns.")


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("house")

        @server.tool
        def look(where: str) -> str:
            """Look somewhere."""
            return f"something in the {where}" if where == "box" else "nothing"

        super().__init__(server)

    def reset(self, seed: int | None = None) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("call a tool")

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        found = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.arguments.get("where") == "box":
            found.reward, found.done = 1.0, True
        return found

    @property
    def state(self) -> State:
        return State()


def echo() -> tuple[type, type, type]:
    """Environment, action and observation of the template, with its names filled in."""
    names = {"__ENV_CLASS_NAME__": "Echo", "__ENV_NAME__": "echo", "__ENV_TITLE_NAME__": "Echo"}
    for source, made in (("models.py", "models"), ("server/__ENV_NAME___environment.py", "echo_environment")):
        text = (TEMPLATE / source).read_text()
        for placeholder, name in names.items():
            text = text.replace(placeholder, name)
        module = sys.modules[made] = ModuleType(made)
        exec(text, vars(module))
    models = sys.modules["models"]
    return sys.modules["echo_environment"].EchoEnvironment, models.EchoAction, models.EchoObservation


KINDS = {
    "echo": echo,
    "number": lambda: (Number, Guess, Hint),
    "unseeded": lambda: (Unseeded, Guess, Hint),
    "tools": lambda: (Tools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    environment, action, observation = KINDS[kind]()
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
