"""An agent on the anthropic SDK's messages, streamed: one tool, a loop until the model calls none."""

import sys
from pathlib import Path

from anthropic import Anthropic

WRITE_FILE = {
    "name": "write_file",
    "description": "Write a text file in the work directory.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
}


def main(task: str) -> None:
    client = Anthropic()
    messages = [{"role": "user", "content": task}]
    counted = client.messages.count_tokens(model="policy", messages=messages, tools=[WRITE_FILE])
    print("prompt tokens:", counted.input_tokens)
    while True:
        with client.messages.stream(model="policy", max_tokens=256, messages=messages, tools=[WRITE_FILE]) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            print("".join(block.text for block in message.content if block.type == "text"))
            return
        results = []
        for call in calls:
            Path(call.input["path"]).write_text(call.input["content"])
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": "written"})
        messages.append({"role": "user", "content": results})


main(sys.argv[1])
