"""An agent on the openai SDK's responses, streamed: one tool, a loop until the model calls none."""

import json
import sys
from pathlib import Path

from openai import OpenAI

WRITE_FILE = {
    "type": "function",
    "name": "write_file",
    "description": "Write a text file in the work directory.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
}


def main(task: str) -> None:
    client = OpenAI()
    items = [{"role": "user", "content": task}]
    while True:
        with client.responses.stream(model="policy", input=items, tools=[WRITE_FILE]) as stream:
            response = stream.get_final_response()
        items += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            print(response.output_text)
            return
        for call in calls:
            arguments = json.loads(call.arguments)
            Path(arguments["path"]).write_text(arguments["content"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "written"})


main(sys.argv[1])
