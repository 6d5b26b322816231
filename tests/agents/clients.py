"""The clients: how each is started as a user would start it, and with which of its tools it completes the task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_agent_api.calls import Dialect
from atropos_agent_api.tokens.token_tree import Beginning

PYTHON, PINNED, NODE = ".venv-agents", ".venv-agents-pinned", ".venv-agents-node"
WRITE = ("write_file", {"path": "answer.txt", "content": "42"})
SHELL = "printf 42 > answer.txt"
DONE = "The answer is in answer.txt."


@dataclass(frozen=True)
class Client:
    """`package` is as on the package index; `calls` are those of tools that complete the task, a turn each; `options` are
    those of the environment `agent`."""

    package: str
    environment: str
    dialect: Dialect
    is_streamed: bool
    options: Mapping[str, Any]
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = (WRITE,)
    says_done: bool = True  # in words, once the tools have been called
    beginnings: tuple[Beginning, ...] = ("new", "extended")  # what the record has of each of its calls
    rollouts: int = 1
    seen: str = ""  # what else it does, for docs/agent-clients.md

    @property
    def replies(self) -> tuple[str, ...]:
        """What the policy says, turn by turn, in the model's format."""
        calls = [
            f"<think>I multiply.</think>\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in self.calls
        ]
        return (*calls, DONE) if self.says_done else tuple(calls)


@dataclass(frozen=True)
class Program:
    """One of `programs/`."""

    file: str
    environment: str = PYTHON
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        python = f"{{here}}/{self.environment}/bin/python"
        return {"command": [python, f"{{here}}/tests/agents/programs/{self.file}", "{task.prompt}"], "env": self.env}


CLIENTS = {
    "openai-chat": Client("openai", PYTHON, "chat", True, Program("openai_chat.py").options),
    "openai-responses": Client("openai", PYTHON, "responses", True, Program("openai_responses.py").options),
    "openai-agents": Client(
        "openai-agents", PYTHON, "responses", False, Program("openai_agents.py").options,
        seen="its functions are `strict`, which is left out",
    ),
    "anthropic": Client(
        "anthropic", PYTHON, "messages", True, Program("anthropic_messages.py").options,
        seen="counts its tokens first; sends its key as a bearer",
    ),
    "langgraph": Client("langgraph", PYTHON, "chat", False, Program("langgraph_agent.py").options),
    "langgraph-branches": Client(
        "langgraph", PYTHON, "chat", False, Program("langgraph_branches.py").options,
        beginnings=("new", "extended", "extended"), rollouts=2,
        seen="two nodes continue one history at once: the reply that they share is trained in one of the two",
    ),
    "smolagents": Client(
        "smolagents", PYTHON, "chat", False, Program("smolagents_agent.py").options,
        calls=(WRITE, ("final_answer", {"answer": "42"})), says_done=False, beginnings=("new", "edited"), rollouts=2,
        seen="must call a tool (`tool_choice`), so the server begins each reply for it; two stop texts; writes the calls that it made "
        "into its history as text, so each turn is a separate rollout",
    ),
    "pydantic-ai": Client(
        "pydantic-ai-slim", PYTHON, "chat", False, Program("pydantic_ai_agent.py").options,
        seen="its functions are `strict`, which is left out",
    ),
    "litellm": Client(
        "litellm", PINNED, "chat", False, Program("litellm_agent.py", PINNED, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}).options,
        seen="echoes `provider_specific_fields` with a reply",
    ),
    "mini-swe-agent": Client(
        "mini-swe-agent", PINNED, "chat", False,
        {
            "command": [f"{{here}}/{PINNED}/bin/mini", "--model=openai/{model}", "--task={task.prompt}", "--yolo",
                        "--cost-limit=0", "--exit-immediately", "--output={home}/trajectory.json"],
            "env": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        },
        calls=(("bash", {"command": SHELL}), ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
        says_done=False, seen="over litellm; ends with a command, without a call of the model",
    ),
    "hermes-agent": Client(
        "hermes-agent", PINNED, "chat", True,
        {
            "command": [f"{{here}}/{PINNED}/bin/hermes", "chat", "--quiet", "--yolo", "--toolsets=terminal,file",
                        "--query={task.prompt}"],
            "files": {"{home}/.hermes/config.yaml": {"template": "tests/agents/files/hermes.yaml"}},
        },
        calls=(("terminal", {"command": SHELL}),),
        seen="looks for the addresses of other servers (`/api/show`) first, and takes a 404; sends the arguments of its calls "
        "back with their keys in order",
    ),
    "codex": Client(
        "@openai/codex", NODE, "responses", True,
        {
            "command": [f"{{here}}/{NODE}/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "{task.prompt}"],
            "files": {"{home}/.codex/config.toml": {"template": "tests/agents/files/codex.toml"}},
        },
        calls=(("exec_command", {"cmd": SHELL}),),
        seen="tools in a namespace; says its agent's name, `/root`, and the kind of request in a header",
    ),
    "opencode": Client(
        "opencode-ai", NODE, "chat", True,
        {
            "command": [f"{{here}}/{NODE}/node_modules/.bin/opencode", "run", "{task.prompt}"],
            "files": {"opencode.json": {"template": "tests/agents/files/opencode.json"}},
            "env": {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        },
        calls=(("bash", {"command": SHELL}),), beginnings=("new", "new", "extended"), rollouts=2,
        seen="wants a title in a call without tools, which `trained = \"with_tools\"` leaves out",
    ),
}  # fmt: skip
