"""The clients: how each is started as a user would start it, and with which of its tools it completes the task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    api: str
    options: Mapping[str, Any]
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = (WRITE,)
    says_done: bool = True  # in words, once the tools have been called

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
    "openai-chat": Client("openai", PYTHON, "chat, streamed", Program("openai_chat.py").options),
    "openai-responses": Client("openai", PYTHON, "responses, streamed", Program("openai_responses.py").options),
    "openai-agents": Client("openai-agents", PYTHON, "responses", Program("openai_agents.py").options),
    "anthropic": Client("anthropic", PYTHON, "messages, streamed, and count_tokens", Program("anthropic_messages.py").options),
    "langgraph": Client("langgraph", PYTHON, "chat", Program("langgraph_agent.py").options),
    "smolagents": Client(
        "smolagents", PYTHON, "chat, tool_choice required, stop texts", Program("smolagents_agent.py").options,
        calls=(WRITE, ("final_answer", {"answer": "42"})), says_done=False,
    ),
    "pydantic-ai": Client("pydantic-ai-slim", PYTHON, "chat", Program("pydantic_ai_agent.py").options),
    "litellm": Client(
        "litellm", PINNED, "chat", Program("litellm_agent.py", PINNED, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}).options,
    ),
    "mini-swe-agent": Client(
        "mini-swe-agent", PINNED, "chat",
        {
            "command": [f"{{here}}/{PINNED}/bin/mini", "--model=openai/{model}", "--task={task.prompt}", "--yolo",
                        "--cost-limit=0", "--exit-immediately", "--output={home}/trajectory.json"],
            "env": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        },
        calls=(("bash", {"command": SHELL}), ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
        says_done=False,
    ),
    "hermes-agent": Client(
        "hermes-agent", PINNED, "chat, streamed",
        {
            "command": [f"{{here}}/{PINNED}/bin/hermes", "chat", "--quiet", "--yolo", "--toolsets=terminal,file",
                        "--query={task.prompt}"],
            "files": {"{home}/.hermes/config.yaml": {"template": "tests/agents/files/hermes.yaml"}},
        },
        calls=(("terminal", {"command": SHELL}),),
    ),
    "codex": Client(
        "@openai/codex", NODE, "responses, streamed",
        {
            "command": [f"{{here}}/{NODE}/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "{task.prompt}"],
            "files": {"{home}/.codex/config.toml": {"template": "tests/agents/files/codex.toml"}},
        },
        calls=(("exec_command", {"cmd": SHELL}),),
    ),
    "opencode": Client(
        "opencode-ai", NODE, "chat, streamed",
        {
            "command": [f"{{here}}/{NODE}/node_modules/.bin/opencode", "run", "{task.prompt}"],
            "files": {"opencode.json": {"template": "tests/agents/files/opencode.json"}},
            "env": {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        },
        calls=(("bash", {"command": SHELL}),),
    ),
}  # fmt: skip
