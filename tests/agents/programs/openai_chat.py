"""An agent on the openai SDK's chat completions, streamed: one tool, a loop until the model calls none."""

import json
import sys
from pathlib import Path

from openai import OpenAI

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
    client = OpenAI()
    messages = [{"role": "user", "content": task}]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[WRITE_FILE]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            Path(arguments["path"]).write_text(arguments["content"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})


main(sys.argv[1])
