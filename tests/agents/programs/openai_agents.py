"""An agent of openai-agents: its own loop, its own choice of API (responses), one function tool."""

import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def write_file(path: str, content: str) -> str:
    """Write a text file in the work directory."""
    Path(path).write_text(content)
    return "written"


set_tracing_disabled(True)  # traces would be sent to OpenAI
agent = Agent(name="writer", instructions="Use the tool to do what is asked.", tools=[write_file], model="policy")
print(Runner.run_sync(agent, sys.argv[1]).final_output)
