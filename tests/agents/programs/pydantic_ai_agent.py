"""An agent of pydantic-ai over chat completions: one plain tool."""

import sys
from pathlib import Path

from pydantic_ai import Agent

agent = Agent("openai-chat:policy")


@agent.tool_plain
def write_file(path: str, content: str) -> str:
    """Write a text file in the work directory."""
    Path(path).write_text(content)
    return "written"


print(agent.run_sync(sys.argv[1]).output)
