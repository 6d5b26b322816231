"""An agent with a calculator, built on OpenAI's SDK. It knows nothing of Atropos.

The model writes sums. When it writes `=`, the agent works out the expression before it and lets the model continue.
"""

import os
import re
from typing import Any

from openai import OpenAI

SUM = re.compile(r"(\d+) ?([-+*/]) ?(\d+) ?$")
PROMPT = "<|user|>{question}<|assistant|>"  # the tiny policy's format
MOST_TURNS = 6


def calculate(a: int, sign: str, b: int) -> str:
    """The tool."""
    if sign == "/":
        return str(a // b) if b else "?"
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def main(task: dict[str, Any]) -> None:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY from its environment
    text = PROMPT.format(question=task["prompt"])
    for _ in range(MOST_TURNS):
        reply = (
            client.completions.create(model=os.environ.get("MODEL", "policy"), prompt=text, stop=["="]).choices[0].text
        )
        text += reply
        found = SUM.search(reply)
        if found is None:
            break
        text += "=" + calculate(int(found[1]), found[2], int(found[3]))
    print(text.rpartition("<|assistant|>")[2])  # noqa: T201 - the answer


if __name__ == "__main__":  # by hand, against any server
    main({"prompt": input("What is the question? ")})
