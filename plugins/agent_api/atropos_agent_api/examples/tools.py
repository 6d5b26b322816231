"""An agent with one tool, on OpenAI's chat completions. It knows nothing of Atropos.

The model may call `calculate` as often as it likes. Its last message is the answer.
"""

import json
import operator
import os
import re
from typing import Any

from openai import OpenAI

CALCULATE: Any = {  # a schema in OpenAI's form
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "One operation (+, -, * or /) on two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
ADVICE = "Use the tool for each operation. End with the final number after ####."
OPERATION = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([-+*/])\s*(-?\d+(?:\.\d+)?)\s*")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
MOST_CALLS = 8


def calculate(expression: str) -> str:
    """The tool: its result, or its error, which the model may read and try again."""
    found = OPERATION.fullmatch(expression)
    if found is None:
        return "error: not one operation on two numbers"
    if found[2] == "/" and not float(found[3]):
        return "error: division by zero"
    return f"{SIGNS[found[2]](float(found[1]), float(found[3])):.12g}"


def result_of(call: Any) -> str:
    try:
        return calculate(str(json.loads(call.function.arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return 'error: calculate needs {"expression": "..."}'


def main(task: dict[str, Any]) -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY from its environment
    messages: list[Any] = [{"role": "system", "content": ADVICE}, {"role": "user", "content": task["prompt"]}]
    for _ in range(MOST_CALLS):
        model = os.environ.get("MODEL", "policy")
        reply = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATE]).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result_of(call)} for call in reply.tool_calls]


if __name__ == "__main__":  # by hand, against any server
    main({"prompt": input("What is the question? ")})
