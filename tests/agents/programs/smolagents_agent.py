"""A tool-calling agent of smolagents: one tool, and its own `final_answer` that ends it."""

import os
import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def write_file(path: str, content: str) -> str:
    """Write a text file in the work directory.

    Args:
        path: where the file goes
        content: what it holds
    """
    Path(path).write_text(content)
    return "written"


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[write_file], model=model, max_steps=4).run(sys.argv[1]))
