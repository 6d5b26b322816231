"""An agent on litellm's completion(): one tool, a loop until the model calls none."""

import json
import sys
from pathlib import Path

import litellm

WRITE_FILE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a text file in the work directory.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}


def main(task: str) -> None:
    messages = [{"role": "user", "content": task}]
    while True:
        message = litellm.completion("openai/policy", messages=messages, tools=[WRITE_FILE]).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            Path(arguments["path"]).write_text(arguments["content"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})


main(sys.argv[1])
